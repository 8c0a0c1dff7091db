// The digest table: linear probing.
// A removed digest leaves no tombstone: those displaced by it move up, so that a search ends at the
// first free slot however long the table has been in use.

#include "quire/digest_table.h"

#include <utility>

namespace quire {

size_t DigestTable::place_of(Digest digest) const {
    size_t at = digest.low & mask();
    while (places_[at].number != kNone &&
           (places_[at].digest.low != digest.low || places_[at].digest.high != digest.high)) {
        at = (at + 1) & mask();
    }
    return at;
}

bool DigestTable::put(Digest digest, int32_t number) {
    size_t at = place_of(digest);
    if (places_[at].number != kNone) return false;
    if (4 * (size_ + 1) > 3 * places_.size()) {
        grow();
        at = place_of(digest);
    }
    places_[at] = {digest, number};
    ++size_;
    return true;
}

int32_t DigestTable::take(Digest digest) {
    size_t hole = place_of(digest);
    const int32_t number = places_[hole].number;
    if (number == kNone) return kNone;
    // Entries up to the next free slot move into the hole unless it is before their home slot.
    for (size_t at = (hole + 1) & mask(); places_[at].number != kNone; at = (at + 1) & mask()) {
        const size_t wanted = places_[at].digest.low & mask();
        if (((at - wanted) & mask()) >= ((at - hole) & mask())) {
            places_[hole] = places_[at];
            hole = at;
        }
    }
    places_[hole] = {};
    --size_;
    return number;
}

void DigestTable::clear() {
    places_.assign(kFewest, {});
    size_ = 0;
}

void DigestTable::grow() {
    std::vector<Place> before(2 * places_.size());
    std::swap(before, places_);
    for (const Place& place : before) {
        if (place.number != kNone) places_[place_of(place.digest)] = place;
    }
}

}  // namespace quire
