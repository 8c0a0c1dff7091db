// The arithmetic of sampling, one number at a time, with the bits of quire/sampling/noise.py.
// Included by files that are compiled per instruction set, so everything is static: no copy made
// for one instruction set may be linked into another.
#pragma once

#include <stdint.h>

namespace quire::recipe {

static inline int32_t float_bits(float x) {
    int32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float bits_float(int32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

// log(2^exponent * (1 + f)), negated.
static inline float minus_log_parts(int32_t exponent, float f) {
    float poly = -0.10435568f;
    poly = poly * f + 0.16081917f;
    poly = poly * f + -0.1710234f;
    poly = poly * f + 0.19918072f;
    poly = poly * f + -0.24983427f;
    poly = poly * f + 0.33334357f;
    poly = poly * f + -0.50000083f;
    const float log1p = poly * (f * f) + f;
    return -(static_cast<float>(exponent) * 0.6931472f + log1p);
}

// The exponent e for which x / 2^e lies in [sqrt(1/2), sqrt(2)).
static inline int32_t log_exponent(float x) { return (float_bits(x) - 0x3f3504f3) >> 23; }

static inline float scaled_down(float x, int32_t exponent) {
    return bits_float(float_bits(x) - static_cast<int32_t>(static_cast<uint32_t>(exponent) << 23));
}

static inline float minus_log(float x) {
    const int32_t exponent = log_exponent(x);
    return minus_log_parts(exponent, scaled_down(x, exponent) - 1.0f);
}

// -log(1 - x); where 1 - x is close to 1, x itself is the more exact argument.
static inline float minus_log_one_minus(float x) {
    const float y = 1.0f - x;
    const int32_t exponent = log_exponent(y);
    const float f = scaled_down(y, exponent) - 1.0f;
    return minus_log_parts(exponent, exponent == 0 ? -x : f);
}

// A number in (0, 1) for an id under a row's key.
static inline float uniform(uint32_t low, uint32_t high, uint32_t id) {
    uint32_t x = id ^ low;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    x = (x ^ x >> 16) + high;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    x = x ^ x >> 15;
    const float top = static_cast<float>(static_cast<int32_t>(x >> 16)) * 65536.0f;
    const float rest = static_cast<float>(static_cast<int32_t>(x & 0xffffu)) + 0.5f;
    const float w = (top + rest) * 0x1p-32f;
    return w < 0x1.fffffep-1f ? w : 0x1.fffffep-1f;
}

// Noise of a token under a row's key.
static inline float gumbel(uint32_t low, uint32_t high, uint32_t id) {
    return minus_log(minus_log_one_minus(uniform(low, high, id)));
}

// exp(x) of x <= 0 (or -inf) before it is rounded to a mass.
static inline float exp_below(float x) {
    const float scaled = x * 1.442695f;
    const float t = scaled > -40.0f ? scaled : -40.0f;
    const float n = (t + 12582912.0f) - 12582912.0f;
    const float f = t - n;
    float poly = 0.00015469732f;
    poly = poly * f + 0.0013400433f;
    poly = poly * f + 0.009618025f;
    poly = poly * f + 0.05550327f;
    poly = poly * f + 0.2402265f;
    poly = poly * f + 0.6931472f;
    poly = poly * f + 1.0f;
    return poly * bits_float((static_cast<int32_t>(n) + 127) << 23);
}

// x of [0, 1] rounded to a multiple of 2^-34.
static inline double mass_multiple(double x) {
    constexpr double round = 0x1.8p52 * 0x1p-34;
    return (x + round) - round;
}

static inline double mass(float e) { return mass_multiple(static_cast<double>(e)); }

}  // namespace quire::recipe
