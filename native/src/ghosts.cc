// Ghosts: a log of digests in order of eviction, and a table of their places in it. A log that is
// full is compacted to the digests that are still remembered, so that its memory is bounded.
// Always holds: a digest is remembered exactly while the table has its place.

#include "quire/ghosts.h"

namespace quire {

void Ghosts::add(Digest digest) {
    if (log_.size() == 2 * limit_) compact();
    if (!place_of_.put(digest, static_cast<int32_t>(log_.size()))) return;
    log_.push_back(digest);
    if (size() > limit_) forget_oldest();
}

void Ghosts::clear() {
    place_of_.clear();
    log_.clear();
    first_ = 0;
}

void Ghosts::forget_oldest() {
    while (!is_live(first_)) ++first_;
    place_of_.take(log_[first_++]);
}

void Ghosts::compact() {
    size_t kept = 0;
    for (size_t at = first_; at < log_.size(); ++at) {
        if (is_live(at)) log_[kept++] = log_[at];
    }
    log_.resize(kept);
    first_ = 0;
    place_of_.clear();
    for (size_t at = 0; at < kept; ++at) place_of_.put(log_[at], static_cast<int32_t>(at));
}

}  // namespace quire
