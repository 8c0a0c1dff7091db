// Drafts of a step: placed, taken back, compared with what was sampled; and DraftCounts, what
// became of the drafts of each slot. The plain twins are in quire/runner/plain_drafts.py and
// quire/speculative/plain_counts.py, which describe both. Always holds: rows are independent of
// each other, but for the experience that all requests share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace quire {

// Rows of a plan. The drafts of row i are the next counts[i] of ids; firsts[i] is where they begin.
struct DraftedRows {
    size_t num;
    const int32_t* slots;
    const int32_t* firsts;
    const int32_t* counts;
    const int32_t* ids;
};

// A row of tokens for each slot, `width` wide, and how many of them are known.
struct TokenRows {
    int32_t* tokens;
    size_t width;
    int32_t* lengths;
};

void put_drafts(const DraftedRows& rows, const TokenRows& table);
// stays [num]: whether the slot still has the request of the row.
void take_back_drafts(const DraftedRows& rows, const bool* stays, const TokenRows& table);
// Set the sampled tokens behind the first one that differs from its draft to -1.
void drop_after_mismatch(const DraftedRows& rows, const int32_t* sample_counts, int32_t* token_ids);
// Count the leading drafts of each row that are the tokens of its run.
void count_accepted(size_t num, const int32_t* counts, const int32_t* ids,
                    const int32_t* token_counts, const int32_t* token_ids, int32_t* accepted);
// Fill counts with the leading tokens of each row, those before its first -1, none of a row that
// has failed; and kept with their places. Return how many there are.
size_t leading_tokens(size_t num, const int32_t* sample_counts, const int32_t* token_ids,
                      const bool* failed, int32_t* counts, int64_t* kept);

// Milliseconds of a step without drafts, its tokens, and what drafts add: 0, 1, 2 ... in all
// (added_ms, of which there are at least two), and whatever their number to the step and to each
// row that has some. margin: how much more drafts must promise than they cost.
struct DraftPrice {
    const double* added_ms;
    size_t num_added;
    double step_ms, step_tokens, once_ms, row_ms, margin;
};

// Fill lengths with the drafts of each row that yield most tokens per millisecond: at most
// limits[i] of `width`, each for draft_ms[i] besides. chances [num, width] fall along a row.
// Return by how many times the tokens per millisecond rise, with the margin.
double draft_lengths(size_t num, size_t width, const double* chances, const int32_t* limits,
                     const double* draft_ms, const DraftPrice& price, int32_t* lengths);

// kinds of slots: see quire/speculative/plain_counts.py.
class DraftCounts {
  public:
    DraftCounts(size_t num_slots, size_t max_drafts);

    size_t num_slots() const { return kinds_.size(); }
    size_t max_drafts() const { return max_drafts_; }
    static constexpr size_t kNumKinds = 3;

    void begin(size_t slot, size_t kind);
    // Let confidence in all requests fade, of the kinds of these slots.
    void fade_all(size_t num, const int64_t* slots, int32_t num_steps);
    // The probability that drafts 0 to k of a slot are all accepted, for each k < max_drafts.
    void chances(size_t slot, int32_t num_steps, double* found);
    void verified(size_t num, const int64_t* slots, const int32_t* drafted,
                  const int32_t* accepted);

  private:
    // How many trials the experience with all requests counts for in a slot.
    double prior_trials(size_t slot) const;
    void notice_change(size_t slot, bool accepted);
    void learn_correlation(size_t slot);

    size_t max_drafts_;
    std::vector<double> tried_, accepted_;  // [slots, max_drafts]
    std::vector<int64_t> series_;           // the last equal outcomes at the first position
    std::vector<uint8_t> kinds_;            // of the drafts
    std::vector<uint8_t> changed_;          // whether outcomes contradicted all experience
    std::array<std::vector<double>, kNumKinds> all_tried_, all_accepted_;  // by kind
    std::array<double, kNumKinds> correlation_{};                          // of outcomes of a slot
};

}  // namespace quire
