// limit: what the machine can do at most, by plain loops of this instruction set: reading memory,
// arithmetic in registers, handing out work. Nothing of the other kernels is in them, so they can
// judge these. Says how much was done; takes no time (the caller does) and computes nothing of use.

#include "quire/kernels.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kSteps = 100000;          // of a chunk of arithmetic: a fraction of a millisecond
constexpr int64_t kChunkBytes = 4 << 20;    // of a chunk of reading
constexpr int kChains = 12;                 // sums side by side hide how long one takes

// Whoever looks on must think that `value` is read.
template <class T>
QUIRE_VEC void keep(const T& value) {
    __asm__ volatile("" : : "m"(value) : "memory");
}

int64_t read(const char* at, int64_t bytes) {
    const auto* words = reinterpret_cast<const float*>(at);
#if defined(QUIRE_ZMM)
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            prefetch_l1(at + i + 64 * j + kStreamAheadBytes);
            sums[j] = _mm512_or_si512(sums[j], _mm512_loadu_si512(at + i + 64 * j));
        }
    }
#else
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i + 4 * kLanes <= bytes / 4; i += 4 * kLanes) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums[j] = max(sums[j], load(words + i + kLanes * j));
    }
#endif
    (void)words;
    keep(sums);
    return bytes;
}

int64_t fma_f32() {
    Vec sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = set1(1.0f + static_cast<float>(i));
    const Vec a = set1(0.999f), b = set1(1e-9f);
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = fma(sums[i], a, b);
    }
    keep(sums);
    return 2 * kLanes * kChains * kSteps;
}

#if defined(QUIRE_HAS_BF16_DOT)

int64_t dot_bf16() {
    Vec sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = set1(1.0f + static_cast<float>(i));
    const Pairs a = set1_pair_bits(0x3f803f80), b = set1_pair_bits(0x00800080);
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = dot_pairs(sums[i], a, b);
    }
    keep(sums);
    return 2 * 2 * kLanes * kChains * kSteps;
}

int64_t dot_int8() {
    __m512i sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);
    const __m512i a = _mm512_set1_epi8(1);
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            __asm__("vpdpbusd %1, %1, %0" : "+v"(sums[i]) : "v"(a));
        }
    }
    keep(sums);
    return 2 * 4 * kLanes * kChains * kSteps;
}

#elif defined(QUIRE_ZMM) || defined(QUIRE_YMM)

// Without a product of bytes, kernels multiply words and add: two instructions for two products.
int64_t dot_int8() {
#if defined(QUIRE_ZMM)
    using Words = __m512i;
    const Words a = _mm512_set1_epi16(1);
#else
    using Words = __m256i;
    const Words a = _mm256_set1_epi16(1);
#endif
    Words sums[kChains] = {};
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            Words products;
            __asm__("vpmaddwd %2, %2, %1\n\tvpaddd %1, %0, %0"
                    : "+v"(sums[i]), "=&v"(products)
                    : "v"(a));
        }
    }
    keep(sums);
    return 2 * 2 * kLanes * kChains * kSteps;
}

#endif

#if defined(QUIRE_AMX)

// Eight tiles of 16 rows of 64 bytes: four sums, two of each operand.
void open_tiles() {
    alignas(64) static constexpr unsigned char kZeros[1024] = {};
    alignas(64) unsigned char shape[64] = {1};
    for (int tile = 0; tile < 8; ++tile) shape[16 + 2 * tile] = 64, shape[48 + tile] = 16;
    keep(shape);  // some compilers drop the stores otherwise
    _tile_loadconfig(shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, kZeros, 64);
    _tile_loadd(5, kZeros, 64);
    _tile_loadd(6, kZeros, 64);
    _tile_loadd(7, kZeros, 64);
}

int64_t tile_bf16() {
    open_tiles();
    for (int64_t n = 0; n < kSteps / 4; ++n) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return int64_t{2} * 16 * 16 * 32 * (kSteps / 4 * 4);
}

int64_t tile_int8() {
    open_tiles();
    for (int64_t n = 0; n < kSteps / 4; ++n) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return int64_t{2} * 16 * 16 * 64 * (kSteps / 4 * 4);
}

#endif

// One chunk's work; null where this instruction set has no such loop.
using Loop = int64_t (*)();

Loop loop_of(Limit limit) {
    switch (limit) {
        case Limit::fma_f32: return &fma_f32;
#if defined(QUIRE_HAS_BF16_DOT)
        case Limit::dot_bf16: return &dot_bf16;
#endif
#if defined(QUIRE_ZMM) || defined(QUIRE_YMM)
        case Limit::dot_int8: return &dot_int8;
#endif
#if defined(QUIRE_AMX)
        case Limit::tile_bf16: return &tile_bf16;
        case Limit::tile_int8: return &tile_int8;
#endif
        default: return nullptr;
    }
}

}  // namespace

void limit(const LimitArgs& args) {
    *args.done = 0;
    if (args.limit == Limit::fork_join) {
        for (int64_t i = 0; i < args.chunks; ++i) {
            args.pool->deal(args.pool->num_threads(), 1, [](int64_t, int64_t, int) {});
        }
        *args.done = args.chunks;
        return;
    }
    if (args.limit == Limit::read) {
        args.pool->deal(args.bytes, kChunkBytes, [&](int64_t begin, int64_t end, int) {
            read(static_cast<const char*>(args.data) + begin, end - begin);
        });
        *args.done = args.bytes;
        return;
    }
    const Loop loop = loop_of(args.limit);
    if (loop == nullptr) return;
    int64_t each = 0;  // the same of every chunk
    args.pool->deal(args.chunks, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
            __atomic_store_n(&each, loop(), __ATOMIC_RELAXED);
        }
    });
    *args.done = each * args.chunks;
}

}  // namespace quire::QUIRE_ISA_NS
