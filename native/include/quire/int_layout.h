// How weights of 8 and 4 bits lie in memory: panels of 32 outputs, as those of f32 and bf16 do.
// K is filled up to a multiple of 64 with elements that count as zero.
//
//   int8  [n/32]{ [K/4][32 lanes][4] bytes: q + 128;  32 scales f32 }
//   int4  [n/32][K/128]{ [groups][32 lanes] scales bf16;
//                        [groups][32 lanes] zero points, a byte each, filled up to 64 (if any);
//                        [K/8][32 lanes][4] bytes: q + z, the first 4 of K in the low halves }
//
// The last 128 of K may be 64. Bytes are unsigned, as the products of AVX-512 VNNI want weights;
// activations are signed, so what a weight's offset adds is known once a row is quantized:
// offset * (sum of the group's activations), see int_rows.h. Knows no instruction set.
#pragma once

#include "quire/types.h"

namespace quire {

constexpr int64_t kIntLanes = 32;     // outputs of a panel
constexpr int64_t kIntStep = 64;      // K is filled up to a multiple of this
constexpr int64_t kRowGroup = 128;    // of K: activations that share a scale
constexpr int64_t kQuadBytes = 128;   // four of K (eight of int4) by a panel's lanes
constexpr int64_t kScaleBytes = 64;   // one group's scales of a panel, bf16

// bits 0: not integers. group: elements of K with one scale; 0: all of K.
struct IntScheme {
    int32_t bits;
    int32_t group;
    bool has_zero_points;
};

// A [n, k] weight in the layout above.
struct PackedInts {
    const void* data;
    int64_t n, k;
    IntScheme scheme;
};

static inline int64_t int_steps(int64_t k) { return (k + kIntStep - 1) / kIntStep; }
static inline int64_t row_groups(int64_t k) {
    return (int_steps(k) * kIntStep + kRowGroup - 1) / kRowGroup;
}

// Of K: elements of an activation group; their products are summed as integers.
static inline int64_t sum_group(const IntScheme& scheme) {
    return scheme.bits == 8 ? kRowGroup : scheme.group;
}

// Of a block of 128 (or the last 64) of K of int4: groups, bytes before the weights, bytes in all.
static inline int64_t block_groups(const IntScheme& scheme, int64_t steps) {
    return (steps * kIntStep + scheme.group - 1) / scheme.group;
}
static inline int64_t block_head_bytes(const IntScheme& scheme, int64_t steps) {
    const int64_t groups = block_groups(scheme, steps);
    const int64_t zeros = scheme.has_zero_points ? round_up(groups * kIntLanes, 64) : 0;
    return groups * kScaleBytes + zeros;
}
static inline int64_t block_bytes(const IntScheme& scheme, int64_t steps) {
    return block_head_bytes(scheme, steps) + steps * (kIntStep / 8) * kQuadBytes;
}

static inline int64_t int_panel_bytes(int64_t k, const IntScheme& scheme) {
    const int64_t steps = int_steps(k);
    if (scheme.bits == 8) {
        return steps * (kIntStep / 4) * kQuadBytes + kIntLanes * int64_t{sizeof(float)};
    }
    const int64_t bytes = steps / 2 * block_bytes(scheme, 2);
    return steps % 2 == 0 ? bytes : bytes + block_bytes(scheme, 1);
}
static inline int64_t int_packed_bytes(int64_t n, int64_t k, const IntScheme& scheme) {
    return (n + kIntLanes - 1) / kIntLanes * int_panel_bytes(k, scheme);
}

// Where a block of int4 begins in its panel.
static inline int64_t block_start(const IntScheme& scheme, int64_t block) {
    return block * block_bytes(scheme, 2);
}

// Element (lane, k) of a panel, as the products use it: a whole number times its scale.
static inline float int_element(const char* panel, int64_t columns, const IntScheme& scheme,
                                int64_t lane, int64_t k) {
    if (scheme.bits == 8) {
        const int64_t scales = int_steps(columns) * (kIntStep / 4) * kQuadBytes;
        float scale;
        __builtin_memcpy(&scale, panel + scales + lane * 4, 4);
        const uint8_t byte =
            static_cast<uint8_t>(panel[k / 4 * kQuadBytes + lane * 4 + k % 4]);
        return static_cast<float>(static_cast<int32_t>(byte) - 128) * scale;
    }
    const int64_t block = k / kRowGroup, inside = k % kRowGroup;
    const int64_t left = int_steps(columns) - 2 * block, steps = left < 2 ? left : 2;
    const char* start = panel + block_start(scheme, block);
    const int64_t group = inside / scheme.group;
    bf16 scale;
    __builtin_memcpy(&scale, start + group * kScaleBytes + lane * 2, 2);
    int32_t zero = 8;
    if (scheme.has_zero_points) {
        zero = static_cast<uint8_t>(
            start[block_groups(scheme, steps) * kScaleBytes + group * kIntLanes + lane]);
    }
    const uint8_t byte = static_cast<uint8_t>(
        start[block_head_bytes(scheme, steps) + inside / 8 * kQuadBytes + lane * 4 + k % 4]);
    const int32_t nibble = inside % 8 < 4 ? byte & 15 : byte >> 4;
    return static_cast<float>(nibble - zero) * widen(scale);
}

}  // namespace quire
