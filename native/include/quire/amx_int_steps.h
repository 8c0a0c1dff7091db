// int4 whose groups' scales are multiples of a step (int_steps.h), as bytes for the matrix unit: an
// integer times its scale's steps. Then 128 of K are one sum, folded by the step alone, and the
// recipe's bits are the same: f32 would have held every partial sum exactly.
//
// Which panels are so is read off their scales, whoever made them.
// Only for files compiled once per instruction set, of which one has AMX.
#pragma once

#include "quire/amx_tiles.h"
#include "quire/int_rows.h"
#include "quire/int_steps.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kMostBlockGroups = 4;

// Steps of the largest scale by its size less 64; 0: there is none of that size.
struct StepTable {
    alignas(64) uint16_t most[64] = {};

    constexpr StepTable() {
        for (const ScaleSteps& steps : kScaleSteps) {
            most[steps.size - 64] = static_cast<uint16_t>(steps.most);
        }
    }
};
constexpr StepTable kStepTable;

// Of a block and half of the lanes: the step, and how many of it each group's scale is.
struct BlockSteps {
    Vec step;
    Vec steps[kMostBlockGroups];
    __mmask16 found;  // lanes whose scales are multiples of it
};

template <int kGroups>
QUIRE_VEC BlockSteps steps_of_block(const char* scales, int half) {
    Vec of_groups[kGroups], largest = zero();
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
        of_groups[g] =
            load(reinterpret_cast<const bf16*>(scales + g * kScaleBytes) + half * kLanes);
        largest = max(largest, abs(of_groups[g]));
    }
    const __m512i bits = _mm512_castps_si512(largest.v);
    const __m512i size = _mm512_and_si512(_mm512_srli_epi32(bits, 17), _mm512_set1_epi32(63));
    const __m512i found = _mm512_permutex2var_epi16(
        _mm512_load_si512(kStepTable.most), size, _mm512_load_si512(kStepTable.most + 32));
    const Vec most = {_mm512_cvtepi32_ps(_mm512_and_si512(found, _mm512_set1_epi32(0xffff)))};
    const __mmask16 some = _mm512_cmp_ps_mask(largest.v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const Vec inverse = {_mm512_maskz_div_ps(some, most.v, largest.v)};
    BlockSteps made;
    made.step = {_mm512_maskz_div_ps(some, largest.v, most.v)};
    made.found = 0xffff;
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
        made.steps[g] = round_near(mul(of_groups[g], inverse));
        made.found &= _mm512_cmp_ps_mask(mul(made.steps[g], made.step).v, of_groups[g].v,
                                         _CMP_EQ_OQ);
    }
    return made;
}

template <int kGroups>
QUIRE_VEC bool block_in_steps(const char* block) {
    return (steps_of_block<kGroups>(block, 0).found & steps_of_block<kGroups>(block, 1).found) ==
           0xffff;
}

// Are all scales of a panel multiples of their block's step?
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

// Integers from 0 to 15 times steps, less eight times steps. Two bytes are multiplied at once: a
// product is below 2^8, so none reaches its neighbour; the sign comes after.
struct StepBytes {
    __m512i steps, sign, rest;

    QUIRE_VEC StepBytes of(Vec signed_steps) {
        const __m512i count = _mm512_cvtps_epi32(signed_steps.v);
        const __m512i size = _mm512_abs_epi32(count);
        StepBytes made;
        made.steps = _mm512_or_si512(size, _mm512_slli_epi32(size, 16));
        made.sign = _mm512_srai_epi32(count, 31);
        // Eight times steps, and one where the product is negated: -a is ~a + 1.
        const __m512i taken = _mm512_add_epi32(_mm512_slli_epi32(count, 3), made.sign);
        const __m512i rest = _mm512_sub_epi32(_mm512_setzero_si512(), taken);
        made.rest = _mm512_mullo_epi32(_mm512_and_si512(rest, _mm512_set1_epi32(255)),
                                       _mm512_set1_epi32(0x01010101));
        return made;
    }
    __attribute__((always_inline)) __m512i bytes(__m512i nibbles) const {
        const __m512i product = _mm512_mullo_epi16(nibbles, steps);
        return _mm512_add_epi8(_mm512_xor_si512(product, sign), rest);
    }
};

// A block of kGroups groups: bytes as the tiles take them, [steps][2 halves of the lanes][16
// quads][64], and the step of each lane.
template <int kGroups>
QUIRE_VEC void expand_block_steps(const char* block, const char* weights, int64_t octs, char* bytes,
                                  float* scales) {
    const __m512i lower = _mm512_set1_epi8(15);
    const int64_t of_group = octs / kGroups;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
        const BlockSteps found = steps_of_block<kGroups>(block, j);
        store(scales + j * kLanes, found.step);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) {
            const StepBytes to_bytes = StepBytes::of(found.steps[g]);
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

// All of a panel, whose scales are multiples of steps. scales: [blocks][32].
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
