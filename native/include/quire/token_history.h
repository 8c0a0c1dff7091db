// TokenHistory: the last tokens of texts that have ended, in a ring, found by hashed chains as in a
// SuffixIndex. The plain twin is in quire/speculative/plain_history.py. Always holds: it
// keeps at most so many tokens, the newest; a match lies in one text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quire/suffix_index.h"

namespace quire {

class TokenHistory {
  public:
    // Shorter matches with other texts mean little.
    static constexpr int32_t kMinMatch = 4;

    // At least one token.
    explicit TokenHistory(size_t max_tokens) : max_tokens_(max_tokens) {}

    size_t max_tokens() const { return max_tokens_; }
    // Places that were compared with a tail so far.
    int64_t num_compared() const { return num_compared_; }
    // The memory it takes once it has a text.
    static size_t num_bytes(size_t max_tokens);
    // Add a text; its last tokens if there are too many. The oldest tokens make room.
    void add(const int32_t* tokens, size_t num);
    // Return the longest match of the last tokens of `tail` that something follows. The place
    // `next` is compared first, and wins among equal ones: where the last match goes on; 0: none.
    Match longest_match(const int32_t* tail, int32_t tail_length, int64_t next) const;
    // Return whether longest_match finds any.
    bool knows(const int32_t* tail, int32_t tail_length, int64_t next) const;
    // Copy the tokens that follow a match to `ids`, at most `limit`; return how many there are.
    int32_t continuation(Match match, int32_t limit, int32_t* ids) const;

  private:
    template <typename Found>
    void each_match(const int32_t* tail, int32_t tail_length, int64_t next, Found found) const;
    int32_t token(int64_t at) const { return tokens_[static_cast<size_t>(at) % tokens_.size()]; }
    void push(int32_t token);

    size_t max_tokens_;
    mutable int64_t num_compared_ = 0;
    int64_t end_ = 0;                // tokens so far, with one between two texts
    std::vector<int32_t> tokens_;    // the ring; empty before the first text
    std::vector<int64_t> heads_;     // by bucket: the last end of such a pair, 0 for none
    std::vector<int64_t> previous_;  // by place in the ring: the end before it in the same bucket
};

}  // namespace quire
