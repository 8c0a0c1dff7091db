// Scores of known tokens: log-probabilities of raw logits, ranks and best alternatives, bitwise
// equal to quire/sampling/scoring.py.
// A row's result depends on its own logits and parameters only.
#pragma once

#include <stdint.h>

#include "quire/pool.h"

namespace quire {

constexpr int32_t kMaxScoreTop = 20;  // alternatives per row

// Fields are those of ScoreBatch and Scores; R rows, V tokens in the vocabulary. Ids, offsets and
// num_top (at most kMaxScoreTop) were checked by the caller. Logits are only read.
struct ScoreArgs {
    const float* logits;  // [rows, vocabulary], `stride` apart
    int64_t stride;
    int32_t rows, vocabulary;

    const int32_t* targets;        // [R] -1: none
    const int32_t* num_top;        // [R]
    const int32_t* listed_starts;  // [R + 1]
    const int32_t* listed_ids;

    int32_t width;           // K
    float* logprobs;         // [R] out
    int32_t* ranks;          // [R] out
    int32_t* top_ids;        // [R, K] out
    float* top_logprobs;     // [R, K] out
    float* listed_logprobs;  // as listed_ids, out

    Pool* pool;
};

}  // namespace quire
