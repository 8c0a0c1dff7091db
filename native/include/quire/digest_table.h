// DigestTable: a hash table from the digest of a chain of token blocks to a number.
//
// Digests are SipHash under a secret key, so their bits need no mixing and no client can construct
// collisions: a digest's home slot is its low half, with linear probing. At most three quarters of
// the slots are used, and none is free between a digest and its home slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quire/hash.h"

namespace quire {

class DigestTable {
  public:
    static constexpr int32_t kNone = -1;

    DigestTable() : places_(kFewest) {}

    size_t size() const { return size_; }

    // Returns the digest's number, kNone if there is none.
    int32_t find(Digest digest) const { return places_[place_of(digest)].number; }

    // Returns whether the digest is new and now has `number` (>= 0); a known one keeps its own.
    bool put(Digest digest, int32_t number);

    // Removes the digest and returns its number, kNone if it has none.
    int32_t take(Digest digest);

    void clear();

    // Prefetches the digest's slot.
    void expect(Digest digest) const { __builtin_prefetch(&places_[digest.low & mask()]); }

  private:
    struct Place {
        Digest digest{0, 0};
        int32_t number = kNone;
    };
    static constexpr size_t kFewest = 64;

    size_t mask() const { return places_.size() - 1; }
    // Returns the slot of the digest, or the slot where it would be stored.
    size_t place_of(Digest digest) const;
    void grow();

    std::vector<Place> places_;
    size_t size_ = 0;
};

}  // namespace quire
