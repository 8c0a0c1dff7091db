// norm: rms or layer norm of each row (or of each group of columns), after x += delta if there is a
// delta. Sums rotate over four vectors, then lanes are added in a fixed order: the order depends on
// the width alone. A run's columns are read before they are written, and runs of heads separately,
// so y may be x.

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// sum_lanes, in its order, without going through memory: heads are short, and would wait for it.
QUIRE_VEC float fold_lanes(Vec a) {
#if defined(QUIRE_ZMM)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return sum_lanes(a);
#endif
}

// term(column, n) summed over all columns; lanes beyond n must come back zero.
template <class Term>
QUIRE_VEC float sum_columns(int64_t width, Term term) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    int64_t c = 0;
    for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], term(c + i * kLanes, kLanes));
    }
    for (int i = 0; c < width; c += kLanes, ++i) {
        const int64_t left = width - c;
        sums[i] = add(sums[i], term(c, static_cast<int>(left < kLanes ? left : kLanes)));
    }
    return fold_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// Correctly rounded, like the scalar instruction.
QUIRE_VEC Vec root(Vec a) {
#if defined(QUIRE_ZMM)
    return {_mm512_sqrt_ps(a.v)};
#elif defined(QUIRE_YMM)
    return {_mm256_sqrt_ps(a.v)};
#else
    for (int i = 0; i < kLanes; ++i) a.v[i] = __builtin_sqrtf(a.v[i]);
    return a;
#endif
}

// Converts sums[i], a run's sum of squares over `width` columns, to the run's factor.
QUIRE_VEC void factors_of(float* sums, int64_t width, float eps) {
    const Vec mean = div(load(sums), set1(static_cast<float>(width)));
    store(sums, div(set1(1.0f), root(add(mean, set1(eps)))));
}

// x + delta in x, as x's type holds it: what a sum over columns takes.
template <class D>
QUIRE_VEC Vec take(float* x, const D* delta, int n) {
    Vec a = load_some(x, n);
    if (delta == nullptr) return a;
    a = add(a, load_some(delta, n));
    store_some(x, a, n);
    return a;
}
template <class D>
QUIRE_VEC Vec take(bf16* x, const D* delta, int n) {
    if (delta != nullptr) store_some(x, add(load_some(x, n), load_some(delta, n)), n);
    return load_some(x, n);
}

// y = (x - center) * factor * weight + bias, two vectors at a time.
template <bool layer, class X, class Y>
QUIRE_VEC void write(const NormArgs& args, const X* x, Y* y, int64_t width, float mean,
                     float by) {
    const Vec center = set1(mean), factor = set1(by);
    const float* weight = args.weight;
    const float* bias = args.bias;
    const auto normed = [&](int64_t c, int n) __attribute__((always_inline)) {
        Vec a = load_some(x + c, n);
        if (layer) a = sub(a, center);
        a = mul(a, factor);
        if (weight != nullptr) a = mul(a, load_some(weight + c, n));
        if (bias != nullptr) a = add(a, load_some(bias + c, n));
        return a;
    };
    int64_t c = 0;
    for (; c + 2 * kLanes <= width; c += 2 * kLanes) {
        const Vec a = normed(c, kLanes), b = normed(c + kLanes, kLanes);
        store_two(y + c, a, b);
    }
    for (; c < width; c += kLanes) {
        const int n = width - c < kLanes ? static_cast<int>(width - c) : kLanes;
        store_some(y + c, normed(c, n), n);
    }
}

// `count` runs of `width` columns each, at most kLanes: their factors are computed together, since
// a root and two divisions of a short run take longer than all the rest of it.
template <class X, class D, class Y>
void rms_runs(const NormArgs& args, X* x, const D* delta, Y* y, int64_t width, int64_t count) {
    float sums[kLanes] = {};
    // Prefetched meanwhile: another core has often written it.
    const X* next = x + args.x.stride;
    const D* next_delta = delta == nullptr ? nullptr : delta + args.delta.stride;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t first = i * width;
        sums[i] = sum_columns(width, [&](int64_t c, int n) __attribute__((always_inline)) {
            const int64_t at = first + c;
            prefetch_l1(next + at);
            if (next_delta != nullptr) prefetch_l1(next_delta + at);
            const Vec a = take(x + at, delta == nullptr ? nullptr : delta + at, n);
            return mul(a, a);
        });
    }
    factors_of(sums, width, args.eps);
    for (int64_t i = 0; i < count; ++i) {
        write<false>(args, x + i * width, y + i * width, width, 0.0f, sums[i]);
    }
}

template <class X, class D, class Y>
void layer_run(const NormArgs& args, X* x, const D* delta, Y* y, int64_t width) {
    const float mean = sum_columns(width, [&](int64_t c, int n) __attribute__((always_inline)) {
                           return take(x + c, delta == nullptr ? nullptr : delta + c, n);
                       }) / static_cast<float>(width);
    const Vec center = set1(mean);
    float sums[kLanes] = {};
    sums[0] = sum_columns(width, [&](int64_t c, int n) __attribute__((always_inline)) {
        const Vec a = keep_first(sub(load_some(x + c, n), center), n, 0.0f);
        return mul(a, a);
    });
    factors_of(sums, width, args.eps);
    write<true>(args, x, y, width, mean, sums[0]);
}

template <class X, class D, class Y>
void norm_row(const NormArgs& args, X* x, const D* delta, Y* y) {
    const int64_t width = args.x.width;
    const int64_t run = args.group > 0 ? args.group : width;
    const int64_t step = args.layer ? run : run * kLanes;
    for (int64_t c = 0; c < width; c += step) {
        const D* of_run = delta == nullptr ? nullptr : delta + c;
        if (args.layer) {
            layer_run(args, x + c, of_run, y + c, run);
        } else {
            const int64_t count = width - c < step ? (width - c) / run : kLanes;
            rms_runs(args, x + c, of_run, y + c, run, count);
        }
    }
}

}  // namespace

void norm(const NormArgs& args) {
    args.pool->deal(args.rows, rows_per_chunk(args.x.width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.x.type, [&](auto* x_tag) {
                auto* x = static_cast<decltype(x_tag)>(args.x.at(row));
                with_type(args.y.type, [&](auto* y_tag) {
                    auto* y = static_cast<decltype(y_tag)>(args.y.at(row));
                    if (args.delta.data == nullptr) {
                        return norm_row(args, x, static_cast<const float*>(nullptr), y);
                    }
                    with_type(args.delta.type, [&](auto* delta_tag) {
                        const auto* delta = static_cast<decltype(delta_tag)>(args.delta.at(row));
                        norm_row(args, x, delta, y);
                    });
                });
            });
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
