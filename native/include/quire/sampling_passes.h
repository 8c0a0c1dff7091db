// Loops of token choice over a stretch of one row's vocabulary, one set per instruction set. All
// sets give the same bits: the recipe is quire/sampling/noise.py. They know neither rows,
// parameters nor threads.
#pragma once

#include <stdint.h>

namespace quire {

constexpr int kMassBlock = 256;  // most values one call of `masses` takes

// A token id and its value. id -1: nothing above -inf was seen.
struct BestToken {
    float value;
    int32_t id;
};

// What survives min_p, top_k and top_p: values above `value`, and at `value` ids up to `last_id`.
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
    // Largest of values[begin:end], ties to the lowest id. Sets *bad where one is NaN or +inf.
    BestToken (*largest)(const float* values, int32_t begin, int32_t end, bool* bad);

    // Largest of values / temperature + noise over what the cut keeps. The cut applies to
    // the values divided by temperature. Sets *bad where one of those is NaN or +inf.
    BestToken (*noisiest)(const float* values, int32_t begin, int32_t end, float temperature,
                          Cut cut, NoiseKey key, bool* bad);

    // out = values / temperature, with no negative zeros; returns the largest, as `largest`.
    BestToken (*scale)(const float* values, int32_t begin, int32_t end, float temperature,
                       float* out, bool* bad);

    // out[i] = exp(values[i] - max) as a multiple of 2^-34; count <= kMassBlock.
    void (*masses)(const float* values, int32_t count, float max, double* out);

    // The sum of the masses of values[begin:end]; exact, so in no particular order.
    double (*mass_sum)(const float* values, int32_t begin, int32_t end, float max);
};

}  // namespace quire
