// Products over the bf16 panels by the matrix unit (recipe: amx_tiles.h); linear.cc distributes
// them. Few rows: amx_few_rows.h.
//
// Rows are processed in pairs of tiles. The L1 cache is the bottleneck: the sums of a group of rows
// stay in it over all of K, a stretch of the weights is used by the whole group, and x streams
// through with non-temporal hints. While the unit computes, the previous pair is finished once its
// sums are complete: bias, one rounding, and the store to y. Only for files compiled once per
// instruction set, with AMX.
#pragma once

#include "quire/amx_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kPairRows = 2 * kTileRows;
constexpr int64_t kGroupRows = 128;
constexpr int64_t kStretchSteps = 8;
// of weights ahead of many rows: more would leave the cache
constexpr int64_t kFetchedBytes = 1 << 16;
constexpr int64_t kPanelStepBytes = kTileRows * 128;  // of weights: 16 pairs of 32 columns

QUIRE_VEC int64_t steps_of(int64_t k) { return (k + kTileStep - 1) / kTileStep; }

// The first step of a stretch, and the others.
struct Begins {
    static constexpr bool value = true;
};
struct GoesOn {
    static constexpr bool value = false;
};

// Sums of a group of rows and a panel to be written to y, some rows at a time.
struct Finishing {
    const LinearArgs& args;
    const float* sums = nullptr;
    int64_t first_row = 0, panel = 0;  // of y
    int64_t next = 0, rows = 0;

    __attribute__((always_inline)) void some(int64_t most) {
        for (; most > 0 && next < rows; --most, ++next) one();
    }
    __attribute__((always_inline)) int64_t left() const { return rows - next; }
    // Starts with other rows; the previous ones must be done.
    __attribute__((always_inline)) void begin(const float* from, int64_t row, int64_t of_panel,
                                              int64_t count) {
        sums = from;
        first_row = row;
        panel = of_panel;
        next = 0;
        rows = count;
    }

  private:
    __attribute__((always_inline)) void one() {
        const int64_t first = panel * kPanel, left = args.weight.n - first;
        Vec low = load(sums + next * kPanel), high = load(sums + next * kPanel + kLanes);
        if (left < kPanel) return part(low, high, first, static_cast<int>(left));
        if (args.bias != nullptr) {
            low = add(low, load(args.bias + first));
            high = add(high, load(args.bias + first + kLanes));
        }
        if (args.y.type == Type::f32) {
            float* y = static_cast<float*>(args.y.at(first_row + next)) + first;
            store(y, low);
            store(y + kLanes, high);
        } else {
            bf16* y = static_cast<bf16*>(args.y.at(first_row + next)) + first;
            _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
        }
    }
    __attribute__((noinline)) void part(Vec low, Vec high, int64_t first, int left) {
        const int few = left < kLanes ? left : kLanes, rest = left - few;
        if (args.bias != nullptr) {
            low = add(low, load_n(args.bias + first, few));
            high = add(high, load_n(args.bias + first + kLanes, rest));
        }
        if (args.y.type == Type::f32) {
            float* y = static_cast<float*>(args.y.at(first_row + next)) + first;
            store_n(y, low, few);
            store_n(y + kLanes, high, rest);
        } else {
            const __mmask32 some = (__mmask32{1} << left) - 1;
            bf16* y = static_cast<bf16*>(args.y.at(first_row + next)) + first;
            _mm512_mask_storeu_epi16(y, some, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
        }
    }
};

// Lines prefetched during the products, so many each step.
struct LinesAhead {
    const char* at = nullptr;
    int64_t lines = 0;
    bool near = false;
};

// Lines of y that will be written, one each step.
struct RowsAhead {
    const char* y = nullptr;
    int64_t stride_bytes = 0, left = 0;
    bool two = false;  // lines a row

    __attribute__((always_inline)) void one() {
        if (left <= 0) return;
        __builtin_prefetch(y, 1, 3);
        if (two) __builtin_prefetch(y + 64, 1, 3);
        y += stride_bytes;
        --left;
    }
};

struct Beside {
    Finishing finishing;
    LinesAhead ahead;
    RowsAhead rows_ahead;
    int64_t each = 0;        // rows finished a step
    float* held = nullptr;   // destination of the sums in the tiles; null: none
    bool held_two = false;   // all four tiles, or the upper two
};

// The intrinsics need literal tile numbers.
#define QUIRE_SUMS_OF(tile, sums) ((sums) + (tile) / 2 * kTileRows * kPanel + (tile) % 2 * 16)
#define QUIRE_SWAP_TILE(tile, held, sums)                                         \
    do {                                                                          \
        if ((held) != nullptr) _tile_stored(tile, QUIRE_SUMS_OF(tile, held), 128); \
        if constexpr (resume) {                                                   \
            _tile_loadd(tile, QUIRE_SUMS_OF(tile, sums), 128);                    \
        } else {                                                                  \
            _tile_zero(tile);                                                     \
        }                                                                         \
    } while (false)

QUIRE_VEC void store_held(Beside& beside) {
    float* held = beside.held;
    if (held == nullptr) return;
    memory_barrier();
    _tile_stored(0, QUIRE_SUMS_OF(0, held), 128);
    _tile_stored(1, QUIRE_SUMS_OF(1, held), 128);
    if (beside.held_two) {
        _tile_stored(2, QUIRE_SUMS_OF(2, held), 128);
        _tile_stored(3, QUIRE_SUMS_OF(3, held), 128);
    }
    memory_barrier();
    beside.held = nullptr;
}

// sums [rows][32] of 16 upper and (with `two`) 16 lower rows, over `steps` steps of K: from zero,
// or from the values in `sums`. w: pairs of K by 32 columns, as packed. The sums stay in the tiles;
// the previous ones are stored one by one, each before its tile is restarted: four consecutive
// stores stall the unit three times as long. x comes from L2 by loads that leave L1 to the weights
// and the sums.
template <bool two, bool resume>
__attribute__((noinline)) void multiply_pair(const bf16* upper, const bf16* lower, const char* w,
                                             int64_t steps, float* sums, Beside& beside) {
    constexpr int kStride = 128;  // bytes of a pair's 32 columns, and of a row of sums
    LinesAhead ahead = beside.ahead;
    const auto step = [&](auto first) __attribute__((always_inline)) {
        constexpr bool begins = decltype(first)::value;
        float* held = beside.held;
        if (ahead.near) {
#pragma GCC unroll 32
            for (int line = 0; line < 32; ++line) prefetch_l1(ahead.at + 64 * line);
            ahead.at += 2048;
        } else {
            for (int64_t i = 0; i < ahead.lines; ++i) prefetch_l2(ahead.at + 64 * i);
            ahead.at += 64 * ahead.lines;
        }
        memory_barrier();
        _tile_loadd(6, w, kStride);
        _tile_stream_loadd(4, upper, 64);
        if constexpr (begins) QUIRE_SWAP_TILE(0, held, sums);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, kStride);
        if constexpr (begins) QUIRE_SWAP_TILE(1, held, sums);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (two) {
            _tile_stream_loadd(5, lower, 64);
            if constexpr (begins) QUIRE_SWAP_TILE(2, held, sums);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (begins) QUIRE_SWAP_TILE(3, held, sums);
            _tile_dpbf16ps(3, 5, 7);
            lower += kTileElements;
        }
        memory_barrier();
        upper += kTileElements;
        w += kPanelStepBytes;
        beside.finishing.some(beside.each);
        beside.rows_ahead.one();
    };
    step(Begins{});
    for (int64_t s = 1; s < steps; ++s) step(GoesOn{});
    beside.ahead.at = ahead.at;
    beside.held = sums;
    beside.held_two = two;
}

// Rows of a block as packed, and the panels they are multiplied by.
struct AmxBlock {
    const LinearArgs& args;
    const bf16* packed;  // [ceil(rows / 16)][steps][16][32]
    int64_t first_row, rows;
    int64_t first_panel, end_panel;
};

struct AmxScratch {
    float* sums;  // of a group
    char* tail;   // the last step's weights, zero-padded

    static constexpr int64_t kBytes = kGroupRows * kPanel * 4 + kPanelStepBytes;

    QUIRE_VEC AmxScratch at(char* base) {
        return {reinterpret_cast<float*>(base), base + kGroupRows * kPanel * 4};
    }
};

// The next panel follows the end of this one, and 0 times an infinity is not 0.
QUIRE_VEC void copy_tail(const char* panel, int64_t pairs, int64_t whole, char* tail) {
    const int64_t bytes = (pairs - whole * kTileRows) * 128;
    for (int64_t i = 0; i < kPanelStepBytes; i += 64) {
        const char* from = panel + whole * kPanelStepBytes + i;
        _mm512_store_si512(tail + i, i < bytes ? _mm512_loadu_si512(from) : _mm512_setzero_si512());
    }
}

// A group of rows and a panel.
struct AmxGroup {
    const bf16* x;            // packed
    int64_t first_row, rows;  // of y
    int64_t panel;
    float* sums;              // [rows][32]
};

// Multiplies a group by some steps of K; `last`: its sums are complete afterwards.
QUIRE_VEC void multiply_stretch(const AmxGroup& group, int64_t all_steps, int64_t first,
                                int64_t steps, const char* weights, bool last,
                                int64_t& configured, Beside& beside) {
    for (int64_t row = 0; row < group.rows; row += kPairRows) {
        const int64_t left = group.rows - row;
        const int64_t count = left < kPairRows ? left : kPairRows;
        const bool two = count > kTileRows;
        if (count != configured) {
            store_held(beside);
            configure_tiles(two ? kTileRows : count, count - kTileRows);
            configured = count;
        }
        const bf16* upper = group.x + row * all_steps * kTileStep + first * kTileElements;
        const auto multiply = two ? (first > 0 ? multiply_pair<true, true>
                                               : multiply_pair<true, false>)
                                  : (first > 0 ? multiply_pair<false, true>
                                               : multiply_pair<false, false>);
        float* sums = group.sums + row * kPanel;
        beside.each = (beside.finishing.left() + steps - 1) / steps;
        multiply(upper, upper + all_steps * kTileElements, weights, steps, sums, beside);
        if (last) beside.finishing.begin(sums, group.first_row + row, group.panel, count);
    }
}

__attribute__((noinline)) void amx_panels(const AmxBlock& block, const AmxScratch& scratch) {
    const LinearArgs& args = block.args;
    const int64_t k = args.weight.k, steps = steps_of(k), pairs = (k + 1) / 2;
    const int64_t whole = pairs / kTileRows;  // steps with all weights present
    const int64_t bytes = panel_bytes(k, Type::bf16);
    const int64_t packs = (block.rows + kPairRows - 1) / kPairRows;
    const int64_t stretch = packs == 1 ? steps : kStretchSteps;
    Beside beside{{args}, {}, {}};
    beside.ahead.near = packs == 1;
    const int64_t far = bytes < kFetchedBytes ? bytes : kFetchedBytes;
    const int64_t ahead = packs == 1 ? kTileAheadBytes : far;
    beside.ahead.lines = (bytes / 64 + packs * steps - 1) / (packs * steps);
    int64_t configured = 0;
    for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel) {
        const char* weights = static_cast<const char*>(args.weight.data) + panel * bytes;
        beside.ahead.at = weights + ahead;
        if (whole < steps) copy_tail(weights, pairs, whole, scratch.tail);
        for (int64_t row = 0; row < block.rows; row += kGroupRows) {
            const int64_t left = block.rows - row;
            const AmxGroup group{block.packed + row * steps * kTileStep, block.first_row + row,
                                 left < kGroupRows ? left : kGroupRows, panel, scratch.sums};
            beside.rows_ahead = {static_cast<const char*>(args.y.at(group.first_row)) +
                                     panel * kPanel * type_bytes(args.y.type),
                                 args.y.stride * type_bytes(args.y.type), group.rows,
                                 args.y.type == Type::f32};
            for (int64_t first = 0; first < whole; first += stretch) {
                const int64_t some = whole - first < stretch ? whole - first : stretch;
                multiply_stretch(group, steps, first, some, weights + first * kPanelStepBytes,
                                 first + some == steps, configured, beside);
            }
            if (whole < steps) {
                multiply_stretch(group, steps, whole, 1, scratch.tail, true, configured, beside);
            }
        }
    }
    store_held(beside);
    beside.finishing.some(kGroupRows);
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
