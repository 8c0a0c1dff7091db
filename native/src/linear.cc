// linear: y = x @ W.T (+ bias) over the packed panels of 32 outputs.
//
// Every output is one chain over K in order, started at zero; the bias is added last, in f32, then
// one rounding to y's type. Tiles of up to kVecRows rows by one panel hold all chains in registers,
// so row counts only change which rows share a load, never a result. A bf16 step takes a pair of K;
// for odd K the last partner is zeroed in the register (memory after it may hold NaN) and the
// packed partner is zero.
//
// Each thread processes one long run of panels: hardware prefetchers restart at every jump.

#include "quire/amx_few_rows.h"
#include "quire/amx_linear.h"
#include "quire/deal_halving.h"
#include "quire/kernels.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kVecs = static_cast<int>(kPanel) / kLanes;
#if defined(QUIRE_ZMM)
constexpr int kVecRows = 12;
#elif defined(QUIRE_YMM)
constexpr int kVecRows = 3;
#else
constexpr int kVecRows = 1;
#endif
constexpr int64_t kBlockRows = 192;  // rows of x that stay in L2
constexpr int64_t kStepBytes = 128;  // panel bytes of one step: one k of f32, one pair of bf16

// How a tile prefetches weights.
enum class Fetch { none, same_stream, next_panel };

template <Fetch fetch>
QUIRE_VEC void fetch_ahead(const char* ahead) {
    if constexpr (fetch == Fetch::same_stream) {
        prefetch_l1(ahead);
        prefetch_l1(ahead + 64);
    }
    if constexpr (fetch == Fetch::next_panel) prefetch_l2(ahead);
}
template <Fetch fetch>
constexpr int64_t fetched_bytes() {
    return fetch == Fetch::same_stream ? 128 : fetch == Fetch::next_panel ? 64 : 0;
}

// One step: one k of f32.
template <int kRows>
QUIRE_VEC void step(Vec (&sums)[kRows][kVecs], const float* x, int64_t stride, int64_t k,
                    const char* panel) {
    const float* w = reinterpret_cast<const float*>(panel);
    Vec b[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) b[j] = load(w + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
        const Vec a = set1(x[i * stride + k]);
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sums[i][j] = fma(a, b[j], sums[i][j]);
    }
}

// One step: one pair of bf16; `single`: the pair's second half is not x's.
template <int kRows, bool single = false>
QUIRE_VEC void step(Vec (&sums)[kRows][kVecs], const bf16* x, int64_t stride, int64_t pair,
                    const char* panel) {
    const bf16* w = reinterpret_cast<const bf16*>(panel);
    Pairs b[kVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) b[j] = load_pairs(w + 2 * j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
        const bf16* at = x + i * stride + 2 * pair;
        const Pairs a = single ? set1_single(at) : set1_pair(at);
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sums[i][j] = dot_pairs(sums[i][j], a, b[j]);
    }
}

// kRows rows of x by one panel, all of K, into f32 [kRows][32].
template <class T, int kRows, Fetch fetch>
__attribute__((noinline)) void tile(const T* x, int64_t stride, const char* panel, int64_t k,
                                    float* out, const char* ahead) {
    constexpr int kPerStep = sizeof(T) == 2 ? 2 : 1;
    Vec sums[kRows][kVecs];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sums[i][j] = zero();
    }
    const int64_t steps = k / kPerStep;
#pragma GCC unroll 4
    for (int64_t s = 0; s < steps; ++s) {
        fetch_ahead<fetch>(ahead);
        ahead += fetched_bytes<fetch>();
        step(sums, x, stride, s, panel);
        panel += kStepBytes;
    }
    if constexpr (kPerStep == 2) {
        if (k % 2 != 0) step<kRows, true>(sums, x, stride, steps, panel);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) store(out + i * kPanel + j * kLanes, sums[i][j]);
    }
}

template <class T>
using TileFunction = void (*)(const T*, int64_t, const char*, int64_t, float*, const char*);

template <class T, Fetch fetch, int kRows = kVecRows>
QUIRE_VEC TileFunction<T> tile_for(int64_t rows) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return tile_for<T, fetch, kRows - 1>(rows);
    }
    return &tile<T, kRows, fetch>;
}

// Adds the bias and rounds `rows` rows of a panel's sums into y's columns first .. first + count.
template <class Y>
QUIRE_VEC void finish(const float* sums, int64_t rows, const float* bias, const Rows& y,
                      int64_t first_row, int64_t first, int64_t count) {
    for (int64_t i = 0; i < rows; ++i) {
        Y* out = static_cast<Y*>(y.at(first_row + i)) + first;
        for (int64_t c = 0; c < count; c += kLanes) {
            Vec sum = load(sums + i * kPanel + c);
            const int n = static_cast<int>(count - c < kLanes ? count - c : kLanes);
            if (n == kLanes) {
                if (bias != nullptr) sum = add(sum, load(bias + first + c));
                store(out + c, sum);
            } else {
                if (bias != nullptr) sum = add(sum, load_n(bias + first + c, n));
                store_n(out + c, sum, n);
            }
        }
    }
}

// The same for a whole panel, by y's type.
QUIRE_VEC void finish(const float* sums, int64_t rows, const LinearArgs& args, int64_t first_row,
                      int64_t panel) {
    const int64_t first = panel * kPanel, left = args.weight.n - first;
    const int64_t count = left < kPanel ? left : kPanel;
    if (args.y.type == Type::f32) {
        finish<float>(sums, rows, args.bias, args.y, first_row, first, count);
    } else {
        finish<bf16>(sums, rows, args.bias, args.y, first_row, first, count);
    }
}

// Multiplies all rows of one block by one panel.
template <class T>
void panel_block(const LinearArgs& args, int64_t panel, int64_t first_row, int64_t rows) {
    alignas(64) float sums[kBlockRows * kPanel];
    const int64_t k = args.weight.k;
    const int64_t bytes = panel_bytes(k, args.weight.type);
    const char* weights = static_cast<const char*>(args.weight.data) + panel * bytes;
    const T* x = static_cast<const T*>(args.x.at(first_row));
    const int64_t tiles = (rows + kVecRows - 1) / kVecRows;
    int64_t row = 0;
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t count = rows / tiles + (t < rows % tiles ? 1 : 0);
        const char* next = weights + bytes + bytes / 64 * t / tiles * 64;
        TileFunction<T> compute;
        if (tiles == 1) {
            compute = tile_for<T, Fetch::same_stream>(count);
            next = weights + kStreamAheadBytes;
        } else if (tiles <= 16) {
            compute = tile_for<T, Fetch::next_panel>(count);
        } else {
            compute = tile_for<T, Fetch::none>(count);
        }
        compute(x + row * args.x.stride, args.x.stride, weights, k, sums + row * kPanel, next);
        row += count;
    }
    finish(sums, rows, args, first_row, panel);
}

#if defined(QUIRE_AMX)

constexpr int64_t kRowBytes = 5 << 17;  // of packed x: what stays in L2
constexpr int64_t kMostRows = 1024;     // of x in one block
constexpr int64_t kPanelsAtOnce = 8;

QUIRE_VEC int64_t amx_block_rows(int64_t k) {
    const int64_t rows = kRowBytes / (steps_of(k) * kTileStep * 2) / kGroupRows * kGroupRows;
    return rows < kGroupRows ? kGroupRows : rows > kMostRows ? kMostRows : rows;
}

// Packs all rows of x for the matrix unit, in memory shared by all threads.
const bf16* amx_pack(const LinearArgs& args) {
    const int64_t k = args.weight.k, steps = steps_of(k);
    const int64_t packs = (args.rows + kTileRows - 1) / kTileRows;
    const int64_t pack_elements = steps * kTileElements;
    // An odd number of packs leaves half a pair, which the unit may read.
    char* packed = args.pool->shared((packs + 1) * pack_elements * 2);
    bf16* to = reinterpret_cast<bf16*>(packed);
    const int64_t grain = pack_elements < 16384 ? 16384 / pack_elements : 1;
    args.pool->deal(packs, grain, [&](int64_t begin, int64_t end, int) {
        const int64_t first = begin * kTileRows, last = end * kTileRows;
        pack_rows(static_cast<const bf16*>(args.x.at(first)), args.x.stride,
                  (last < args.rows ? last : args.rows) - first, k, to + begin * pack_elements);
    });
    return to;
}

// One or two rows in f32, a step of K behind the other, zeros past K.
const float* amx_widen(const LinearArgs& args) {
    const int64_t k = args.weight.k, stride = steps_of(k) * kTileStep;
    float* x = reinterpret_cast<float*>(args.pool->shared(args.rows * stride * 4));
    for (int64_t row = 0; row < args.rows; ++row) {
        const bf16* from = static_cast<const bf16*>(args.x.at(row));
        for (int64_t c = 0; c < stride; c += kLanes) {
            const int64_t left = k - c;
            const int n = static_cast<int>(left < 0 ? 0 : left < kLanes ? left : kLanes);
            store(x + row * stride + c, load_n(from + c, n));
        }
    }
    return x;
}

// Up to kStreamedRows rows: memory-bound, each thread processes one run of panels.
void few_linear(const LinearArgs& args) {
    const int64_t panels = (args.weight.n + kPanel - 1) / kPanel;
    const int64_t bytes = panel_bytes(args.weight.k, Type::bf16);
    if (args.rows <= kVectorRows) {
        const float* x = amx_widen(args);
        return deal_halving(*args.pool, panels, bytes, [&](int64_t begin, int64_t end, int) {
            if (args.rows == 1) vector_panels<1>(args, x, begin, end);
            if (args.rows == 2) vector_panels<2>(args, x, begin, end);
        });
    }
    const bf16* x = amx_pack(args);
    deal_halving(*args.pool, panels, bytes, [&](int64_t begin, int64_t end, int) {
        if (args.rows > kTileRows) {
            tile_panels<true>(args, x, begin, end);
        } else {
            tile_panels<false>(args, x, begin, end);
        }
    });
}

// Distributed like `linear`, with x packed once.
void amx_linear(const LinearArgs& args) {
    if (args.rows == 0) return;
    if (args.rows <= kStreamedRows) return few_linear(args);
    const int64_t k = args.weight.k, n = args.weight.n, steps = steps_of(k);
    const int64_t block_rows = amx_block_rows(k);
    const int64_t panels = (n + kPanel - 1) / kPanel;
    const int64_t blocks = (args.rows + block_rows - 1) / block_rows;
    const int64_t most = args.rows < block_rows ? args.rows : block_rows;
    const bf16* packed = amx_pack(args);
    // Consecutive panels overlap; each thread still has several chunks.
    const int64_t panel_work = k * kPanel * most;
    const int64_t least = panel_work > 0 && panel_work < 131072 ? 131072 / panel_work : 1;
    const int64_t share = panels * blocks / (8 * args.pool->num_threads());
    const int64_t some = share < kPanelsAtOnce ? share : kPanelsAtOnce;
    args.pool->deal(panels * blocks, some > least ? some : least,
                    [&](int64_t begin, int64_t end, int thread) {
        const AmxScratch scratch =
            AmxScratch::at(args.pool->scratch(thread, AmxScratch::kBytes));
        while (begin < end) {
            const int64_t block = begin / panels, left = (block + 1) * panels - begin;
            const int64_t count = end - begin < left ? end - begin : left;
            const int64_t first = block * block_rows, rest = args.rows - first;
            amx_panels({args, packed + first * steps * kTileStep, first,
                        rest < block_rows ? rest : block_rows, begin % panels,
                        begin % panels + count},
                       scratch);
            begin += count;
        }
        release_tiles();
    });
}

#endif

}  // namespace

void linear(const LinearArgs& args) {
#if defined(QUIRE_AMX)
    if (args.weight.type == Type::bf16) return amx_linear(args);
#endif
    const int64_t panels = (args.weight.n + kPanel - 1) / kPanel;
    const int64_t blocks = (args.rows + kBlockRows - 1) / kBlockRows;
    // Below some 16 thousand products a second thread costs more than it gains.
    const int64_t panel_work = args.weight.k * kPanel * (args.rows < kBlockRows ? args.rows
                                                                               : kBlockRows);
    const int64_t grain = panel_work > 0 && panel_work < 16384 ? 16384 / panel_work : 1;
    args.pool->deal(panels * blocks, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t task = begin; task < end; ++task) {
            const int64_t first_row = task / panels * kBlockRows;
            const int64_t left = args.rows - first_row;
            const int64_t rows = left < kBlockRows ? left : kBlockRows;
            if (args.weight.type == Type::f32) {
                panel_block<float>(args, task % panels, first_row, rows);
            } else {
                panel_block<bf16>(args, task % panels, first_row, rows);
            }
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
