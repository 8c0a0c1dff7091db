// Probabilities of a tile of 16 rows, interleaved with steps of the matrix unit: bitwise equal to
// `probabilities` of attention_tiles.h for each row. Lanes of 16 rows are reduced together, not row
// by row. The content of invisible positions changes no bit of a row.
#pragma once

#include "quire/amx_beside.h"
#include "quire/attention_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

// Reduces 16 vectors by `fold`, halves onto halves: lane i is the result of vector i.
template <class Fold>
QUIRE_VEC Vec fold_rows(const Vec* rows, const Fold& fold) {
    // Each round makes one vector of two, and halves the rest of each row.
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // of rows i, i + 8
        const __m512 one = rows[i].v, other = rows[i + 8].v;
        a[i] = fold(Vec{_mm512_shuffle_f32x4(one, other, 0x44)},
                    Vec{_mm512_shuffle_f32x4(one, other, 0xee)}).v;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {  // of rows i, i + 8, i + 4, i + 12: four lanes each
        b[i] = fold(Vec{_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88)},
                    Vec{_mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd)}).v;
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {  // in each four lanes: two of i, two of i + 2 rows on
        c[i] = fold(Vec{_mm512_shuffle_ps(b[i], b[i + 2], 0x44)},
                    Vec{_mm512_shuffle_ps(b[i], b[i + 2], 0xee)}).v;
    }
    const Vec all = fold(Vec{_mm512_shuffle_ps(c[0], c[1], 0x88)},
                         Vec{_mm512_shuffle_ps(c[0], c[1], 0xdd)});
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    return {_mm512_permutexvar_ps(order, all.v)};
}

// A row's scores and the scales of their keys, which are ones if already applied.
struct ScoresOfRow {
    const float *scores, *key_scales;

    template <bool ints>
    __attribute__((always_inline)) Vec at(int c) const {
        const Vec s = load(scores + c);
        return ints ? mul(s, load(key_scales + c)) : s;
    }
};

// Sets invisible lanes of a row's first and last vector to -inf, and applies the cap to the others.
template <bool ints>
QUIRE_VEC ScoresOfRow prepare_scores(float* row, Span span, int from, int to, const Scale& scale,
                                     const float* ones) {
    const bool capped = scale.capped != 0.0f;
    if (!capped && from == span.first && to == span.end) return {row, scale.keys};
    if (ints) {
        for (int c = from; c < to; c += kLanes) {
            store(row + c, mul(load(row + c), load(scale.keys + c)));
        }
    }
    if (capped) {
        for (int c = from; c < to; c += kLanes) {
            const Vec x = mul(load(row + c), set1(scale.factor));
            store(row + c, mul(tanh(x), set1(scale.capped)));
        }
    }
    const __m512 least = _mm512_set1_ps(-kInfinity);
    _mm512_mask_storeu_ps(row + from, first_lanes(span.first - from), least);
    _mm512_mask_storeu_ps(row + to - kLanes,
                          static_cast<__mmask16>(~first_lanes(span.end - to + kLanes)), least);
    return {row, ones};
}

// Converts scores of at most 16 rows, [kPiece] apart, to probabilities of type bf16, as far apart.
// spans: visible positions of each row; ones: [kPiece]. Lanes outside in the first and last vector
// become zero. A slot is four rows searched for their maximum, and eight vectors of probabilities.
template <bool ints>
__attribute__((noinline)) void probabilities_beside(float* scores, bf16* p, const Span* spans,
                                                    int count, const Scale& scale,
                                                    const float* ones, float* largest, float* sum,
                                                    TileSteps& steps) {
    const Vec factor = set1(scale.capped != 0.0f ? 1.0f : scale.factor);
    const float* const value_scales = scale.values;
    const auto first_of = [&](int i) { return spans[i].first / kLanes * kLanes; };
    const auto end_of = [&](int i) { return (spans[i].end + kLanes - 1) / kLanes * kLanes; };
    ScoresOfRow rows[kTileRows];
    Vec folded[kTileRows];
    for (int i = 0; i < kTileRows; ++i) folded[i] = set1(-kInfinity);
    for (int i = 0; i < count; ++i) {
        const int from = first_of(i), to = end_of(i);
        rows[i] = prepare_scores<ints>(scores + i * kPiece, spans[i], from, to, scale, ones);
        const ScoresOfRow row = rows[i];
        Vec most[4] = {folded[i], folded[i], folded[i], folded[i]};
        int c = from;
        for (; c + 4 * kLanes <= to; c += 4 * kLanes) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                most[j] = max(mul(row.at<ints>(c + j * kLanes), factor), most[j]);
            }
        }
        for (; c < to; c += kLanes) most[0] = max(mul(row.at<ints>(c), factor), most[0]);
        folded[i] = max(max(most[0], most[1]), max(most[2], most[3]));
        if (i % 4 == 3) steps.take_some();
    }
    float max_of[kTileRows], sum_of[kTileRows];
    store(max_of, fold_rows(folded, [](Vec a, Vec b) { return max(a, b); }));
    for (int i = 0; i < count; ++i) {
        const ScoresOfRow row = rows[i];
        bf16* to_row = p + i * kPiece;
        const int from = first_of(i), to = end_of(i);
        const Vec m = set1(max_of[i]);
        Vec total = zero();
        const auto at = [&](int c) __attribute__((always_inline)) {
            const Vec e = exp2_below<bf16>(sub(mul(row.at<ints>(c), factor), m));
            total = add(total, e);
            return ints ? mul(e, load(value_scales + c)) : e;
        };
        int c = from;
        for (; c + 8 * kLanes <= to; c += 8 * kLanes) {
#pragma GCC unroll 4
            for (int j = 0; j < 8; j += 2) {
                const Vec a = at(c + j * kLanes), b = at(c + (j + 1) * kLanes);
                _mm512_storeu_si512(to_row + c + j * kLanes,
                                    (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
            }
            steps.take_some();
        }
        for (; c < to; c += kLanes) store_rounded(to_row + c, at(c));
        folded[i] = total;
        if (ints) {  // masked slots may hold NaN
            for (c = from; c < spans[i].first; ++c) to_row[c] = bf16{};
            for (c = spans[i].end; c < to; ++c) to_row[c] = bf16{};
        }
    }
    for (int i = count; i < kTileRows; ++i) folded[i] = zero();
    store(sum_of, fold_rows(folded, [](Vec a, Vec b) { return add(a, b); }));
    for (int i = 0; i < count; ++i) {
        largest[i] = max_of[i];
        sum[i] = sum_of[i];
    }
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
