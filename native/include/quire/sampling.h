// Sampling of a whole batch: the semantics of quire/sampling/batch.py, bitwise equal to
// quire/sampling/reference.py.
// A row's result depends on its own logits and parameters only.
#pragma once

#include <stdint.h>

#include "quire/pool.h"
#include "quire/sampling_passes.h"
#include "quire/sampling_rare.h"

namespace quire {

// Fields are those of SampleBatch and TokenChoice; R rows, V tokens in the vocabulary. Ids and
// offsets were checked by the caller. Logits are only read. The pointers of a part are null where
// no row uses it.
struct ChooseArgs {
    const float* logits;  // [rows, vocabulary], `stride` apart
    int64_t stride;
    int32_t rows, vocabulary;

    const float* temperature;  // [R] from here on; never null, as the next three
    const int64_t* seeds;
    const int32_t* streams;
    const int32_t* positions;

    const int32_t* top_k;  // truncation
    const float* top_p;
    const float* min_p;

    const float* repetition_penalty;  // penalties
    const float* presence_penalty;
    const float* frequency_penalty;
    const int32_t* penalty_last_n;  // see Penalties.last_n in quire/sampling/parts.py

    const int32_t* history_starts;  // history; [R + 1], as the other starts
    const int32_t* history;
    const int32_t* num_prompt_tokens;

    const int32_t* bias_starts;  // logit bias
    const int32_t* bias_ids;
    const float* bias_values;

    const int32_t* banned_starts;  // banned ids
    const int32_t* banned_ids;

    const int32_t* mask_rows;  // masks: [R] a row of masks, -1 none
    const uint32_t* masks;     // [M, words]: bit i % 32 of word i / 32 allows id i

    const RareArgs* rare;           // rare parameters
    const int32_t* num_logprobs;    // [R] -1 for none
    const int32_t* num_candidates;  // [R] of beams, 0 for other rows

    int32_t num_top;      // K
    int32_t* token_ids;   // [R] out
    float* logprobs;      // [R] out, this and the next two; null as num_logprobs is
    int32_t* top_ids;     // [R, K] out
    float* top_logprobs;  // [R, K] out
    float* mus;           // [R] out, or null if no row has mirostat
    int32_t max_candidates;     // C
    int32_t* candidate_ids;     // [R, C] out, this and the next two; null as num_candidates is
    float* candidate_scores;    // after bias, penalties and bans
    float* candidate_logprobs;  // the model's own

    Pool* pool;
};

// The key of a row's noise.
NoiseKey noise_key(int64_t seed, int32_t stream, int32_t position);

// Samples with one instruction set's passes; KernelTable::choose calls it with its own.
void choose_tokens(const ChooseArgs& args, const SamplingPasses& passes);

}  // namespace quire
