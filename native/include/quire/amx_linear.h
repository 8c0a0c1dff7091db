// Products over the bf16 panels by the matrix unit (recipe: amx_tiles.h); linear.cc deals them.
//
// Up to kFewRows rows are multiplied by vector instructions that do what the unit does, step by
// step: then the product is bound by memory, which plain loads read faster than tiles do.
//
// More rows go in pairs of tiles. What counts is the first-level cache: the sums of a group of rows
// stay in it from the first of K to the last, a stretch of the weights is used by all of the
// group, and x streams through. While the unit computes, the group before is finished: bias, one
// rounding, and the way into y.
// Only for files compiled once per instruction set, of which one has AMX.
#pragma once

#include "quire/amx_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kFewRows = 2;
constexpr int64_t kPairRows = 2 * kTileRows;
constexpr int64_t kGroupRows = 128;
constexpr int64_t kStretchSteps = 8;
constexpr int64_t kPanelStepBytes = kTileRows * 128;  // of weights: 16 pairs of 32 columns
constexpr unsigned kNoDenormals = 0x8040;             // as the matrix unit: zeros, in and out

QUIRE_VEC int64_t steps_of(int64_t k) { return (k + kTileStep - 1) / kTileStep; }

// Sums of a group of rows and a panel on their way into y, some rows at a time.
struct Finishing {
    const LinearArgs& args;
    const float* sums = nullptr;
    int64_t first_row = 0, panel = 0;  // of y
    int64_t next = 0, rows = 0;

    __attribute__((always_inline)) void some(int64_t most) {
        for (; most > 0 && next < rows; --most, ++next) one();
    }
    // Begins with other rows; those before must be done.
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

// Lines fetched beside the products: so many each step.
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
    int64_t each = 0;  // rows finished a step
};

// sums [rows][32] of 16 upper and (where two) 16 lower rows, over `steps` steps of K: from zero,
// or from what is in `sums`. w: pairs of K by 32 columns, as packed.
template <bool two, bool resume>
__attribute__((noinline)) void multiply_pair(const bf16* upper, const bf16* lower, const char* w,
                                             int64_t steps, float* sums, Beside& beside) {
    constexpr int kStride = 128;  // bytes of a pair's 32 columns, and of a row of sums
    float* lower_sums = sums + kTileRows * kPanel;
    memory_barrier();
    if constexpr (resume) {
        _tile_loadd(0, sums, kStride);
        _tile_loadd(1, sums + 16, kStride);
        if constexpr (two) {
            _tile_loadd(2, lower_sums, kStride);
            _tile_loadd(3, lower_sums + 16, kStride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (two) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    LinesAhead ahead = beside.ahead;
    for (int64_t s = 0; s < steps; ++s) {
        if (ahead.near) {
#pragma GCC unroll 32
            for (int line = 0; line < 32; ++line) prefetch_l1(ahead.at + 64 * line);
            ahead.at += 2048;
        } else {
            for (int64_t i = 0; i < ahead.lines; ++i) prefetch_l2(ahead.at + 64 * i);
            ahead.at += 64 * ahead.lines;
        }
        _tile_loadd(6, w, kStride);
        _tile_loadd(4, upper, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, kStride);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (two) {
            _tile_loadd(5, lower, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            lower += kTileElements;
        }
        upper += kTileElements;
        w += kPanelStepBytes;
        beside.finishing.some(beside.each);
        beside.rows_ahead.one();
    }
    beside.ahead.at = ahead.at;
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + 16, kStride);
    if constexpr (two) {
        _tile_stored(2, lower_sums, kStride);
        _tile_stored(3, lower_sums + 16, kStride);
    }
    memory_barrier();
}

// What the matrix unit does to kRows rows and some steps of K, by vectors. x: [rows][steps][32] in
// f32, a step's even and odd columns beside each other.
template <int kRows>
QUIRE_VEC void few_steps(const float* x, int64_t stride, const char* w, int64_t steps,
                         Vec (&sums)[kRows][2]) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int64_t s = 0; s < steps; ++s) {
        Vec even[kRows][2], odd[kRows][2];
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) even[i][0] = even[i][1] = odd[i][0] = odd[i][1] = zero();
#pragma GCC unroll 16
        for (int pair = 0; pair < kTileRows; ++pair) {
            Vec w_even[2], w_odd[2];
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                const char* line = w + pair * 128 + j * 64;
                prefetch_l1(line + kStreamAheadBytes);
                memory_barrier();  // or GCC fetches all lines of a step in one burst, and they wait
                const __m512i both = _mm512_loadu_si512(line);
                w_even[j] = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
                w_odd[j] = {_mm512_castsi512_ps(_mm512_and_si512(both, high))};
            }
#pragma GCC unroll 4
            for (int i = 0; i < kRows; ++i) {
                const Vec x_even = set1(x[i * stride + 2 * pair]);
                const Vec x_odd = set1(x[i * stride + 2 * pair + 1]);
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    even[i][j] = fma(x_even, w_even[j], even[i][j]);
                    odd[i][j] = fma(x_odd, w_odd[j], odd[i][j]);
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                sums[i][j] = add(sums[i][j], add(even[i][j], odd[i][j]));
            }
        }
        x += kTileStep;
        w += kPanelStepBytes;
    }
}

// Rows of a block as packed, and the panels they are multiplied by.
struct AmxBlock {
    const LinearArgs& args;
    const bf16* packed;  // [ceil(rows / 16)][steps][16][32]
    int64_t first_row, rows;
    int64_t first_panel, end_panel;
};

struct AmxScratch {
    float* sums[2];  // of a group, and of the group before
    char* tail;      // the last step's weights, filled up with zeros

    static constexpr int64_t kBytes = 2 * kGroupRows * kPanel * 4 + kPanelStepBytes;

    QUIRE_VEC AmxScratch at(char* base) {
        auto* floats = reinterpret_cast<float*>(base);
        return {{floats, floats + kGroupRows * kPanel},
                base + 2 * kGroupRows * kPanel * 4};
    }
};

// Behind a panel lies the next, and 0 times an infinity is not 0.
QUIRE_VEC void copy_tail(const char* panel, int64_t pairs, int64_t whole, char* tail) {
    const int64_t bytes = (pairs - whole * kTileRows) * 128;
    for (int64_t i = 0; i < kPanelStepBytes; i += 64) {
        const char* from = panel + whole * kPanelStepBytes + i;
        _mm512_store_si512(tail + i, i < bytes ? _mm512_loadu_si512(from) : _mm512_setzero_si512());
    }
}

// A group of rows by some steps of K.
QUIRE_VEC void multiply_stretch(const bf16* group, int64_t rows, int64_t all_steps, int64_t first,
                                int64_t steps, const char* weights, float* sums,
                                int64_t& configured, Beside& beside) {
    for (int64_t row = 0; row < rows; row += kPairRows) {
        const int64_t count = rows - row < kPairRows ? rows - row : kPairRows;
        const bool two = count > kTileRows;
        if (count != configured) {
            configure_tiles(two ? kTileRows : count, count - kTileRows);
            configured = count;
        }
        const bf16* upper = group + row * all_steps * kTileStep + first * kTileElements;
        const auto multiply = two ? (first > 0 ? multiply_pair<true, true>
                                               : multiply_pair<true, false>)
                                  : (first > 0 ? multiply_pair<false, true>
                                               : multiply_pair<false, false>);
        multiply(upper, upper + all_steps * kTileElements, weights, steps, sums + row * kPanel,
                 beside);
    }
}

// All rows, kRows of them, by panels first .. end. x: as few_steps takes it.
template <int kRows>
__attribute__((noinline)) void few_panels(const LinearArgs& args, const float* x, int64_t first,
                                          int64_t end) {
    alignas(64) char tail[kPanelStepBytes];
    alignas(64) float out[kRows * kPanel];
    const int64_t k = args.weight.k, steps = steps_of(k), pairs = (k + 1) / 2;
    const int64_t whole = pairs / kTileRows, bytes = panel_bytes(k, Type::bf16);
    const int64_t stride = steps * kTileStep;
    Finishing finishing{args};
    for (int64_t panel = first; panel < end; ++panel) {
        const char* weights = static_cast<const char*>(args.weight.data) + panel * bytes;
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | kNoDenormals);
        memory_barrier();  // arithmetic stays between the two
        Vec sums[kRows][2];
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = zero();
        few_steps<kRows>(x, stride, weights, whole, sums);
        if (whole < steps) {
            copy_tail(weights, pairs, whole, tail);
            few_steps<kRows>(x + whole * kTileStep, stride, tail, 1, sums);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
            store(out + i * kPanel, sums[i][0]);
            store(out + i * kPanel + kLanes, sums[i][1]);
        }
        memory_barrier();
        _mm_setcsr(mode);
        finishing.begin(out, 0, panel, kRows);
        finishing.some(kRows);
    }
}

__attribute__((noinline)) void amx_panels(const AmxBlock& block, const AmxScratch& scratch) {
    const LinearArgs& args = block.args;
    const int64_t k = args.weight.k, steps = steps_of(k), pairs = (k + 1) / 2;
    const int64_t whole = pairs / kTileRows;  // steps whose weights are all there
    const int64_t bytes = panel_bytes(k, Type::bf16);
    const int64_t packs = (block.rows + kPairRows - 1) / kPairRows;
    const int64_t stretch = packs == 1 ? steps : kStretchSteps;
    Beside beside{{args}, {}, {}};
    beside.ahead.near = packs == 1;
    beside.ahead.lines = (bytes / 64 + packs * steps - 1) / (packs * steps);
    int64_t configured = 0;
    int turn = 0;
    for (int64_t panel = block.first_panel; panel < block.end_panel; ++panel) {
        const char* weights = static_cast<const char*>(args.weight.data) + panel * bytes;
        beside.ahead.at = weights + (packs == 1 ? kTileAheadBytes : bytes);
        if (whole < steps) copy_tail(weights, pairs, whole, scratch.tail);
        for (int64_t group = 0; group < block.rows; group += kGroupRows) {
            const int64_t left = block.rows - group;
            const int64_t rows = left < kGroupRows ? left : kGroupRows;
            const bf16* x = block.packed + group * steps * kTileStep;
            float* sums = scratch.sums[turn];
            const int64_t first_row = block.first_row + group;
            const int64_t products = steps * ((rows + kPairRows - 1) / kPairRows);
            beside.each = (beside.finishing.rows + products - 1) / products;
            beside.rows_ahead = {static_cast<const char*>(args.y.at(first_row)) +
                                     panel * kPanel * type_bytes(args.y.type),
                                 args.y.stride * type_bytes(args.y.type), rows,
                                 args.y.type == Type::f32};
            for (int64_t first = 0; first < whole; first += stretch) {
                const int64_t some = whole - first < stretch ? whole - first : stretch;
                multiply_stretch(x, rows, steps, first, some, weights + first * kPanelStepBytes,
                                 sums, configured, beside);
            }
            if (whole < steps) {
                multiply_stretch(x, rows, steps, whole, 1, scratch.tail, sums, configured, beside);
            }
            beside.finishing.some(kGroupRows);
            beside.finishing.begin(sums, first_row, panel, rows);
            turn = 1 - turn;
        }
    }
    beside.finishing.some(kGroupRows);
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
