// Rows of activations as integers, once for all panels of a product.
//
// Of each 128 of K: scale = absmax / 127, integers rint(x * (127 / absmax)). A group below 2^-100
// counts as zeros with the scale 0; one with an infinity or NaN gets the scale NaN, which makes
// its row's results NaN and no other row's. (quire/quant/int_rows.py is the twin.)
//
// Rows lie in packs, as tiles take them; a pack of c rows is
//   integers [K/64][c][64];  scales f32 [K/128][c];  starts int32 [sums][c]
// A start is what a sum of products begins with: -offset * (sum of the group's integers), the
// weight's bytes being q + offset; offset is 1 where each output has its own (zero points).
// Always holds: a pack of c rows takes c * row_bytes, so it begins at first row * row_bytes.
#pragma once

#include "quire/int_vec.h"
#include "quire/kernels.h"
#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

struct RowShape {
    int64_t k, steps, groups, sums;
    int64_t sum_group;  // of K: products summed as integers
    int32_t offset;

    QUIRE_VEC RowShape of(int64_t k, const IntScheme& scheme) {
        RowShape shape;
        shape.k = k;
        shape.steps = int_steps(k);
        shape.groups = row_groups(k);
        shape.sum_group = quire::sum_group(scheme);
        shape.sums = (shape.steps * kIntStep + shape.sum_group - 1) / shape.sum_group;
        shape.offset = scheme.bits == 8 ? 128 : scheme.has_zero_points ? 1 : 8;
        return shape;
    }
    __attribute__((always_inline)) int64_t element_bytes() const {
        return steps * kIntStep * int64_t{sizeof(RowElement)};
    }
    __attribute__((always_inline)) int64_t row_bytes() const {
        return round_up(element_bytes() + (groups + sums) * 4, 64);
    }
};

// A pack of `count` rows.
struct RowPack {
    char* base;
    int64_t count;

    __attribute__((always_inline)) RowElement* step(int64_t s) const {
        return reinterpret_cast<RowElement*>(base) + s * count * kIntStep;
    }
    __attribute__((always_inline)) float* scales(const RowShape& shape) const {
        return reinterpret_cast<float*>(base + count * shape.element_bytes());
    }
    __attribute__((always_inline)) int32_t* starts(const RowShape& shape) const {
        return reinterpret_cast<int32_t*>(scales(shape) + count * shape.groups);
    }
};

constexpr int kGroupVecs = static_cast<int>(kRowGroup) / kLanes;

QUIRE_VEC void store_elements(RowElement* to, Ints a) {
#if defined(QUIRE_HAS_VNNI) && defined(QUIRE_ZMM)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)a.v));
#elif defined(QUIRE_HAS_VNNI)
    typedef int8_t Row __attribute__((vector_size(kLanes)));
    const Row row = __builtin_convertvector(a.v, Row);
    __builtin_memcpy(to, &row, kLanes);
#else
    for (int i = 0; i < kLanes; ++i) {
        to[i / 4 * 4 + place_in_quad(i % 4)] = static_cast<RowElement>(a.v[i]);
    }
#endif
}

// Group `g` of row `row` of a pack.
template <class T>
QUIRE_VEC void quantize_group(const T* x, int64_t g, const RowShape& shape, const RowPack& pack,
                              int64_t row) {
    Vec values[kGroupVecs];
    Ints most = set1_int(0);
    const int64_t first = g * kRowGroup, left = shape.k - first;
#pragma GCC unroll 8
    for (int i = 0; i < kGroupVecs; ++i) {
        const int64_t there = left - i * kLanes;
        values[i] = there >= kLanes ? load(x + first + i * kLanes)
                    : there > 0     ? load_n(x + first + i * kLanes, static_cast<int>(there))
                                    : zero();
        most = max(most, Ints{bits_of(values[i]).v & 0x7fffffff});
    }
    // The bits of magnitudes are ordered as they are, infinity and NaN above all.
    const IntScale made = int_scale(max_lanes(most));
    pack.scales(shape)[g * pack.count + row] = made.scale;
    const int64_t sums = kRowGroup / shape.sum_group;
    const int vecs = static_cast<int>(shape.sum_group) / kLanes;
    const int64_t filled = shape.steps * kIntStep - first;  // of K, zeros included
    for (int64_t s = 0; s < sums && s * shape.sum_group < filled; ++s) {
        Ints sum = set1_int(0);
        for (int i = 0; i < vecs; ++i) {
            const int64_t at = s * shape.sum_group + i * kLanes;
            if (at >= filled) break;
            const Ints q = made.finite ? round_ints(mul(values[at / kLanes], set1(made.inverse)))
                                       : set1_int(0);
            sum = add(sum, q);
            RowElement* step = pack.step((first + at) / kIntStep);
            store_elements(step + row * kIntStep + (first + at) % kIntStep, q);
        }
        pack.starts(shape)[(g * sums + s) * pack.count + row] = -shape.offset * sum_lanes(sum);
    }
}

// Row `row` of a pack, from x.
template <class T>
QUIRE_VEC void quantize_row(const T* x, const RowShape& shape, const RowPack& pack, int64_t row) {
    for (int64_t g = 0; g < shape.groups; ++g) quantize_group(x, g, shape, pack, row);
}

}  // namespace quire::QUIRE_ISA_NS
