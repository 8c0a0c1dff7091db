// Integer products on the matrix unit: 16 rows by 16 columns by 64 of K at once (TDPBSUD, TDPBSSD).
// Sums are exact, so the results are those of int_tiles.h, bit for bit.
//
// int8 weights are loaded as they are stored, a tile being 16 quads of 64 bytes; the rows' starts
// subtract the offset of their bytes. A panel of int4 first becomes signed bytes in scratch, for
// all rows of a block, with zero points subtracted; if groups' scales are multiples of steps, their
// bytes are scaled too, and 128 of K are one sum (amx_int_steps.h).
//
// A batch is a pack of up to 32 rows by some sums of K. All other work is interleaved with the
// products: a tile is stored just before it is restarted (consecutive stores would stall the unit),
// the previous batch is scaled, and rows before these are finished. The L1 cache is the bottleneck:
// F of a group of two packs stays there over all of K, a stretch of the weights is used by both,
// and x streams through it. Only for files compiled once per instruction set, with AMX.
#pragma once

#include "quire/amx_int_steps.h"
#include "quire/int_rows.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kPackRows = 32;          // two tiles
constexpr int64_t kGroupRows = 2 * kPackRows;
constexpr int64_t kStretchSteps = 4;       // of 64 of K: weights that stay in the L1 cache
constexpr int64_t kSumInts = kPackRows * kIntLanes;  // of one sum of all rows
constexpr int64_t kMostSums = 4;           // of a batch
constexpr int64_t kGroupFloats = kGroupRows * kIntLanes;

// How a scheme divides K: `sum_steps` halves of a step of 64 are one sum; a batch has `sums` of
// them, which are scaled together.
enum class IntForm { int8, group128, group64, group32 };
template <IntForm form>
struct FormShape {
    static constexpr bool kIsInt8 = form == IntForm::int8;
    static constexpr int kSums = form == IntForm::group32 ? 4 : 2;
    static constexpr int kHalves = form == IntForm::group32 ? 1 : form == IntForm::group64 ? 2 : 4;
    static constexpr int kBatchSteps = kSums * kHalves / 2;
    static constexpr int kSumsOfGroup = 4 / kHalves;  // sums of 128 of K
};

// Tiles 0 1 / 2 3: sums of the upper and lower rows. 4, 5: their x. 6, 7: the weight's halves.
QUIRE_VEC void configure_int_tiles(int64_t rows, bool half_steps) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const uint8_t upper = static_cast<uint8_t>(rows < kTileRows ? rows : kTileRows);
    const uint8_t lower = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : 1);
    const uint8_t quads = half_steps ? 8 : 16;
    const uint8_t tile_rows[8] = {upper, upper, lower, lower, upper, lower, quads, quads};
#pragma GCC unroll 8
    for (int tile = 0; tile < 8; ++tile) {
        config.column_bytes[tile] = tile == 4 || tile == 5 ? 4 * quads : 64;
        config.rows[tile] = tile_rows[tile];
    }
    memory_barrier();
    _tile_loadconfig(&config);
}

// A batch with sums that are not scaled yet.
struct Batch {
    const int32_t* sums = nullptr;  // [sums][32 rows][32 lanes]; null: none
    const float* scales;            // of the rows, from the batch's first 128 of K
    const int32_t* starts;          // of int8
    const float* weight_scales;     // [sums][32], of int4
    int64_t rows;
    int64_t num_sums;
    float* out;   // F [rows][32]
    bool begins;  // F starts at zero
};

// Adds rows first .. end of a batch of kSums sums to F, in the recipe's order.
template <IntForm form, int kSums>
QUIRE_VEC void fold_sums(const Batch& batch, int64_t first, int64_t end) {
    using Shape = FormShape<form>;
    // Copies in registers: for all GCC knows, the stores below may alias the batch.
    const int64_t rows = batch.rows;
    const int32_t* sums = batch.sums + first * kIntLanes;
    const float* scales = batch.scales + first;
    const int32_t* starts = batch.starts + first;
    const float* weight_scales = batch.weight_scales;
    float* out = batch.out + first * kIntLanes;
    const bool begins = batch.begins;
    for (int64_t row = first; row < end; ++row) {
        Vec f[2] = {zero(), zero()};
        if (!begins) {
            f[0] = load(out);
            f[1] = load(out + kLanes);
        }
        Vec t[2] = {zero(), zero()};
#pragma GCC unroll 4
        for (int g = 0; g < kSums; ++g) {
            __m512i sum[2];
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                sum[j] = _mm512_load_si512(sums + g * kSumInts + j * kLanes);
            }
            if constexpr (Shape::kIsInt8) {
                const Vec scale = set1(scales[g * rows]);
                const __m512i start = _mm512_set1_epi32(starts[g * rows]);
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const __m512i exact = _mm512_add_epi32(sum[j], start);
                    f[j] = fma({_mm512_cvtepi32_ps(exact)}, scale, f[j]);
                }
            } else {
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const Vec scale = load(weight_scales + g * kIntLanes + j * kLanes);
                    t[j] = fma({_mm512_cvtepi32_ps(sum[j])}, scale, t[j]);
                }
                if ((g + 1) % Shape::kSumsOfGroup == 0 || g + 1 == kSums) {
                    const Vec scale = set1(scales[g / Shape::kSumsOfGroup * rows]);
#pragma GCC unroll 2
                    for (int j = 0; j < 2; ++j) {
                        f[j] = fma(t[j], scale, f[j]);
                        t[j] = zero();
                    }
                }
            }
        }
        store(out, f[0]);
        store(out + kLanes, f[1]);
        sums += kIntLanes;
        out += kIntLanes;
        ++scales;
        ++starts;
    }
}

template <IntForm form>
QUIRE_VEC void fold_rows(const Batch& batch, int64_t first, int64_t end) {
    constexpr int kSums = FormShape<form>::kSums;
    if (batch.num_sums == kSums) return fold_sums<form, kSums>(batch, first, end);
    if (kSums > 2 && batch.num_sums == 3) return fold_sums<form, 3>(batch, first, end);
    if (kSums > 2 && batch.num_sums == 2) return fold_sums<form, 2>(batch, first, end);
    fold_sums<form, 1>(batch, first, end);
}

// Lines to be prefetched after each product of tiles: address, count, cache level.
struct LinesAhead {
    const char* at = nullptr;
    int64_t lines = 0;
    bool near = false;
};

QUIRE_VEC void fetch_lines(LinesAhead& ahead) {
    if (ahead.near) {
        for (int64_t i = 0; i < ahead.lines; ++i) prefetch_l1(ahead.at + 64 * i);
    } else {
        for (int64_t i = 0; i < ahead.lines; ++i) prefetch_l2(ahead.at + 64 * i);
    }
    ahead.at += 64 * ahead.lines;
}

// Rows with a complete F, except for the pending batch: next .. rows are to be finished.
struct Finishing {
    const float* sums = nullptr;
    int64_t panel = 0, first = 0;  // first: row of the block
    int64_t next = 0, rows = 0, each = 0;  // each: rows at a time
    bool ready = false;                    // no sum of theirs is pending
};

// Work interleaved with the products of a thread.
struct Beside {
    Batch waiting;
    int32_t* held = nullptr;  // destination of the sums in the tiles; null: none
    bool held_two = false;    // all four tiles, or the upper two
    Finishing finishing;
    LinesAhead ahead;
};

// The intrinsics need literal tile numbers.
#define QUIRE_BEGIN_TILE(tile, held)                                                     \
    do {                                                                                 \
        if ((held) != nullptr) {                                                         \
            _tile_stored(tile, (held) + (tile) / 2 * kTileRows * kIntLanes + (tile) % 2 * kLanes, \
                         128);                                                           \
        }                                                                                \
        _tile_zero(tile);                                                                \
    } while (false)

QUIRE_VEC void store_held(Beside& beside) {
    memory_barrier();
    if (beside.held != nullptr) {
        QUIRE_BEGIN_TILE(0, beside.held);
        QUIRE_BEGIN_TILE(1, beside.held);
        if (beside.held_two) {
            QUIRE_BEGIN_TILE(2, beside.held);
            QUIRE_BEGIN_TILE(3, beside.held);
        }
    }
    beside.held = nullptr;
    memory_barrier();
}

template <class Finish>
QUIRE_VEC void finish_some(Finishing& finishing, int64_t most, const Finish& finish) {
    const int64_t left = finishing.rows - finishing.next;
    const int64_t count = left < most ? left : most;
    if (count <= 0) return;
    finish(finishing.panel, finishing.sums + finishing.next * kIntLanes,
           finishing.first + finishing.next, count);
    finishing.next += count;
}

// Sums of a batch: x at its first step (steps of `rows` x 64 bytes), weights at its first quad. The
// last of them stay in the tiles.
template <IntForm form, bool two, class Finish>
QUIRE_VEC void multiply_batch(const int8_t* x, int64_t rows, const char* weights, int64_t halves,
                              int64_t num_sums, int32_t* sums, Beside& beside,
                              const Finish& finish) {
    using Shape = FormShape<form>;
    constexpr int kHalvesAtOnce = form == IntForm::group32 ? 1 : 2;
    constexpr int kStride = Shape::kIsInt8 ? 128 : 64;
    constexpr int64_t kSecond = Shape::kIsInt8 ? 64 : kTileBytes;  // lanes 16 to 31
    const Batch& waiting = beside.waiting;
    // The held sums are stored in the first part, and so scaled from the second on.
    const int64_t parts = (halves + kHalvesAtOnce - 1) / kHalvesAtOnce;
    const int64_t folding = parts > 1 ? parts - 1 : 1;
    const int64_t each = waiting.sums == nullptr ? 0 : (waiting.rows + folding - 1) / folding;
    int64_t folded = 0, half = 0;
    for (int64_t g = 0; g < num_sums; ++g) {
        const int64_t begin = half;
        const int64_t end = half + Shape::kHalves < halves ? half + Shape::kHalves : halves;
        for (; half < end; half += kHalvesAtOnce) {
            // A step is 16 quads of all lanes, or, in scratch, two tiles of 16 quads.
            const char* w = weights + half / 2 * 2 * kTileBytes + half % 2 * 512;
            const int8_t* upper = x + half / 2 * rows * kIntStep + half % 2 * 32;
            const int8_t* lower = upper + kTileRows * kIntStep;
            int32_t* held = beside.held;
            fetch_lines(beside.ahead);
            memory_barrier();
            _tile_loadd(6, w, kStride);
            _tile_stream_loadd(4, upper, 64);
            if (half == begin) QUIRE_BEGIN_TILE(0, held);
            if constexpr (Shape::kIsInt8) _tile_dpbsud(0, 4, 6); else _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, w + kSecond, kStride);
            if (half == begin) QUIRE_BEGIN_TILE(1, held);
            if constexpr (Shape::kIsInt8) _tile_dpbsud(1, 4, 7); else _tile_dpbssd(1, 4, 7);
            if constexpr (two) {
                _tile_stream_loadd(5, lower, 64);
                if (half == begin) QUIRE_BEGIN_TILE(2, held);
                if constexpr (Shape::kIsInt8) _tile_dpbsud(2, 5, 6); else _tile_dpbssd(2, 5, 6);
                if (half == begin) QUIRE_BEGIN_TILE(3, held);
                if constexpr (Shape::kIsInt8) _tile_dpbsud(3, 5, 7); else _tile_dpbssd(3, 5, 7);
            }
            memory_barrier();
            beside.held = sums + g * kSumInts;
            beside.held_two = two;
            if (half > 0 || parts == 1) {
                const int64_t until =
                    folded + each < waiting.rows ? folded + each : waiting.rows;
                if (each > 0) fold_rows<form>(waiting, folded, until);
                folded = until;
            }
            if (beside.finishing.ready) {
                finish_some(beside.finishing, beside.finishing.each, finish);
            }
        }
    }
    beside.finishing.ready = true;
}

// A panel of int4 weights as signed bytes, [steps][2 halves of the lanes][16 quads][64], and its
// groups' scales in f32, [groups][32].
struct Expanded {
    char* bytes;
    float* scales;
};

QUIRE_VEC void expand_step(const char* weights, const __m512i (&zeros)[2], int64_t first_oct,
                           int64_t end_oct, char* to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t oct = first_oct; oct < end_oct; ++oct) {
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            const __m512i w = _mm512_loadu_si512(weights + oct * kQuadBytes + j * 64);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
            char* at = to + j * kTileBytes + oct * 2 * 64;
            _mm512_store_si512(at, _mm512_sub_epi8(_mm512_and_si512(w, low), zeros[j]));
            _mm512_store_si512(at + 64, _mm512_sub_epi8(high, zeros[j]));
        }
    }
}

// All of a panel.
QUIRE_VEC void expand(const char* panel, const IntScheme& scheme, int64_t all_steps,
                      const Expanded& to) {
    float* scales = to.scales;
    for (int64_t step = 0; step < all_steps; step += 2) {
        const int64_t here = all_steps - step < 2 ? 1 : 2;
        const char* block = panel + block_start(scheme, step / 2);
        const int64_t groups = block_groups(scheme, here);
        const char* weights = block + block_head_bytes(scheme, here);
        for (int64_t g = 0; g < groups; ++g) {
            __m512i zeros[2] = {_mm512_set1_epi8(8), _mm512_set1_epi8(8)};
            if (scheme.has_zero_points) {
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const __m512i words = _mm512_cvtepu8_epi32(_mm_loadu_si128(
                        reinterpret_cast<const __m128i*>(block + groups * kScaleBytes +
                                                         g * kIntLanes + j * kLanes)));
                    zeros[j] = _mm512_mullo_epi32(words, _mm512_set1_epi32(0x01010101));
                }
            }
            const auto* of_group = reinterpret_cast<const bf16*>(block + g * kScaleBytes);
            store(scales, load(of_group));
            store(scales + kLanes, load(of_group + kLanes));
            scales += kIntLanes;
            const int64_t octs = here * kIntStep / 8, of_one = scheme.group / 8;
            const int64_t end = (g + 1) * of_one < octs ? (g + 1) * of_one : octs;
            for (int64_t oct = g * of_one; oct < end; oct += 8 - oct % 8) {
                const int64_t stop = oct / 8 * 8 + 8 < end ? oct / 8 * 8 + 8 : end;
                const int64_t s = step + oct / 8;
                expand_step(weights + oct / 8 * 8 * kQuadBytes, zeros, oct % 8,
                            stop - oct / 8 * 8, to.bytes + s * 2 * kTileBytes);
            }
        }
    }
}

// A thread's memory while it multiplies.
struct AmxScratch {
    int32_t* sums[2];  // of this batch and the previous one
    float* out[2];     // F [rows of a group][32], and of the previous group
    char* bytes;       // of a panel of int4
    float* scales[2];  // of a panel of int4 and the previous one

    static constexpr int64_t kFixedBytes = 2 * kMostSums * kSumInts * 4 + 2 * kGroupFloats * 4;

    QUIRE_VEC int64_t size(int64_t steps) {
        return kFixedBytes + steps * 2 * kTileBytes + 2 * steps * 2 * kIntLanes * 4;
    }
    QUIRE_VEC AmxScratch at(char* base, int64_t steps) {
        AmxScratch made;
        auto* numbers = reinterpret_cast<int32_t*>(base);
        for (int i = 0; i < 2; ++i) made.sums[i] = numbers + i * kMostSums * kSumInts;
        auto* floats = reinterpret_cast<float*>(numbers + 2 * kMostSums * kSumInts);
        for (int i = 0; i < 2; ++i) made.out[i] = floats + i * kGroupFloats;
        made.bytes = base + kFixedBytes;
        floats = reinterpret_cast<float*>(made.bytes + steps * 2 * kTileBytes);
        for (int i = 0; i < 2; ++i) made.scales[i] = floats + i * steps * 2 * kIntLanes;
        return made;
    }
};

// Rows of a block in packs of 32, and the panels they are multiplied by.
struct AmxBlock {
    char* rows_base;
    int64_t rows;
    const RowShape& shape;
    const PackedInts& weight;
    int64_t first_panel, end_panel;
};

// Values that stay constant while a block is multiplied by a panel.
struct PanelWeights {
    const char* bytes;    // of its first step, in tile layout
    const float* scales;  // of int4
};

// Multiplies a pack by a stretch of K: batches, each passed to `beside` to be scaled.
template <IntForm form, bool two, class Finish>
QUIRE_VEC void multiply_stretch(const RowPack& pack, const RowShape& shape, int64_t first,
                                int64_t steps, const PanelWeights& panel, float* out,
                                const AmxScratch& scratch, int& turn, Beside& beside,
                                const Finish& finish) {
    using Shape = FormShape<form>;
    for (int64_t step = first; step < first + steps; step += Shape::kBatchSteps) {
        const int64_t rest = first + steps - step;
        const int64_t here = rest < Shape::kBatchSteps ? rest : Shape::kBatchSteps;
        const int64_t num_sums = (2 * here + Shape::kHalves - 1) / Shape::kHalves;
        const int64_t sum_index = step * 2 / Shape::kHalves;
        int32_t* sums = scratch.sums[turn];
        multiply_batch<form, two>(pack.step(step), pack.count, panel.bytes + step * 2 * kTileBytes,
                                  2 * here, num_sums, sums, beside, finish);
        beside.waiting = {
            sums,
            pack.scales(shape) + step / 2 * pack.count,
            pack.starts(shape) + sum_index * pack.count,
            panel.scales + sum_index * kIntLanes,
            pack.count,
            num_sums,
            out,
            step == 0,
        };
        turn = 1 - turn;
    }
}

// finish(panel, F, first row of the block, rows) is called for all rows of all panels; `in_steps`:
// scales of all panels are multiples of steps.
template <IntForm form, bool in_steps, class Finish>
__attribute__((noinline)) void amx_int_panels(const AmxBlock& block, const AmxScratch& scratch,
                                              const Finish& finish) {
    using Shape = FormShape<form>;
    constexpr bool kHalfSteps = form == IntForm::group32;
    const RowShape& shape = block.shape;
    const int64_t panel_bytes = int_panel_bytes(shape.k, block.weight.scheme);
    const int64_t packs = (block.rows + kPackRows - 1) / kPackRows;
    const int64_t products = packs * shape.steps * (kHalfSteps ? 2 : 1);  // of a panel
    Beside beside;
    // One pack prefetches its stream close to its use; several packs prefetch the next panel, and
    // so does int4, with panels expanded as a whole.
    beside.ahead.near = Shape::kIsInt8 && packs == 1;
    beside.ahead.lines = (panel_bytes / 64 + products - 1) / products;
    int turn = 0, group_turn = 0;
    int64_t configured = 0;
    for (int64_t index = block.first_panel; index < block.end_panel; ++index) {
        const char* data = static_cast<const char*>(block.weight.data) + index * panel_bytes;
        beside.ahead.at = data + (beside.ahead.near ? kTileAheadBytes : panel_bytes);
        PanelWeights panel{data, nullptr};
        if constexpr (!Shape::kIsInt8) {
            float* scales = scratch.scales[index % 2];
            if constexpr (in_steps) {
                expand_steps(data, block.weight.scheme, shape.steps, scratch.bytes, scales);
            } else {
                expand(data, block.weight.scheme, shape.steps, {scratch.bytes, scales});
            }
            panel = {scratch.bytes, scales};
        }
        for (int64_t group = 0; group < block.rows; group += kGroupRows) {
            const int64_t rest = block.rows - group;
            const int64_t group_rows = rest < kGroupRows ? rest : kGroupRows;
            float* out = scratch.out[group_turn];
            for (int64_t first = 0; first < shape.steps; first += kStretchSteps) {
                const int64_t left = shape.steps - first;
                const int64_t steps = left < kStretchSteps ? left : kStretchSteps;
                for (int64_t row = 0; row < group_rows; row += kPackRows) {
                    const int64_t rows = group_rows - row;
                    const int64_t count = rows < kPackRows ? rows : kPackRows;
                    const RowPack pack{block.rows_base + (group + row) * shape.row_bytes(), count};
                    if (count != configured) {
                        store_held(beside);
                        configure_int_tiles(count, kHalfSteps);
                        configured = count;
                    }
                    float* to = out + row * kIntLanes;
                    if (count > kTileRows) {
                        multiply_stretch<form, true>(pack, shape, first, steps, panel, to, scratch,
                                                     turn, beside, finish);
                    } else {
                        multiply_stretch<form, false>(pack, shape, first, steps, panel, to,
                                                      scratch, turn, beside, finish);
                    }
                }
            }
            finish_some(beside.finishing, kGroupRows, finish);  // the remaining rows before these
            const int64_t times = shape.steps * (group_rows > kPackRows ? 2 : 1);
            beside.finishing = {out,   index, group, 0, group_rows, (group_rows + times - 1) / times,
                                false};
            group_turn = 1 - group_turn;
        }
    }
    store_held(beside);
    fold_rows<form>(beside.waiting, 0, beside.waiting.rows);
    finish_some(beside.finishing, kGroupRows, finish);
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
