// Rarely used sampling steps: the definitions of quire/sampling/rare.py, one function each, for
// one row, on the calling thread.
// `values` are a row's [V], and ids were checked by the caller.
#pragma once

#include <stdint.h>

#include <vector>

#include "quire/sampling_passes.h"

namespace quire {

constexpr int kMaxRepeat = 50;  // tokens of a repeat that are compared

// A run of token ids.
struct Ids {
    const int32_t* first;
    int64_t count;

    const int32_t* begin() const { return first; }
    const int32_t* end() const { return first + count; }
};

// Those of a row of ragged ids; none where `starts` is null.
inline Ids row_ids(const int32_t* starts, const int32_t* ids, int32_t row) {
    if (starts == nullptr) return {nullptr, 0};
    return {ids + starts[row], starts[row + 1] - starts[row]};
}

// RareParameters, as arrays of R rows; see quire/sampling/parts.py. The pointers of a group are
// null where no row uses it.
struct RareArgs {
    const float* typical_p;  // truncation
    const float* top_n_sigma;
    const float* epsilon_cutoff;
    const float* eta_cutoff;
    const float* xtc_probability;
    const float* xtc_threshold;

    const float* dry_multiplier;  // DRY
    const float* dry_base;
    const int32_t* dry_allowed_length;
    const int32_t* dry_last_n;
    const int32_t* breaker_starts;
    const int32_t* breaker_ids;

    const int32_t* mirostat;  // mirostat: the mode
    const float* mirostat_tau;
    const float* mirostat_eta;
    const float* mirostat_mu;

    const int32_t* sequence_rows;  // banned sequences
    const int32_t* sequence_starts;
    const int32_t* sequence_ids;

    const int32_t* ngram_size;

    const int32_t* allowed_starts;  // allowed ids
    const int32_t* allowed_ids;

    const int64_t* order;  // the row's own order of steps, 0 for the usual one
};

// Subtracts DRY's penalties. best: [V], all zero before and after.
void penalize_repeats(float* values, Ids history, const RareArgs& rare, int32_t row,
                      int32_t* best);

// Sets banned sequences, n-grams and ids that are not allowed to -inf. kept: scratch.
void ban(float* values, int32_t vocabulary, Ids history, const RareArgs& rare, int32_t row,
         std::vector<float>& kept);

// Returns how far below `largest`, before the temperature, top_n_sigma keeps tokens.
float sigma_drop(const float* values, int32_t vocabulary, float largest, float num_sigmas);

// A row in the filters: values divided by the temperature, dropped ones -inf or below the cut;
// `top` is the largest kept one. The functions narrow it.
struct Filtered {
    float* values;
    int32_t vocabulary;
    float top;
    Cut cut;
    const SamplingPasses& passes;

    bool keeps(int32_t id) const {
        return values[id] > cut.value || (values[id] == cut.value && id <= cut.last_id);
    }
    void keep_from(float floor) {  // a higher cut
        if (floor > cut.value) cut = Cut{floor, INT32_MAX};
    }
};

double kept_mass(const Filtered& row);
void keep_typical(Filtered& row, float share);
void cut_off(Filtered& row, float epsilon, float eta);
void exclude_top_choices(Filtered& row, float threshold);
void keep_unsurprising(Filtered& row, float mu);

// top_n_sigma of what is kept.
void keep_within_sigmas(Filtered& row, float num_sigmas);

// Keeps the largest value, of equals that with the lowest id.
void keep_first(Filtered& row);

// Sets what is dropped to -inf, so that values can change.
void drop_the_rest(Filtered& row);

constexpr int32_t kZipfIds = 100;  // largest values that version 1 of mirostat looks at

// The number of ids that version 1 of mirostat keeps. best: the largest values, largest first.
int32_t zipf_count(const std::vector<BestToken>& best, float mu, int32_t vocabulary);

// Returns mirostat's mu after token_id was sampled among the kept tokens.
float moved_mu(const Filtered& row, int32_t token_id, const RareArgs& rare, int32_t index);

// Returns the row's coin: a number in (0, 1) independent of every token's noise.
float coin(NoiseKey key);

}  // namespace quire
