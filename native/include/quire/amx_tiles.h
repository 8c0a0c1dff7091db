// Products of bf16 tiles by AMX (Intel's matrix unit): 16 rows by 16 columns by 32 of K at once.
//
// The recipe of an output: K in steps of 32, in order. Within a step the even and odd K are two
// chains of fused multiply-adds from zero, in order; their sum is added to the output's f32 sum,
// with denormals flushed to zero throughout. It is the instruction's own definition (TDPBF16PS),
// the same for every row count; the last step is zero-padded, which changes nothing.
//
// Only for files compiled once per instruction set, with AMX. A thread configures its tiles before
// it uses them and releases them afterwards: tiles in use make every context switch slower.
#pragma once

#include "quire/kernels.h"
#include "quire/vec.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kTileRows = 16;   // of x; and columns of a weight
constexpr int64_t kTileStep = 32;   // of K
constexpr int64_t kTileElements = kTileRows * kTileStep;
constexpr int64_t kTileBytes = 1024;

// Tiles 0 1 / 2 3: sums of the upper and lower rows. 4, 5: their x. 6, 7: the weight's halves.
QUIRE_VEC void configure_tiles(int64_t upper_rows, int64_t lower_rows) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const uint8_t upper = static_cast<uint8_t>(upper_rows);
    const uint8_t lower = static_cast<uint8_t>(lower_rows > 0 ? lower_rows : 1);
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
#pragma GCC unroll 8
    for (int tile = 0; tile < 8; ++tile) {
        config.column_bytes[tile] = 64;
        config.rows[tile] = rows[tile];
    }
    memory_barrier();
    _tile_loadconfig(&config);
}

QUIRE_VEC void release_tiles() { _tile_release(); }

// A stream of weights to the tiles. Tile loads from memory keep too few lines in flight; so plain
// loads touch each line before its tile does, preceded by prefetches. The touched values are
// accumulated: loads without a dependent run too far ahead of the tiles.
struct Stream {
    __m512i seen[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};

    template <int kLines>
    __attribute__((always_inline)) void draw(const char* touched, const char* fetched) {
#pragma GCC unroll 32
        for (int line = 0; line < kLines; ++line) {
            prefetch_l1(fetched + 64 * line);
            memory_barrier();  // or GCC combines the prefetches, which then wait for each other
            const __m512i loaded = _mm512_load_si512(touched + 64 * line);
            seen[line % 4] = _mm512_or_si512(seen[line % 4], loaded);
            memory_barrier();
        }
    }
    // The compiler must assume that all of it is used.
    __attribute__((always_inline)) void end() const {
        __asm__ volatile("" : : "v"(seen[0]), "v"(seen[1]), "v"(seen[2]), "v"(seen[3]));
    }
};

// Packs rows of x for the matrix unit: [ceil(rows / 16)][steps][16][32], zeros past K.
QUIRE_VEC void pack_rows(const bf16* x, int64_t stride, int64_t rows, int64_t k, bf16* packed) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
        const int64_t count = rows - row < kTileRows ? rows - row : kTileRows;
        for (int64_t c = 0; c < k; c += kTileStep, packed += kTileElements) {
            const int64_t left = k - c;
            const __mmask32 some = left >= kTileStep ? ~__mmask32{0}
                                                     : (__mmask32{1} << left) - 1;
            const bf16* from = x + row * stride + c;
            for (int64_t i = 0; i < count; ++i) {
                _mm512_store_si512(packed + i * kTileStep,
                                   _mm512_maskz_loadu_epi16(some, from + i * stride));
            }
        }
    }
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
