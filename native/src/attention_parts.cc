// attention_parts and merge_parts: attention in two halves, for ranks that have a cache's pieces of
// 256 positions by turns. A rank attends to each of its pieces by itself (attention.cc has the
// recipe), and the parts are merged in the order of positions, whichever rank they come from: the
// same operations in the same order as in one process.

#include "quire/attention_walk.h"
#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

static_assert(kPiece == kPiecePositions);

namespace {

// A run of tokens, one KV head, one piece. Returns how many pieces were read: one, or none where
// the run sees nothing of it.
template <class T>
int64_t attend_piece(const AttentionPartsArgs& args, const TokenRun& run, int64_t kv_head,
                     int64_t piece, char* scratch) {
    const AttentionArgs& all = args.attention;
    const int64_t group = all.heads / all.shape.kv_heads, stop = run.end * group;
    const int64_t part = all.shape.head_dim + kPartNumbers;
    const int32_t* table = all.block_tables + run.sequence * all.table_columns;
    if (piece < first_piece_of(all.positions[run.begin], all.window)) return 0;
    if (piece > all.positions[run.end - 1] / kPiece) return 0;
    typename WalkOf<T>::type walk(all, kv_head, scratch);
    int64_t read = 0;
    for (int64_t row = run.begin * group, first = row; row < stop; ++row) {
        walk.add_row(row / group, kv_head * group + row % group);
        if (!walk.full() && row + 1 < stop) continue;
        read += walk.attend(table, 0, walk.num_rows(), piece, piece + 1);
        for (int i = 0; i < walk.num_rows(); ++i, ++first) {
            if (!walk.has_part(i)) continue;
            const int64_t token = first / group, head = kv_head * group + first % group;
            int64_t begin = first_piece_of(all.positions[token], all.window);
            if (begin < args.first_piece) begin = args.first_piece;
            const int64_t at = args.starts[token] + (piece - begin) / args.degree;
            walk.write_part(i, args.parts + (at * all.heads + head) * part);
        }
        walk.clear();
    }
    return read;
}

// Adds a part to the sums of a head, as a walk merges a piece.
void merge(const float* part, int64_t dim, float* sums) {
    const Vec old = set1(sums[dim]), fresh = set1(part[dim]);
    const Vec most = max(old, fresh);
    const Vec a = exp2_below<float>(sub(old, most)), b = exp2_below<float>(sub(fresh, most));
    sums[dim] = first_lane(most);
    sums[dim + 1] = first_lane(fma(set1(part[dim + 1]), b, mul(set1(sums[dim + 1]), a)));
    for_columns(dim, [&](int64_t c, int n) {
        store_some(sums + c, fma(load_some(part + c, n), b, mul(load_some(sums + c, n), a)), n);
    });
}

void merge_head(const MergePartsArgs& args, int64_t index, int64_t head) {
    const int64_t dim = args.head_dim, size = dim + kPartNumbers, token = args.begin + index;
    const int64_t first = first_piece_of(args.positions[token], args.window);
    const int64_t end = args.positions[token] / kPiece + 1;
    const int64_t from = first > args.first_piece ? first : args.first_piece;
    const int64_t to = end < args.end_piece ? end : args.end_piece;
    float* sums = args.sums + (index * args.heads + head) * size;
    for (int64_t piece = from; piece < to; ++piece) {
        const int64_t start = args.starts[piece % args.degree * args.num_tokens + token];
        const int64_t at = start + (piece - from) / args.degree;
        const float* part = args.parts + (at * args.heads + head) * size;
        if (piece == first) {
            __builtin_memcpy(sums, part, static_cast<size_t>(size) * sizeof(float));
        } else {
            merge(part, dim, sums);
        }
    }
    if (from >= to || to < end) return;
    const Vec l = set1(sums[dim + 1]);
    with_type(args.y.type, [&](auto* y) {
        y = static_cast<decltype(y)>(args.y.at(token)) + head * dim;
        for_columns(dim, [&](int64_t c, int n) {
            store_some(y + c, div(load_some(sums + c, n), l), n);
        });
    });
}

}  // namespace

void attention_parts(const AttentionPartsArgs& args) {
    const AttentionArgs& all = args.attention;
    const int64_t kv_heads = all.shape.kv_heads, degree = args.degree;
    const int64_t own = args.first_piece + (args.rank + degree - args.first_piece % degree) % degree;
    const int64_t pieces = own < args.end_piece ? (args.end_piece - own - 1) / degree + 1 : 0;
    const bool wide = all.shape.type == Type::f32;
    // Ordered by run, then piece, then KV head: heads of a block are adjacent in memory.
    all.pool->deal(args.num_runs * pieces * kv_heads, 1,
                   [&](int64_t begin, int64_t end, int thread) {
        char* scratch = nullptr;
        if (all.shape.ints || all.shape.key_group() < kKeyGroup) {
            scratch = all.pool->scratch(
                thread, wide ? Expanded<float>::bytes(all.shape) : Expanded<bf16>::bytes(all.shape));
        }
        const auto attend = wide ? attend_piece<float> : attend_piece<bf16>;
        int64_t read = 0;
        for (int64_t item = begin; item < end; ++item) {
            const int64_t piece = own + item / kv_heads % pieces * degree;
            read += attend(args, args.runs[item / kv_heads / pieces], item % kv_heads, piece,
                           scratch);
        }
        __atomic_fetch_add(all.pieces_read, read, __ATOMIC_RELAXED);
    });
}

void merge_parts(const MergePartsArgs& args) {
    const int64_t grain = rows_per_chunk(args.head_dim);
    args.pool->deal(args.count * args.heads, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
            merge_head(args, item / args.heads, item % args.heads);
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
