// linear_ints: y = x @ W.T (+ bias) with W in 8 or 4 bits (int_layout.h).
//
// Rows of x are quantized first (int_rows.h), once for all panels. Then each output is a sum of
// exact integer sums, scaled in f32 in the order of K (int_tiles.h); int8's channel scale follows,
// then the bias, then one rounding to y's type. The same bits on every instruction set with fused
// multiply-add, whatever the number of rows and threads.
//
// Each thread processes one long run of panels: hardware prefetchers restart at every jump.

#include "quire/amx_few_int_rows.h"
#include "quire/deal_halving.h"
#include "quire/int_tiles.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kBlockRows = 192;  // rows of x that stay in L2

// How rows are divided: packs within blocks, of nearly equal counts or all full except the last.
struct Packing {
    int64_t rows, block_rows, most;  // most: rows of a pack
    bool full;

    __attribute__((always_inline)) int64_t rows_of(int64_t block) const {
        const int64_t left = rows - block * block_rows;
        return left < block_rows ? left : block_rows;
    }
    __attribute__((always_inline)) int64_t packs_of(int64_t block) const {
        return (rows_of(block) + most - 1) / most;
    }
    // First row of pack `i` of a block, from the block's first.
    __attribute__((always_inline)) int64_t first_of(int64_t block, int64_t i) const {
        const int64_t count = rows_of(block), packs = packs_of(block);
        if (full) return i < packs ? i * most : count;
        const int64_t longer = count % packs;
        return count / packs * i + (i < longer ? i : longer);
    }
};

template <class T>
QUIRE_VEC void quantize_block(const Rows& x, const RowShape& shape, const Packing& packing,
                              int64_t block, int64_t i, char* rows) {
    const int64_t first = block * packing.block_rows + packing.first_of(block, i);
    const int64_t end = block * packing.block_rows + packing.first_of(block, i + 1);
    const RowPack pack{rows + first * shape.row_bytes(), end - first};
    for (int64_t row = first; row < end; ++row) {
        quantize_row(static_cast<const T*>(x.at(row)), shape, pack, row - first);
    }
}

// Quantizes all rows, into memory shared by all threads.
char* quantize(const LinearIntsArgs& args, const RowShape& shape, const Packing& packing) {
    char* rows = args.pool->shared(args.rows * shape.row_bytes());
    const int64_t blocks = (args.rows + packing.block_rows - 1) / packing.block_rows;
    const int64_t packs = packing.packs_of(0);  // of every block except the last, which has no more
    const int64_t pack_work = packing.most * shape.k;
    const int64_t grain = pack_work < 16384 ? 16384 / (pack_work + 1) + 1 : 1;
    args.pool->deal(blocks * packs, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t task = begin; task < end; ++task) {
            const int64_t block = task / packs, i = task % packs;
            if (i >= packing.packs_of(block)) continue;
            if (args.x.type == Type::f32) {
                quantize_block<float>(args.x, shape, packing, block, i, rows);
            } else {
                quantize_block<bf16>(args.x, shape, packing, block, i, rows);
            }
        }
    });
    return rows;
}

// Scales channels (if scales are given), adds the bias and rounds a panel's sums into y.
template <class Y>
QUIRE_VEC void finish(const float* sums, int64_t rows, const float* scales,
                      const LinearIntsArgs& args, int64_t first_row, int64_t first) {
    const int64_t left = args.weight.n - first;
    const int64_t count = left < kIntLanes ? left : kIntLanes;
    for (int64_t i = 0; i < rows; ++i) {
        Y* out = static_cast<Y*>(args.y.at(first_row + i)) + first;
        for (int64_t c = 0; c < count; c += kLanes) {
            Vec sum = load(sums + i * kIntLanes + c);
            const int n = static_cast<int>(count - c < kLanes ? count - c : kLanes);
            if (scales != nullptr) sum = mul(sum, load(scales + c));
            if (args.bias != nullptr) sum = add(sum, load_some(args.bias + first + c, n));
            store_some(out + c, sum, n);
        }
    }
}

// Of int8, a panel's scales; null of int4.
QUIRE_VEC const float* channel_scales(const char* panel, const LinearIntsArgs& args) {
    if (args.weight.scheme.bits != 8) return nullptr;
    return reinterpret_cast<const float*>(panel +
                                          int_steps(args.weight.k) * (kIntStep / 4) * kQuadBytes);
}

QUIRE_VEC void finish(const float* sums, int64_t rows, const char* panel,
                      const LinearIntsArgs& args, int64_t first_row, int64_t first) {
    const float* scales = channel_scales(panel, args);
    if (args.y.type == Type::f32) {
        finish<float>(sums, rows, scales, args, first_row, first);
    } else {
        finish<bf16>(sums, rows, scales, args, first_row, first);
    }
}

#if !defined(QUIRE_AMX)

template <int kBits>
QUIRE_VEC IntTile tile_of(int64_t rows, int64_t packs) {
    if (packs == 1) return int_tile<kBits, IntFetch::same_stream>(rows);
    if (packs <= 16) return int_tile<kBits, IntFetch::next_panel>(rows);
    return int_tile<kBits, IntFetch::none>(rows);
}

// Multiplies all rows of one block by one panel.
void panel_block(const LinearIntsArgs& args, const RowShape& shape, const Packing& packing,
                 char* rows, int64_t block, int64_t panel_index) {
    alignas(64) float sums[kIntRows * kIntLanes];
    const IntScheme& scheme = args.weight.scheme;
    const int64_t bytes = int_panel_bytes(args.weight.k, scheme);
    const char* panel = static_cast<const char*>(args.weight.data) + panel_index * bytes;
    const int64_t packs = packing.packs_of(block);
    for (int64_t i = 0; i < packs; ++i) {
        const int64_t first = block * packing.block_rows + packing.first_of(block, i);
        const int64_t count = packing.first_of(block, i + 1) - packing.first_of(block, i);
        const RowPack pack{rows + first * shape.row_bytes(), count};
        const char* ahead = packs == 1 ? panel + kStreamAheadBytes
                                       : panel + bytes + bytes / 64 * i / packs * 64;
        const IntTile tile = scheme.bits == 8 ? tile_of<8>(count, packs) : tile_of<4>(count, packs);
        tile(pack, shape, scheme, panel, sums, ahead);
        finish(sums, count, panel, args, first, panel_index * kIntLanes);
    }
}

Packing packing_for(const LinearIntsArgs& args) {
    // With T in registers several passes of few rows are faster than few passes of many.
    const bool several = args.weight.scheme.bits == 4 && args.rows > kIntRows && kFoldedRows > 0;
    return {args.rows, kBlockRows, several ? kFoldedRows : kIntRows, false};
}

// All rows, distributed by panels and blocks.
void vector_linear_ints(const LinearIntsArgs& args, const RowShape& shape) {
    const Packing packing = packing_for(args);
    char* rows = quantize(args, shape, packing);
    const int64_t panels = (args.weight.n + kIntLanes - 1) / kIntLanes;
    const int64_t blocks = (args.rows + packing.block_rows - 1) / packing.block_rows;
    const int64_t work = args.weight.k * kIntLanes * packing.rows_of(0);
    const int64_t grain = work < 32768 ? 32768 / work : 1;
    args.pool->deal(panels * blocks, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t task = begin; task < end; ++task) {
            panel_block(args, shape, packing, rows, task / panels, task % panels);
        }
    });
}

#else

// Up to so many rows a vector tile is as fast: for int8, and for int4, which it need not expand.
constexpr int64_t kVectorRows = 2;
constexpr int64_t kVectorRows4 = 4;
// For int4 with so many groups per block: from how many rows on bytes in steps cost less than sums
// of each group.
constexpr int64_t fewest_in_steps(int groups) { return groups == 4 ? 9 : 25; }
constexpr int64_t kBlockBytes = 5 << 18;      // of rows: what stays in L2
constexpr int64_t kMostBlockRows = 1024;
constexpr int64_t kPanelsAtOnce = 8;
constexpr int64_t kStreamedBytes = 4 << 20;   // of y, from which non-temporal stores are used
constexpr int64_t kWritesPastBytes = 1 << 20;  // the same for weights, with few rows

// Writes a whole panel's rows to y by non-temporal stores: reading its lines first, as plain stores
// do, costs more than the product if y is larger than the caches.
QUIRE_VEC void stream_rows(const float* sums, int64_t rows, const float* scales,
                           const LinearIntsArgs& args, int64_t first_row, int64_t first) {
    for (int64_t i = 0; i < rows; ++i) {
        Vec v[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            v[j] = load(sums + i * kIntLanes + j * kLanes);
            if (scales != nullptr) v[j] = mul(v[j], load(scales + j * kLanes));
            if (args.bias != nullptr) v[j] = add(v[j], load(args.bias + first + j * kLanes));
        }
        if (args.y.type == Type::f32) {
            float* out = static_cast<float*>(args.y.at(first_row + i)) + first;
            _mm512_stream_ps(out, v[0].v);
            _mm512_stream_ps(out + kLanes, v[1].v);
        } else {
            bf16* out = static_cast<bf16*>(args.y.at(first_row + i)) + first;
            const __m512i low = _mm512_castsi256_si512(round_words(v[0]));
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out),
                                _mm512_inserti64x4(low, round_words(v[1]), 1));
        }
    }
}

// Finishes rows of a block from `first` on.
struct FinishRows {
    const LinearIntsArgs& args;
    int64_t first;
    bool streams;

    __attribute__((always_inline)) void operator()(int64_t panel, const float* sums, int64_t row,
                                                   int64_t rows) const {
        const int64_t bytes = int_panel_bytes(args.weight.k, args.weight.scheme);
        if (streams && (panel + 1) * kIntLanes <= args.weight.n) {
            const char* at = static_cast<const char*>(args.weight.data) + panel * bytes;
            return stream_rows(sums, rows, channel_scales(at, args), args, first + row,
                               panel * kIntLanes);
        }
        finish(sums, rows, static_cast<const char*>(args.weight.data) + panel * bytes, args,
               first + row, panel * kIntLanes);
    }
};

// Consecutive panels of the same kind: with scales in steps, or not.
void like_panels(const AmxBlock& block, bool in_steps, const AmxScratch& scratch,
                 const FinishRows& finish) {
    const IntScheme& scheme = block.weight.scheme;
    if (scheme.bits == 8) return amx_int_panels<IntForm::int8, false>(block, scratch, finish);
    if (in_steps) return amx_int_panels<IntForm::group128, true>(block, scratch, finish);
    if (scheme.group == 32) return amx_int_panels<IntForm::group32, false>(block, scratch, finish);
    if (scheme.group == 64) return amx_int_panels<IntForm::group64, false>(block, scratch, finish);
    amx_int_panels<IntForm::group128, false>(block, scratch, finish);
}

void amx_panels(AmxBlock block, const AmxScratch& scratch, const FinishRows& finish) {
    const IntScheme& scheme = block.weight.scheme;
    const int64_t end = block.end_panel, bytes = int_panel_bytes(block.weight.k, scheme);
    const auto in_steps = [&](int64_t panel) __attribute__((always_inline)) {
        return scheme.bits == 4 &&
               panel_in_steps(static_cast<const char*>(block.weight.data) + panel * bytes, scheme,
                              block.shape.steps);
    };
    while (block.first_panel < end) {
        const bool are = in_steps(block.first_panel);
        block.end_panel = block.first_panel + 1;
        while (block.end_panel < end && in_steps(block.end_panel) == are) ++block.end_panel;
        like_panels(block, are, scratch, finish);
        block.first_panel = block.end_panel;
    }
}

bool rows_are_lines(const LinearIntsArgs& args) {
    return args.y.stride * type_bytes(args.y.type) % 64 == 0 &&
           reinterpret_cast<uintptr_t>(args.y.data) % 64 == 0;
}

template <class Feed>
bool few_panels(const AmxBlock& block, const FinishRows& finish) {
    if (block.rows > kTileRows) return few_int_panels<Feed, true>(block, finish);
    return few_int_panels<Feed, false>(block, finish);
}

// For kGroups groups per block. Scales mostly are in steps, or else are not from the beginning.
template <int kGroups>
void few_int4_panels(const AmxBlock& block, const FinishRows& finish) {
    if (block.weight.scheme.has_zero_points) {
        few_panels<Int4Feed<kGroups, Int4Bytes::less_zeros>>(block, finish);
        return;
    }
    if constexpr (kGroups > 1) {
        if (block.rows >= fewest_in_steps(kGroups) &&
            few_panels<Int4Feed<kGroups, Int4Bytes::in_steps>>(block, finish)) {
            return;
        }
    }
    few_panels<Int4Feed<kGroups, Int4Bytes::sixteenfold>>(block, finish);
}

void few_panels(const AmxBlock& block, const FinishRows& finish) {
    const IntScheme& scheme = block.weight.scheme;
    if (scheme.bits == 8) {
        few_panels<Int8Feed>(block, finish);
    } else if (scheme.group == 32) {
        few_int4_panels<4>(block, finish);
    } else if (scheme.group == 64) {
        few_int4_panels<2>(block, finish);
    } else {
        few_int4_panels<1>(block, finish);
    }
}

// Quantizes rows of one pack: all threads share even one row.
char* quantize_few(const LinearIntsArgs& args, const RowShape& shape) {
    constexpr int64_t kGrain = 32;  // groups, about a microsecond
    const RowPack pack{args.pool->shared(args.rows * shape.row_bytes()), args.rows};
    args.pool->deal(shape.groups * args.rows, kGrain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t g = i / args.rows, row = i % args.rows;
            if (args.x.type == Type::f32) {
                quantize_group(static_cast<const float*>(args.x.at(row)), g, shape, pack, row);
            } else {
                quantize_group(static_cast<const bf16*>(args.x.at(row)), g, shape, pack, row);
            }
        }
    });
    return pack.base;
}

// Multiplies panels first .. end by rows that take one pass of vectors.
void vector_panels(const LinearIntsArgs& args, const RowShape& shape, const RowPack& pack,
                   int64_t first, int64_t end, const FinishRows& finish) {
    alignas(64) float sums[kIntRows * kIntLanes];
    const IntScheme& scheme = args.weight.scheme;
    const int64_t bytes = int_panel_bytes(args.weight.k, scheme);
    const IntTile tile = scheme.bits == 8 ? int_tile<8, IntFetch::same_stream>(pack.count)
                                          : int_tile<4, IntFetch::same_stream>(pack.count);
    for (int64_t panel = first; panel < end; ++panel) {
        const char* weights = static_cast<const char*>(args.weight.data) + panel * bytes;
        tile(pack, shape, scheme, weights, sums, weights + kStreamAheadBytes);
        finish(panel, sums, 0, pack.count);
    }
}

// Up to kFewRows rows: memory-bound, each thread processes one run of panels.
void few_linear_ints(const LinearIntsArgs& args, const RowShape& shape) {
    char* rows = quantize_few(args, shape);
    const int64_t panels = (args.weight.n + kIntLanes - 1) / kIntLanes;
    const int64_t bytes = int_panel_bytes(args.weight.k, args.weight.scheme);
    const bool streams = panels * bytes >= kWritesPastBytes && rows_are_lines(args);
    const int64_t vector_rows = args.weight.scheme.bits == 8 ? kVectorRows : kVectorRows4;
    const FinishRows finish{args, 0, streams};
    deal_halving(*args.pool, panels, bytes, [&](int64_t begin, int64_t end, int) {
        if (args.rows <= vector_rows) {
            vector_panels(args, shape, {rows, args.rows}, begin, end, finish);
        } else {
            few_panels({rows, args.rows, shape, args.weight, begin, end}, finish);
        }
        _mm_sfence();  // orders non-temporal stores before what follows the deal
    });
}

void amx_linear_ints(const LinearIntsArgs& args, const RowShape& shape) {
    const int64_t fitting = kBlockBytes / (shape.steps * kIntStep) / kPackRows * kPackRows;
    const int64_t most = fitting < 2 * kPackRows ? 2 * kPackRows : fitting;
    const Packing packing{args.rows, most < kMostBlockRows ? most : kMostBlockRows, kPackRows,
                          true};
    char* rows = quantize(args, shape, packing);
    const int64_t panels = (args.weight.n + kIntLanes - 1) / kIntLanes;
    const int64_t blocks = (args.rows + packing.block_rows - 1) / packing.block_rows;
    const int64_t work = args.weight.k * kIntLanes * packing.rows_of(0);
    // Consecutive panels overlap; each thread still has several chunks.
    const int64_t some = panels * blocks / (8 * args.pool->num_threads());
    const int64_t overlapping = some < kPanelsAtOnce ? some : kPanelsAtOnce;
    const int64_t least = work < 262144 ? 262144 / work : 1;
    const int64_t grain = overlapping > least ? overlapping : least;
    const int64_t row_bytes = args.y.stride * type_bytes(args.y.type);
    const bool streams = args.rows * row_bytes >= kStreamedBytes && rows_are_lines(args);
    args.pool->deal(panels * blocks, grain, [&](int64_t begin, int64_t end, int thread) {
        const AmxScratch scratch = AmxScratch::at(
            args.pool->scratch(thread, AmxScratch::size(shape.steps)), shape.steps);
        while (begin < end) {
            const int64_t block = begin / panels, left = (block + 1) * panels - begin;
            const int64_t count = end - begin < left ? end - begin : left;
            const int64_t first = block * packing.block_rows;
            amx_panels({rows + first * shape.row_bytes(), packing.rows_of(block), shape,
                        args.weight, begin % panels, begin % panels + count},
                       scratch, {args, first, streams});
            begin += count;
        }
        release_tiles();
        _mm_sfence();  // orders non-temporal stores before what follows the deal
    });
}

#endif

}  // namespace

void linear_ints(const LinearIntsArgs& args) {
    if (args.rows == 0) return;
    const RowShape shape = RowShape::of(args.weight.k, args.weight.scheme);
#if defined(QUIRE_AMX)
    if (args.rows <= kFewRows) return few_linear_ints(args, shape);
    amx_linear_ints(args, shape);
#else
    vector_linear_ints(args, shape);
#endif
}

}  // namespace quire::QUIRE_ISA_NS
