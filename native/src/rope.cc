// rope: rotates pairs (i, i + half) of each head by the angle of the row's position. Plain products
// and one sum, without fma: the same bits on every instruction set. Columns of a head past the
// angles stay unchanged; positions were checked against the table by the interpreter.

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// n columns of both halves of a head, and two vectors of each at once.
template <class X>
QUIRE_VEC void turn(X* x, int64_t half, const float* cos, const float* sin, int n) {
    const Vec a = load_some(x, n), b = load_some(x + half, n);
    const Vec cosine = load_some(cos, n), sine = load_some(sin, n);
    store_some(x, sub(mul(a, cosine), mul(b, sine)), n);
    store_some(x + half, add(mul(b, cosine), mul(a, sine)), n);
}
template <class X>
QUIRE_VEC void turn_two(X* x, int64_t half, const float* cos, const float* sin) {
    const Vec a = load(x), b = load(x + half);
    const Vec more_a = load(x + kLanes), more_b = load(x + half + kLanes);
    const Vec cosine = load(cos), sine = load(sin);
    const Vec more_cosine = load(cos + kLanes), more_sine = load(sin + kLanes);
    store_two(x, sub(mul(a, cosine), mul(b, sine)),
              sub(mul(more_a, more_cosine), mul(more_b, more_sine)));
    store_two(x + half, add(mul(b, cosine), mul(a, sine)),
              add(mul(more_b, more_cosine), mul(more_a, more_sine)));
}

}  // namespace

void rope(const RopeArgs& args) {
    const int64_t half = args.half;
    const int64_t width = args.heads * args.head_dim;
    args.pool->deal(args.rows, rows_per_chunk(width), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            const float* cos = args.cos + args.positions[row] * half;
            const float* sin = args.sin + args.positions[row] * half;
            with_type(args.x.type, [&](auto* tag) {
                auto* x = static_cast<decltype(tag)>(args.x.at(row));
                for (int64_t head = 0; head < args.heads; ++head, x += args.head_dim) {
                    int64_t c = 0;
                    for (; c + 2 * kLanes <= half; c += 2 * kLanes) {
                        turn_two(x + c, half, cos + c, sin + c);
                    }
                    for (; c < half; c += kLanes) {
                        const int n = half - c < kLanes ? static_cast<int>(half - c) : kLanes;
                        turn(x + c, half, cos + c, sin + c, n);
                    }
                }
            });
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
