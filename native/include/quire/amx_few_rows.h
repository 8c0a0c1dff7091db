// Products of few rows over the bf16 panels (recipe: amx_tiles.h; more rows: amx_linear.h). They
// are bound by reading the weights, so everything serves to keep that read going.
//
// One or two rows are multiplied by vector instructions that compute what the matrix unit does,
// step by step. Up to kStreamedRows are one or two tiles, and sums stay in them over all of K while
// the weights stream through. y is written by non-temporal stores if the weights exceed the caches:
// its lines would be evicted before they are read, and plain stores read a line first. Only for
// files compiled once per instruction set, with AMX.
#pragma once

#include "quire/amx_linear.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kVectorRows = 2;
constexpr int64_t kStreamedRows = 2 * kTileRows;
// of weights, from which non-temporal stores are used
constexpr int64_t kWritesPastBytes = 1 << 20;
// flush denormals to zero, in and out, like the matrix unit
constexpr unsigned kNoDenormals = 0x8040;

// Writes the rows of a panel's sums to y.
class RowsOut {
  public:
    QUIRE_VEC RowsOut of(const LinearArgs& args) {
        const int64_t row_bytes = args.y.stride * type_bytes(args.y.type);
        const bool aligned =
            row_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(args.y.data) % 64 == 0;
        return {args, aligned && args.weight.k * args.weight.n * 2 >= kWritesPastBytes};
    }

    __attribute__((always_inline)) void write(const float* sums, int64_t rows,
                                              int64_t panel) const {
        if (past_ && (panel + 1) * kPanel <= args_.weight.n) return write_past(sums, rows, panel);
        Finishing finishing{args_};
        finishing.begin(sums, 0, panel, rows);
        finishing.some(rows);
    }

    // Orders non-temporal stores before what follows.
    __attribute__((always_inline)) void close() const {
        if (past_) _mm_sfence();
    }

  private:
    __attribute__((always_inline)) RowsOut(const LinearArgs& args, bool past)
        : args_(args), past_(past) {}

    __attribute__((always_inline)) void write_past(const float* sums, int64_t rows,
                                                   int64_t panel) const {
        const int64_t first = panel * kPanel;
        for (int64_t i = 0; i < rows; ++i) {
            Vec low = load(sums + i * kPanel), high = load(sums + i * kPanel + kLanes);
            if (args_.bias != nullptr) {
                low = add(low, load(args_.bias + first));
                high = add(high, load(args_.bias + first + kLanes));
            }
            if (args_.y.type == Type::f32) {
                float* y = static_cast<float*>(args_.y.at(i)) + first;
                _mm512_stream_ps(y, low.v);
                _mm512_stream_ps(y + kLanes, high.v);
            } else {
                bf16* y = static_cast<bf16*>(args_.y.at(i)) + first;
                _mm512_stream_si512(reinterpret_cast<__m512i*>(y),
                                    (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
            }
        }
    }

    const LinearArgs& args_;
    bool past_;
};

// Computes what the matrix unit does to kRows rows and some steps of K, by vectors. x:
// [rows][steps][32] in f32, a step's even and odd columns side by side.
template <int kRows, bool streams>
QUIRE_VEC void vector_steps(const float* x, int64_t stride, const char* w, int64_t steps,
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
                if constexpr (streams) {
                    prefetch_l1(line + kStreamAheadBytes);
                    // or GCC prefetches a step's lines in one burst, which stalls
                    memory_barrier();
                }
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

// Multiplies kRows rows by panels first .. end. x: as vector_steps takes it.
template <int kRows>
__attribute__((noinline)) void vector_panels(const LinearArgs& args, const float* x, int64_t first,
                                             int64_t end) {
    alignas(64) char tail[kPanelStepBytes];
    alignas(64) float out[kRows * kPanel];
    const int64_t k = args.weight.k, steps = steps_of(k), pairs = (k + 1) / 2;
    const int64_t whole = pairs / kTileRows, bytes = panel_bytes(k, Type::bf16);
    const int64_t stride = steps * kTileStep;
    const RowsOut rows_out = RowsOut::of(args);
    for (int64_t panel = first; panel < end; ++panel) {
        const char* weights = static_cast<const char*>(args.weight.data) + panel * bytes;
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | kNoDenormals);
        memory_barrier();  // keeps the arithmetic between the two mode changes
        Vec sums[kRows][2];
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) sums[i][0] = sums[i][1] = zero();
        vector_steps<kRows, true>(x, stride, weights, whole, sums);
        if (whole < steps) {
            copy_tail(weights, pairs, whole, tail);
            vector_steps<kRows, false>(x + whole * kTileStep, stride, tail, 1, sums);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
            store(out + i * kPanel, sums[i][0]);
            store(out + i * kPanel + kLanes, sums[i][1]);
        }
        memory_barrier();
        _mm_setcsr(mode);
        rows_out.write(out, kRows, panel);
    }
    rows_out.close();
}

// Continues the sums in the tiles over `steps` steps of K. x: [two][all steps][16][32], the second
// `lower` elements after the first. A step is touched while the previous one is multiplied, but
// none after last_step.
template <bool two, bool streams>
QUIRE_VEC void tile_steps(const bf16* x, int64_t lower, const char* w, int64_t steps,
                          const char* last_step, Stream& stream) {
    constexpr int kQuarter = 512;  // bytes: 8 lines
    for (int64_t s = 0; s < steps; ++s) {
        const char* next = w + kPanelStepBytes;
        const char* touched = next < last_step ? next : last_step;
        const char* fetched = next + kPanelStepBytes;
        if constexpr (streams) stream.draw<8>(touched, fetched);
        _tile_loadd(6, w, 128);
        if constexpr (streams) stream.draw<8>(touched + kQuarter, fetched + kQuarter);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (two) {
            _tile_loadd(5, x + lower, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (streams) stream.draw<8>(touched + 2 * kQuarter, fetched + 2 * kQuarter);
        _tile_loadd(7, w + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (two) _tile_dpbf16ps(3, 5, 7);
        if constexpr (streams) stream.draw<8>(touched + 3 * kQuarter, fetched + 3 * kQuarter);
        x += kTileElements;
        w = next;
    }
}

// All rows by panels first .. end. x: as pack_rows writes it.
template <bool two>
__attribute__((noinline)) void tile_panels(const LinearArgs& args, const bf16* x, int64_t first,
                                           int64_t end) {
    alignas(64) char tail[kPanelStepBytes];
    alignas(64) float sums[kStreamedRows * kPanel];
    const int64_t k = args.weight.k, steps = steps_of(k), pairs = (k + 1) / 2;
    const int64_t whole = pairs / kTileRows, bytes = panel_bytes(k, Type::bf16);
    const int64_t lower = steps * kTileElements;
    const int64_t panels = (args.weight.n + kPanel - 1) / kPanel;
    const char* data = static_cast<const char*>(args.weight.data);
    const char* last_step = data + panels * bytes - kPanelStepBytes;
    const RowsOut rows_out = RowsOut::of(args);
    Stream stream;
    configure_tiles(two ? kTileRows : args.rows, args.rows - kTileRows);
    for (int64_t panel = first; panel < end; ++panel) {
        const char* weights = data + panel * bytes;
        memory_barrier();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        tile_steps<two, true>(x, lower, weights, whole, last_step, stream);
        if (whole < steps) {
            copy_tail(weights, pairs, whole, tail);
            memory_barrier();
            tile_steps<two, false>(x + whole * kTileElements, lower, tail, 1, tail, stream);
        }
        _tile_stored(0, sums, 128);
        _tile_stored(1, sums + kLanes, 128);
        if constexpr (two) {
            _tile_stored(2, sums + kTileRows * kPanel, 128);
            _tile_stored(3, sums + kTileRows * kPanel + kLanes, 128);
        }
        memory_barrier();
        rows_out.write(sums, args.rows, panel);
    }
    release_tiles();
    stream.end();
    rows_out.close();
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
