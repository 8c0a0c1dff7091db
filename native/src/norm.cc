// norm: rms or layer norm of each row (or of each group of columns), after x += delta where
// there is a delta. Sums go into four vectors in turn, then lanes are added in a fixed order:
// the order depends on the width alone. x is read before y is written, so y may be x.

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// sum_lanes, in its order, without the way through memory: heads are short, and wait for it.
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

template <class X, class D>
QUIRE_VEC void add_delta(X* x, const D* delta, int64_t width) {
    for_columns(width, [&](int64_t c, int n) {
        store_some(x + c, add(load_some(x + c, n), load_some(delta + c, n)), n);
    });
}

template <class X, class Y>
void norm_run(const NormArgs& args, const X* x, Y* y, int64_t width) {
    float mean = 0.0f;
    if (args.layer) {
        mean = sum_columns(width, [&](int64_t c, int n) { return load_some(x + c, n); }) /
               static_cast<float>(width);
    }
    const Vec center = set1(mean);
    const float squares = sum_columns(width, [&](int64_t c, int n) {
        Vec a = load_some(x + c, n);
        if (args.layer) a = keep_first(sub(a, center), n, 0.0f);
        return mul(a, a);
    });
    const float mean_square = squares / static_cast<float>(width);
    const Vec factor = set1(1.0f / __builtin_sqrtf(mean_square + args.eps));
    for_columns(width, [&](int64_t c, int n) {
        Vec a = load_some(x + c, n);
        if (args.layer) a = sub(a, center);
        a = mul(a, factor);
        if (args.weight != nullptr) a = mul(a, load_some(args.weight + c, n));
        if (args.bias != nullptr) a = add(a, load_some(args.bias + c, n));
        store_some(y + c, a, n);
    });
}

}  // namespace

void norm(const NormArgs& args) {
    const int64_t width = args.x.width;
    const int64_t run = args.group > 0 ? args.group : width;
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            with_type(args.x.type, [&](auto* x_tag) {
                auto* x = static_cast<decltype(x_tag)>(args.x.at(row));
                if (args.delta.data != nullptr) {
                    with_type(args.delta.type, [&](auto* delta_tag) {
                        add_delta(x, static_cast<decltype(delta_tag)>(args.delta.at(row)), width);
                    });
                }
                with_type(args.y.type, [&](auto* y_tag) {
                    auto* y = static_cast<decltype(y_tag)>(args.y.at(row));
                    for (int64_t c = 0; c < width; c += run) norm_run(args, x + c, y + c, run);
                });
            });
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
