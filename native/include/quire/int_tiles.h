// Tiles of integer products in vector registers: a pack of rows by one panel, all of K, into f32
// [rows][32]. The channel scale of int8 and the bias come after (linear_int.cc).
//
// int8: of each 128 of K, S = the exact sum; F = fma(float(S), scale_a, F), groups in order.
// int4: of each weight group, T = fma(float(S), scale_w, T) from zero; of each 128 of K,
// F = fma(T, scale_a, F). Sums are exact, so how they are split cannot change a bit; the fold is
// one sequence for every number of rows.
//
// Up to so many rows F and T stay in registers, beyond they lie in the first-level cache: a tile
// of 12 rows by 32 lanes fills the registers with sums alone.
#pragma once

#include "quire/int_rows.h"

namespace quire::QUIRE_ISA_NS {

constexpr int kIntVecs = static_cast<int>(kIntLanes) / kLanes;
#if defined(QUIRE_HAS_VNNI) && defined(QUIRE_ZMM)
constexpr int kIntRows = 12;      // of a tile
constexpr int kFoldedRows = 6;    // with F, or T, in registers
constexpr int kShortRows = 2;     // two sums per output, to hide the latency of a product
#elif defined(QUIRE_ZMM)
constexpr int kIntRows = 8;
constexpr int kFoldedRows = 5;
constexpr int kShortRows = 0;
#elif defined(QUIRE_YMM)
constexpr int kIntRows = 2;
constexpr int kFoldedRows = 0;
constexpr int kShortRows = 0;
#else
constexpr int kIntRows = 1;
constexpr int kFoldedRows = 0;
constexpr int kShortRows = 0;
#endif

// How a tile prefetches weights.
enum class IntFetch { none, same_stream, next_panel };

// For two loaded lines, before the first and before the second is used. Each prefetch of one stream
// is separate: GCC combines them into bursts, behind which loads wait.
template <IntFetch fetch>
QUIRE_VEC void fetch_first(const char*& ahead) {
    if constexpr (fetch == IntFetch::same_stream) {
        prefetch_l1(ahead);
        memory_barrier();
        ahead += 64;
    }
    if constexpr (fetch == IntFetch::next_panel) {
        prefetch_l2(ahead);
        ahead += 64;
    }
}
template <IntFetch fetch>
QUIRE_VEC void fetch_second(const char*& ahead) {
    if constexpr (fetch == IntFetch::same_stream) fetch_first<fetch>(ahead);
}

template <int kRows>
struct IntSums {
    Ints v[kRows][kIntVecs];
};
template <int kRows>
struct FloatSums {
    Vec v[kRows][kIntVecs];
};

template <int kRows>
QUIRE_VEC void begin(IntSums<kRows>& sums, const int32_t* starts) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kIntVecs; ++j) sums.v[i][j] = set1_int(starts[i]);
    }
}

enum class Part { whole, low, high };

template <Part part>
QUIRE_VEC WeightQuad part_of(PackedQuad w) {
    return part == Part::whole ? whole_quad(w) : part == Part::low ? low_quad(w) : high_quad(w);
}

// Multiplies a part of packed bytes, four of K, by all rows of the pack; x: the quad in the step.
template <Part part, int kRows>
QUIRE_VEC void add_quads(IntSums<kRows>& sums, const PackedQuad (&packed)[kIntVecs],
                         const RowElement* x) {
#if defined(QUIRE_YMM)  // few registers: one part of a weight at a time
    RowQuad a[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) a[i] = set1_quad(x + i * kIntStep);
#pragma GCC unroll 8
    for (int j = 0; j < kIntVecs; ++j) {
        const WeightQuad w = part_of<part>(packed[j]);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) sums.v[i][j] = dot_quads(sums.v[i][j], w, a[i]);
    }
#else
    WeightQuad w[kIntVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kIntVecs; ++j) w[j] = part_of<part>(packed[j]);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
        const RowQuad a = set1_quad(x + i * kIntStep);
#pragma GCC unroll 8
        for (int j = 0; j < kIntVecs; ++j) sums.v[i][j] = dot_quads(sums.v[i][j], w[j], a);
    }
#endif
}

// F = fma(value, scale of the row, F), in registers or memory.
template <int kRows, class Value>
QUIRE_VEC void fold(FloatSums<kRows>& held, float* out, const float* scales, Value value) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
        const Vec scale = set1(scales[i]);
#pragma GCC unroll 8
        for (int j = 0; j < kIntVecs; ++j) {
            if constexpr (kRows <= kFoldedRows) {
                held.v[i][j] = fma(value(i, j), scale, held.v[i][j]);
            } else {
                float* at = out + i * kIntLanes + j * kLanes;
                store(at, fma(value(i, j), scale, load(at)));
            }
        }
    }
}

template <int kRows>
QUIRE_VEC void begin_fold(FloatSums<kRows>& held, float* out) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kIntVecs; ++j) {
            if constexpr (kRows <= kFoldedRows) {
                held.v[i][j] = zero();
            } else {
                store(out + i * kIntLanes + j * kLanes, zero());
            }
        }
    }
}

template <int kRows>
QUIRE_VEC void end_fold(const FloatSums<kRows>& held, float* out) {
    if constexpr (kRows <= kFoldedRows) {
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
            for (int j = 0; j < kIntVecs; ++j) {
                store(out + i * kIntLanes + j * kLanes, held.v[i][j]);
            }
        }
    }
}

using IntTile = void (*)(const RowPack& pack, const RowShape& shape, const IntScheme& scheme,
                         const char* panel, float* out, const char* ahead);

// ---- int8

template <int kRows, IntFetch fetch>
static __attribute__((noinline)) void tile8(const RowPack& pack, const RowShape& shape,
                                     const IntScheme& scheme, const char* panel, float* out,
                                     const char* ahead) {
    (void)scheme;
    const RowElement* x = pack.step(0);
    const float* scales = pack.scales(shape);
    const int32_t* starts = pack.starts(shape);
    FloatSums<kRows> held;
    begin_fold(held, out);
    for (int64_t step = 0; step < shape.steps; step += 2) {
        const int64_t steps = shape.steps - step < 2 ? 1 : 2;
        IntSums<kRows> sums;
        [[maybe_unused]] IntSums<kRows> others;
        begin(sums, starts);
        if constexpr (kRows <= kShortRows) {
#pragma GCC unroll 2
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
                for (int j = 0; j < kIntVecs; ++j) others.v[i][j] = set1_int(0);
            }
        }
        for (int64_t s = 0; s < steps; ++s) {
            for (int64_t quad = 0; quad < kIntStep / 4; quad += 4) {
#pragma GCC unroll 4
                for (int q = 0; q < 4; ++q) {
                    PackedQuad w[kIntVecs];
                    fetch_first<fetch>(ahead);
#pragma GCC unroll 8
                    for (int j = 0; j < kIntVecs; ++j) {
                        if (j == kIntVecs / 2) fetch_second<fetch>(ahead);
                        w[j] = load_packed(panel + q * kQuadBytes + j * kLanes * 4);
                    }
                    if (kRows <= kShortRows && q % 2 != 0) {
                        add_quads<Part::whole>(others, w, x + (quad + q) * 4);
                    } else {
                        add_quads<Part::whole>(sums, w, x + (quad + q) * 4);
                    }
                }
                panel += 4 * kQuadBytes;
            }
            x += kRows * kIntStep;
        }
        if constexpr (kRows <= kShortRows) {
            fold(held, out, scales, [&](int i, int j) __attribute__((always_inline)) {
                return to_float(add(sums.v[i][j], others.v[i][j]));
            });
        } else {
            fold(held, out, scales, [&](int i, int j) __attribute__((always_inline)) {
                return to_float(sums.v[i][j]);
            });
        }
        scales += kRows;
        starts += kRows;
    }
    end_fold(held, out);
}

// ---- int4

// The initial value of a group's sums.
template <int kRows>
QUIRE_VEC void begin_group(IntSums<kRows>& sums, const int32_t* starts, const uint8_t* zeros) {
    if (zeros == nullptr) return begin(sums, starts);
#pragma GCC unroll 8
    for (int j = 0; j < kIntVecs; ++j) {
        const Ints zero_points = load_bytes(zeros + j * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
            sums.v[i][j] = mul(zero_points, set1_int(starts[i]));
        }
    }
}

template <int kRows, IntFetch fetch>
static __attribute__((noinline)) void tile4(const RowPack& pack, const RowShape& shape,
                                     const IntScheme& scheme, const char* panel, float* out,
                                     const char* ahead) {
    const RowElement* x = pack.step(0);
    const float* scales = pack.scales(shape);
    const int32_t* starts = pack.starts(shape);
    alignas(64) float kept[kRows * kIntLanes];  // T where it is not in registers
    for (int64_t i = 0; i < kRows * kIntLanes; i += kLanes) store(out + i, zero());
    for (int64_t step = 0; step < shape.steps; step += 2) {
        const int64_t steps = shape.steps - step < 2 ? 1 : 2;
        const int64_t groups = block_groups(scheme, steps);
        const int64_t head = block_head_bytes(scheme, steps);
        [[maybe_unused]] int64_t fetched = 0;  // of the head
        const char* weights = panel + head;
        FloatSums<kRows> t;
        begin_fold(t, kept);
        int64_t octs = steps * kIntStep / 8;  // left
        const int64_t group_octs = scheme.group / 8;
        int64_t oct = 0;
        for (int64_t g = 0; g < groups; ++g) {
            const auto* zeros =
                scheme.has_zero_points
                    ? reinterpret_cast<const uint8_t*>(panel) + groups * kScaleBytes +
                          g * kIntLanes
                    : nullptr;
            IntSums<kRows> sums;
            begin_group(sums, starts, zeros);
            const int64_t end = oct + group_octs < octs ? oct + group_octs : octs;
            for (; oct < end; oct += 4) {
                const RowElement* quads = x + oct / 8 * kRows * kIntStep + oct % 8 * 8;
#pragma GCC unroll 4
                for (int o = 0; o < 4; ++o) {
                    PackedQuad w[kIntVecs];
                    fetch_first<fetch>(ahead);
#pragma GCC unroll 8
                    for (int j = 0; j < kIntVecs; ++j) {
                        w[j] = load_packed(weights + j * kLanes * 4);
                    }
                    add_quads<Part::low>(sums, w, quads + o * 8);
                    fetch_second<fetch>(ahead);
                    add_quads<Part::high>(sums, w, quads + o * 8 + 4);
                    weights += kQuadBytes;
                }
            }
            Vec scale_w[kIntVecs];
#pragma GCC unroll 8
            for (int j = 0; j < kIntVecs; ++j) {
                scale_w[j] = load(reinterpret_cast<const bf16*>(panel + g * kScaleBytes) +
                                  j * kLanes);
            }
#pragma GCC unroll 16
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
                for (int j = 0; j < kIntVecs; ++j) {
                    const Vec sum = to_float(sums.v[i][j]);
                    if constexpr (kRows <= kFoldedRows) {
                        t.v[i][j] = fma(sum, scale_w[j], t.v[i][j]);
                    } else {
                        float* at = kept + i * kIntLanes + j * kLanes;
                        store(at, fma(sum, scale_w[j], load(at)));
                    }
                }
            }
            starts += kRows;
            if constexpr (fetch == IntFetch::same_stream) {  // the lines of scales and zero points
                for (; fetched < head * (g + 1) / groups; fetched += 64) fetch_first<fetch>(ahead);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
            const Vec scale = set1(scales[i]);
#pragma GCC unroll 8
            for (int j = 0; j < kIntVecs; ++j) {
                float* at = out + i * kIntLanes + j * kLanes;
                const Vec of_row = kRows <= kFoldedRows ? t.v[i][j]
                                                        : load(kept + i * kIntLanes + j * kLanes);
                store(at, fma(of_row, scale, load(at)));
            }
        }
        scales += kRows;
        x += steps * kRows * kIntStep;
        panel += block_bytes(scheme, steps);
    }
}

// The tile for `rows` rows.
template <int kBits, IntFetch fetch, int kRows = kIntRows>
QUIRE_VEC IntTile int_tile(int64_t rows) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return int_tile<kBits, fetch, kRows - 1>(rows);
    }
    if constexpr (kBits == 8) {
        return &tile8<kRows, fetch>;
    } else {
        return &tile4<kRows, fetch>;
    }
}

}  // namespace quire::QUIRE_ISA_NS
