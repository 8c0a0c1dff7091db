// Loops of sampling over a stretch of one row's vocabulary, one set per instruction set.
// All sets give the same bits: the recipe is quire/sampling/noise.py. Parameters and threads are
// handled by sampling.cc.
#pragma once

#include <stdint.h>

namespace quire {

constexpr int kMassBlock = 256;  // most values per call of `masses`

// A token id and its value. id -1: nothing above -inf was seen.
struct BestToken {
    float value;
    int32_t id;
};

// The tokens kept by min_p, top_k and top_p: values above `value`, and at `value` ids up to
// `last_id`.
struct Cut {
    float value;
    int32_t last_id;
};

// The 64-bit key of a row's noise, split.
struct NoiseKey {
    uint32_t low;
    uint32_t high;
};

struct SamplingPasses {
    // Returns the largest of values[begin:end], ties to the lowest id. Sets *bad if one is NaN or
    // +inf.
    BestToken (*largest)(const float* values, int32_t begin, int32_t end, bool* bad);

    // Returns the largest of values / temperature + noise over the tokens kept by the cut, which
    // applies to values divided by temperature. Sets *bad if one of those is NaN or +inf.
    BestToken (*noisiest)(const float* values, int32_t begin, int32_t end, float temperature,
                          Cut cut, NoiseKey key, bool* bad);

    // out = values / temperature, with no negative zeros; returns the largest, as `largest`.
    BestToken (*scale)(const float* values, int32_t begin, int32_t end, float temperature,
                       float* out, bool* bad);

    // out[i] = exp(values[i] - max) as a multiple of 2^-34; count <= kMassBlock.
    void (*masses)(const float* values, int32_t count, float max, double* out);

    // Returns the sum of the masses of values[begin:end]; exact, so independent of order.
    double (*mass_sum)(const float* values, int32_t begin, int32_t end, float max);
};

}  // namespace quire
