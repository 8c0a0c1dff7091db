// int4 with group scales that are multiples of a step (int_steps.h), as bytes for the matrix unit:
// an integer times its scale's steps. Then 128 of K are one sum, scaled by the step alone, and the
// recipe's bits are the same: f32 would have held every partial sum exactly.
//
// Whether a panel qualifies is read from its scales. Only for files compiled once per instruction
// set, with AMX.
#pragma once

#include "quire/amx_tiles.h"
#include "quire/int_rows.h"
#include "quire/int_steps.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

// The upper 16 bits of a positive f32, rounded.
constexpr uint16_t bf16_bits(double value) {
    int exponent = 127;
    for (; value >= 2.0; value /= 2.0) ++exponent;
    for (; value < 1.0; value *= 2.0) --exponent;
    return static_cast<uint16_t>(exponent * 128 + static_cast<int>((value - 1.0) * 128.0 + 0.5));
}

// Indexed by the size of the largest scale less 64, as bits of an f32 to which the scale's exponent
// is added: the step, which 3 bits hold, and roughly its inverse; 0: no step of that size exists.
struct StepTable {
    static constexpr uint16_t kBias = 127 * 128;
    alignas(64) uint16_t step[64] = {};
    alignas(64) uint16_t inverse[64] = {};

    constexpr StepTable() {
        for (const ScaleSteps& steps : kScaleSteps) {
            const double size = steps.size / 64.0;
            step[steps.size - 64] = static_cast<uint16_t>(bf16_bits(size / steps.most) - kBias);
            inverse[steps.size - 64] = static_cast<uint16_t>(bf16_bits(steps.most / size) + kBias);
        }
    }
};
constexpr StepTable kStepTable;

// The steps of a group's scales, by halves of the lanes; lanes for which they are exact.
struct GroupSteps {
    __m512i count[2];
    __mmask16 found;
};

// The step of each lane of a block.
struct StepsOfBlock {
    Vec step[2], inverse[2];

    // scales: of `groups` groups, at most kGroups.
    template <int kGroups>
    QUIRE_VEC StepsOfBlock of(const char* scales, int64_t groups) {
        const __m512i exponents = _mm512_set1_epi32(0x7f800000);
        StepsOfBlock made;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            __m512 largest = _mm512_setzero_ps();
#pragma GCC unroll 4
            for (int g = 0; g < kGroups; ++g) {
                const Vec scale = scales_of(scales + (g < groups ? g : 0) * kScaleBytes, j);
                largest = _mm512_range_ps(largest, scale.v, 0x0b);  // the larger magnitude
            }
            const __m512i bits = _mm512_castps_si512(largest);
            const __m512i exponent = _mm512_and_si512(bits, exponents);
            made.step[j] = {_mm512_castsi512_ps(
                _mm512_add_epi32(upper_of(kStepTable.step, bits), exponent))};
            made.inverse[j] = {_mm512_castsi512_ps(
                _mm512_sub_epi32(upper_of(kStepTable.inverse, bits), exponent))};
        }
        return made;
    }

    __attribute__((always_inline)) GroupSteps of_group(const char* scales) const {
        GroupSteps made;
        made.found = 0xffff;
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const Vec scale = scales_of(scales, j);
            made.count[j] = _mm512_cvtps_epi32(mul(scale, inverse[j]).v);
            const Vec steps = mul({_mm512_cvtepi32_ps(made.count[j])}, step[j]);
            made.found &= _mm512_cmp_ps_mask(steps.v, scale.v, _CMP_EQ_OQ);
        }
        return made;
    }

  private:
    QUIRE_VEC Vec scales_of(const char* scales, int half) {
        return load(reinterpret_cast<const bf16*>(scales) + half * kLanes);
    }
    // Looks up table entries by the sizes of numbers with these bits, as the upper halves of words.
    QUIRE_VEC __m512i upper_of(const uint16_t* table, __m512i bits) {
        const __m512i size = _mm512_srli_epi32(bits, 1);  // in the upper half; its last six bits
        return _mm512_maskz_permutex2var_epi16(0xaaaaaaaa, _mm512_load_si512(table), size,
                                               _mm512_load_si512(table + 32));
    }
};

template <int kGroups>
QUIRE_VEC bool block_in_steps(const char* scales) {
    const StepsOfBlock steps = StepsOfBlock::of<kGroups>(scales, kGroups);
    __mmask16 found = 0xffff;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) found &= steps.of_group(scales + g * kScaleBytes).found;
    return found == 0xffff;
}

// Returns whether all scales of a panel are multiples of their block's step.
QUIRE_VEC bool panel_in_steps(const char* panel, const IntScheme& scheme, int64_t all_steps) {
    if (scheme.has_zero_points || scheme.group == kRowGroup) return false;
    for (int64_t step = 0; step < all_steps; step += 2) {
        const char* block = panel + block_start(scheme, step / 2);
        const int64_t groups = block_groups(scheme, all_steps - step < 2 ? 1 : 2);
        const bool found = groups == 4   ? block_in_steps<4>(block)
                           : groups == 2 ? block_in_steps<2>(block)
                                         : block_in_steps<1>(block);
        if (!found) return false;
    }
    return true;
}

// Multiplies integers from 0 to 15, less eight, by steps. Two bytes are multiplied at once, the
// lower one with 128 more, so that it never borrows from its neighbour.
struct StepBytes {
    __m512i steps, rest;

    QUIRE_VEC StepBytes of(__m512i count) {
        StepBytes made;
        made.steps = _mm512_mask_blend_epi16(0xaaaaaaaa, count, _mm512_slli_epi32(count, 16));
        made.rest = _mm512_sub_epi16(_mm512_set1_epi16(128),
                                     _mm512_mullo_epi16(made.steps, _mm512_set1_epi16(8 * 257)));
        return made;
    }
    __attribute__((always_inline)) __m512i bytes(__m512i nibbles) const {
        const __m512i product = _mm512_add_epi16(_mm512_mullo_epi16(nibbles, steps), rest);
        return _mm512_xor_si512(product, _mm512_set1_epi16(128));
    }
};

// A block of kGroups groups: bytes as the tiles take them, [steps][2 halves of the lanes][16
// quads][64], and the step of each lane.
template <int kGroups>
QUIRE_VEC void expand_block_steps(const char* block, const char* weights, int64_t octs, char* bytes,
                                  float* scales) {
    const __m512i lower = _mm512_set1_epi8(15);
    const int64_t of_group = octs / kGroups;
    const StepsOfBlock steps = StepsOfBlock::of<kGroups>(block, kGroups);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
        store(scales + j * kLanes, steps.step[j]);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
            const GroupSteps found = steps.of_group(block + g * kScaleBytes);
            const StepBytes to_bytes = StepBytes::of(found.count[j]);
            for (int64_t oct = g * of_group; oct < (g + 1) * of_group; ++oct) {
                const __m512i w = _mm512_loadu_si512(weights + oct * kQuadBytes + j * 64);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), lower);
                char* to = bytes + (oct / 8 * 2 + j) * kTileBytes + oct % 8 * 128;
                _mm512_store_si512(to, to_bytes.bytes(_mm512_and_si512(w, lower)));
                _mm512_store_si512(to + 64, to_bytes.bytes(high));
            }
        }
    }
}

// A whole panel with scales that are multiples of steps. scales: [blocks][32].
QUIRE_VEC void expand_steps(const char* panel, const IntScheme& scheme, int64_t all_steps,
                            char* bytes, float* scales) {
    for (int64_t step = 0; step < all_steps; step += 2) {
        const int64_t here = all_steps - step < 2 ? 1 : 2;
        const char* block = panel + block_start(scheme, step / 2);
        const char* weights = block + block_head_bytes(scheme, here);
        const int64_t groups = block_groups(scheme, here), octs = here * kIntStep / 8;
        if (groups == 4) {
            expand_block_steps<4>(block, weights, octs, bytes, scales);
        } else if (groups == 2) {
            expand_block_steps<2>(block, weights, octs, bytes, scales);
        } else {
            expand_block_steps<1>(block, weights, octs, bytes, scales);
        }
        bytes += here * 2 * kTileBytes;
        scales += kIntLanes;
    }
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
