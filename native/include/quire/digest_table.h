// DigestTable: from the digest of a chain of token blocks to a number. Knows nothing of what the
// numbers stand for.
//
// Digests are SipHash under a secret key, so their bits need no mixing and no client can choose
// ones that meet: a digest's place is its low half, and those that meet lie one after another.
// Always holds: at most three quarters of the places are taken, and none is free between a digest
// and the place it asked for.
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

    // The digest's number, kNone where there is none.
    int32_t find(Digest digest) const { return places_[place_of(digest)].number; }

    // Whether the digest is new and has `number` (>= 0) now; one that is known keeps its own.
    bool put(Digest digest, int32_t number);

    // Drop the digest and return its number, kNone where it has none.
    int32_t take(Digest digest);

    void clear();

    // The digest will be asked for soon: begin to read its place.
    void expect(Digest digest) const { __builtin_prefetch(&places_[digest.low & mask()]); }

  private:
    struct Place {
        Digest digest{0, 0};
        int32_t number = kNone;
    };
    static constexpr size_t kFewest = 64;

    size_t mask() const { return places_.size() - 1; }
    // Where the digest lies, or would.
    size_t place_of(Digest digest) const;
    void grow();

    std::vector<Place> places_;
    size_t size_ = 0;
};

}  // namespace quire
