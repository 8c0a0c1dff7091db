// rope: turns pairs (i, i + half) of each head by the angle of the row's position. Plain
// products and one sum, without fma: the same bits on every instruction set. Columns of a head
// past the angles stay as they are; positions were checked against the table by the interpreter.

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

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
                    for_columns(half, [&](int64_t c, int n) {
                        const Vec a = load_some(x + c, n), b = load_some(x + half + c, n);
                        const Vec cosine = load_some(cos + c, n), sine = load_some(sin + c, n);
                        store_some(x + c, sub(mul(a, cosine), mul(b, sine)), n);
                        store_some(x + half + c, add(mul(b, cosine), mul(a, sine)), n);
                    });
                }
            });
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
