// The history: ends of pairs count tokens from the first text on, so that they grow along the ring
// and an end that has left it is known by its number. Ends fall along a chain, so that it stops at
// the first that has left. Adding a token takes constant time: the chains of evicted ones stay.

#include "quire/token_history.h"

#include <algorithm>

namespace quire {

namespace {

constexpr int32_t kBetween = -1;  // two texts; no token id
constexpr int32_t kMaxSteps = 8 * SuffixIndex::kMaxCandidates;

// A power of two.
size_t num_buckets(size_t max_tokens) {
    size_t num = 1;
    while (num < max_tokens) num *= 2;
    return num;
}

}  // namespace

size_t TokenHistory::num_bytes(size_t max_tokens) {
    return max_tokens * (sizeof(int32_t) + sizeof(int64_t)) +
           num_buckets(max_tokens) * sizeof(int64_t);
}

void TokenHistory::push(int32_t token) {
    const auto place = static_cast<size_t>(end_++) % tokens_.size();
    tokens_[place] = token;
    previous_[place] = 0;
    if (end_ < 2 || tokens_.size() < 2) return;
    const int32_t pair[2] = {this->token(end_ - 2), token};
    if (pair[0] == kBetween || pair[1] == kBetween) return;
    int64_t& head = heads_[static_cast<size_t>(hash_of_pair(pair + 2)) & (heads_.size() - 1)];
    previous_[place] = head;
    head = end_;
}

void TokenHistory::add(const int32_t* tokens, size_t num) {
    if (num == 0) return;
    if (tokens_.empty()) {
        tokens_.assign(max_tokens_, kBetween);
        previous_.assign(max_tokens_, 0);
        heads_.assign(num_buckets(max_tokens_), 0);
    }
    const size_t kept = std::min(num, max_tokens_);
    push(kBetween);
    for (const int32_t* token = tokens + (num - kept); token < tokens + num; ++token) push(*token);
}

template <typename Found>
void TokenHistory::each_match(const int32_t* tail, int32_t tail_length, int64_t next,
                              Found found) const {
    if (tail_length < kMinMatch || tokens_.empty()) return;
    const int32_t* tail_end = tail + tail_length;
    const int64_t begin = std::max<int64_t>(end_ - static_cast<int64_t>(tokens_.size()), 0);
    const auto match_length = [this, tail_end, tail_length, begin](int64_t end) {
        ++num_compared_;
        if (end == end_ || token(end) == kBetween) return 0;  // nothing follows
        const auto most = static_cast<int32_t>(std::min<int64_t>(
            {SuffixIndex::kMaxMatch, end - begin, static_cast<int64_t>(tail_length)}));
        int32_t length = 0;
        while (length < most && token(end - 1 - length) == tail_end[-1 - length]) ++length;
        return length;
    };
    int32_t steps = 0, candidates = 0;
    if (next > begin && next < end_) {
        ++steps;
        const int32_t length = match_length(next);
        if (length >= kMinMatch && !found(Match{next, length})) return;
    }
    const size_t bucket = static_cast<size_t>(hash_of_pair(tail_end)) & (heads_.size() - 1);
    for (int64_t end = heads_[bucket]; end > begin && steps < kMaxSteps;
         end = previous_[static_cast<size_t>(end - 1) % tokens_.size()]) {
        ++steps;
        const int32_t length = match_length(end);
        if (length < kMinMatch) continue;
        if (!found(Match{end, length}) || ++candidates == SuffixIndex::kMaxCandidates) return;
    }
}

Match TokenHistory::longest_match(const int32_t* tail, int32_t tail_length, int64_t next) const {
    Match best;
    each_match(tail, tail_length, next, [&best](Match match) {
        if (match.length > best.length) best = match;
        return best.length < SuffixIndex::kMaxMatch;
    });
    return best;
}

bool TokenHistory::knows(const int32_t* tail, int32_t tail_length, int64_t next) const {
    bool any = false;
    each_match(tail, tail_length, next, [&any](Match) {
        any = true;
        return false;
    });
    return any;
}

int32_t TokenHistory::continuation(Match match, int32_t limit, int32_t* ids) const {
    int32_t count = 0;
    while (count < limit && match.end + count < end_ && token(match.end + count) != kBetween) {
        ids[count] = token(match.end + count);
        ++count;
    }
    return count;
}

}  // namespace quire
