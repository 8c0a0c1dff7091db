// SuffixIndex: where the last tokens of a text occurred before, by hashed chains. The plain twin is
// in quire/speculative/suffix.py, which describes the choice. Always holds: matches are compared
// token by token, so that a hash collision costs time and changes no result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// The longest match of a text's last tokens: where it ends, 0 for none, and how long it is.
struct Match {
    int64_t end = 0;
    int32_t length = 0;
};

// The hash of the two tokens before `end`.
uint64_t hash_of_pair(const int32_t* end);

class SuffixIndex {
  public:
    static constexpr int32_t kMinMatch = 2;
    static constexpr int32_t kMaxMatch = 32;
    static constexpr int32_t kMaxCandidates = 32;

    // Take in what `text` has beyond the tokens known so far; those must not have changed.
    void learn(const int32_t* text, int32_t length);
    // Return where in the text the longest match of the last tokens of `tail` ends, before the
    // position `before`. Where the last match that was kept goes on comes first, and wins among
    // equal ones: of a common pair too few places are compared to find it by its tokens.
    Match longest_match(const int32_t* text, const int32_t* tail, int32_t tail_length,
                        int32_t before) const;
    // Keep where a match ends that was found for the first `tail_length` tokens of the tail, which
    // only grows from then on. No match: the last one stays.
    void keep(Match match, int32_t tail_length);
    // Return whether the last tokens of the text occurred before: whether longest_match finds any.
    bool repeats(const int32_t* text, int32_t length) const;
    void forget();

  private:
    size_t bucket(const int32_t* end) const;
    void insert(const int32_t* text, int32_t end);
    void grow(const int32_t* text);

    // The last match that was kept, and the tail it was found for: at first, the beginning of both.
    int64_t kept_end_ = 0, kept_length_ = 0;
    std::vector<int32_t> heads_;     // by bucket: the last end of such a pair of tokens, 0 for none
    std::vector<int32_t> previous_;  // by end: the end before it in the same bucket
};

}  // namespace quire
