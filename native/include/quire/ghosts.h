// Ghosts: digests of the blocks that were evicted last, at most `limit` of them. The plain twin is
// in quire/cache/ghosts.py. Always holds: the table has the place in the log of each digest that is
// remembered; what was taken stays in the log until its turn, or until the log is full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quire/digest_table.h"

namespace quire {

class Ghosts {
  public:
    explicit Ghosts(size_t limit) : limit_(limit) {}

    size_t limit() const { return limit_; }
    size_t size() const { return place_of_.size(); }
    bool has(Digest digest) const { return place_of_.find(digest) != DigestTable::kNone; }
    // The digest will be added or taken soon: begin to read its place.
    void expect(Digest digest) const { place_of_.expect(digest); }
    // Remember a digest, and forget the oldest beyond the limit.
    void add(Digest digest);
    // Forget the digest; return whether it was remembered.
    bool take(Digest digest) { return place_of_.take(digest) != DigestTable::kNone; }
    void clear();

  private:
    bool is_live(size_t at) const {
        return place_of_.find(log_[at]) == static_cast<int32_t>(at);
    }
    void forget_oldest();
    void compact();

    size_t limit_, first_ = 0;
    std::vector<Digest> log_;  // in order of eviction, from first_ on
    DigestTable place_of_;
};

}  // namespace quire
