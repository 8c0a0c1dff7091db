// The suffix index: a bucket of the hash table has the last place where a pair of tokens ended, and
// each place has the one before it in its bucket. The table doubles when it has as many places as
// buckets, so that learning a token takes constant time on average.

#include "quire/suffix_index.h"

#include <algorithm>

namespace quire {

namespace {

constexpr size_t kFewBuckets = 256;
// Occurrences that are looked at, those of other pairs in the same bucket included.
constexpr int32_t kMaxSteps = 8 * SuffixIndex::kMaxCandidates;

}  // namespace

uint64_t hash_of_pair(const int32_t* end) {
    const uint64_t pair = static_cast<uint64_t>(static_cast<uint32_t>(end[-2])) << 32 |
                          static_cast<uint32_t>(end[-1]);
    uint64_t mixed = (pair ^ pair >> 29) * 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93ull;
    return mixed >> 32;
}

size_t SuffixIndex::bucket(const int32_t* end) const {
    return static_cast<size_t>(hash_of_pair(end)) & (heads_.size() - 1);
}

void SuffixIndex::insert(const int32_t* text, int32_t end) {
    int32_t& head = heads_[bucket(text + end)];
    previous_[static_cast<size_t>(end)] = head;
    head = end;
}

void SuffixIndex::grow(const int32_t* text) {
    heads_.assign(std::max(kFewBuckets, 2 * heads_.size()), 0);
    const int32_t known = static_cast<int32_t>(previous_.size());
    for (int32_t end = kMinMatch; end < known; ++end) insert(text, end);
}

void SuffixIndex::learn(const int32_t* text, int32_t length) {
    for (auto end = static_cast<int32_t>(previous_.size()); end <= length; ++end) {
        if (previous_.size() >= heads_.size()) grow(text);
        previous_.push_back(0);
        if (end >= kMinMatch) insert(text, end);
    }
}

Match SuffixIndex::longest_match(const int32_t* text, const int32_t* tail, int32_t tail_length,
                                 int32_t before) const {
    if (tail_length < kMinMatch || heads_.empty()) return {};
    const int32_t* tail_end = tail + tail_length;
    const auto match_length = [text, tail_end, tail_length](int32_t end) {
        const int32_t most = std::min({kMaxMatch, end, tail_length});
        int32_t length = 0;
        while (length < most && text[end - 1 - length] == tail_end[-1 - length]) ++length;
        return length;
    };
    int32_t best = kMinMatch - 1, best_end = 0, candidates = 0, steps = 0;
    const int64_t next = kept_end_ + tail_length - kept_length_;
    if (tail_length >= kept_length_ && next < before) {
        const int32_t length = match_length(static_cast<int32_t>(next));
        if (length > best) best = length, best_end = static_cast<int32_t>(next);
        if (best == kMaxMatch) return {best_end, best};
    }
    for (int32_t end = heads_[bucket(tail_end)]; end > 0 && steps < kMaxSteps;
         end = previous_[static_cast<size_t>(end)], ++steps) {
        if (end >= before) continue;
        const int32_t length = match_length(end);
        if (length < kMinMatch) continue;  // another pair in the same bucket
        if (length > best) best = length, best_end = end;
        if (++candidates == kMaxCandidates || best == kMaxMatch) break;
    }
    return {best_end, best_end ? best : 0};
}

void SuffixIndex::keep(Match match, int32_t tail_length) {
    if (match.end) kept_end_ = match.end, kept_length_ = tail_length;
}

bool SuffixIndex::repeats(const int32_t* text, int32_t length) const {
    if (length < kMinMatch || heads_.empty()) return false;
    const int32_t last = text[length - 1], before = text[length - 2];
    int32_t steps = 0;
    for (int32_t end = heads_[bucket(text + length)]; end > 0 && steps < kMaxSteps;
         end = previous_[static_cast<size_t>(end)], ++steps) {
        if (end < length && text[end - 1] == last && text[end - 2] == before) return true;
    }
    return false;
}

void SuffixIndex::forget() {
    heads_ = {};
    previous_ = {};
    kept_end_ = kept_length_ = 0;
}

}  // namespace quire
