// limit: measures what the machine can do at most, by simple loops of this instruction set: reading
// memory, arithmetic in registers, distributing work. They share no code with the other kernels, so
// they can serve as bounds. Returns the amount of work; the caller measures time. Products of bytes
// and bf16 use numbers distributed like weights and activations, around zero with a bell curve, and
// tiles get other numbers each time: a unit that multiplies zeros, or the same numbers repeatedly,
// can be a quarter faster than in real work.

#include "quire/int_vec.h"
#include "quire/kernels.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kSteps = 100000;          // of a chunk of arithmetic: a fraction of a millisecond
constexpr int64_t kChunkBytes = 4 << 20;    // of a chunk of reading
constexpr int kChains = 12;                 // independent sums hide latency

// The compiler must assume that `value` is read.
template <class T>
QUIRE_VEC void keep(const T& value) {
    __asm__ volatile("" : : "m"(value) : "memory");
}

constexpr int kOperandBytes = 1024;
constexpr int kOperands = 8;

// The operands: approximately normal numbers, sums of four bytes of a fixed series.
struct Bell {
    // bf16 numbers with a spread of about one; integers with maxima of about 127, as in a scaled
    // row.
    alignas(64) uint16_t bf16[kOperands][kOperandBytes / 2] = {};
    alignas(64) int8_t int8[kOperands][kOperandBytes] = {};

    constexpr Bell() {
        uint32_t state = 1;
        for (auto& operand : bf16) {
            for (auto& number : operand) number = rounded_to_bf16(next(state));
        }
        for (auto& operand : int8) {
            for (auto& number : operand) number = static_cast<int8_t>(next(state) / 4);
        }
    }

    // -510 to 510
    static constexpr int next(uint32_t& state) {
        int sum = -510;
        for (int i = 0; i < 4; ++i) {
            state = state * 1664525u + 1013904223u;
            sum += static_cast<int>(state >> 24);
        }
        return sum;
    }

    // The bits of n / 128.
    static constexpr uint16_t rounded_to_bf16(int n) {
        if (n == 0) return 0;
        const int size = n < 0 ? -n : n;
        int exponent = 0;
        while (size >> (exponent + 1) != 0) ++exponent;
        const int fraction = ((size << 7) >> exponent) & 0x7f;
        return static_cast<uint16_t>((n < 0 ? 0x8000 : 0) | (127 - 7 + exponent) << 7 | fraction);
    }
};

[[maybe_unused]] alignas(64) constexpr Bell kBell;

int64_t read(const char* at, int64_t bytes) {
    const auto* words = reinterpret_cast<const float*>(at);
#if defined(QUIRE_ZMM)
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            prefetch_l1(at + i + 64 * j + kStreamAheadBytes);
            __asm__ volatile("" ::: "memory");  // or the prefetches come in bursts
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
    const auto operand = [](int i) {
        return load_pairs(reinterpret_cast<const bf16*>(kBell.bf16[i]));
    };
    const Pairs a = operand(0), b[2] = {operand(1), operand(2)};
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = dot_pairs(sums[i], a, b[i % 2]);
    }
    keep(sums);
    return 2 * 2 * kLanes * kChains * kSteps;
}

#endif

#if defined(QUIRE_HAS_VNNI)

int64_t dot_int8() {
    Ints sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = set1_int(i);
    const WeightQuad a = whole_quad(load_packed(reinterpret_cast<const char*>(kBell.int8[0])));
    const RowQuad b[2] = {{load_words(kBell.int8[1])}, {load_words(kBell.int8[2])}};
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) sums[i] = dot_quads(sums[i], a, b[i % 2]);
    }
    keep(sums);
    return 2 * 4 * kLanes * kChains * kSteps;
}

#elif defined(QUIRE_ZMM) || defined(QUIRE_YMM)

// Without a product of bytes, kernels multiply words and add: two instructions for two products.
int64_t dot_int8() {
#if defined(QUIRE_ZMM)
    using Words = __m512i;
    const auto operand = [](int i) {
        return _mm512_cvtepi8_epi16(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(kBell.int8[i])));
    };
#else
    using Words = __m256i;
    const auto operand = [](int i) {
        return _mm256_cvtepi8_epi16(
            _mm_load_si128(reinterpret_cast<const __m128i*>(kBell.int8[i])));
    };
#endif
    const Words a = operand(0), b[2] = {operand(1), operand(2)};
    Words sums[kChains] = {};
    for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; ++i) {
            Words products;
            __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
                    : "+v"(sums[i]), "=&v"(products)
                    : "v"(a), "v"(b[i % 2]));
        }
    }
    keep(sums);
    return 2 * 2 * kLanes * kChains * kSteps;
}

#endif

#if defined(QUIRE_AMX)

// Eight tiles of 16 rows of 64 bytes: four sums, two of each operand.
void open_tiles() {
    alignas(64) unsigned char shape[64] = {1};
    for (int tile = 0; tile < 8; ++tile) shape[16 + 2 * tile] = 64, shape[48 + tile] = 16;
    keep(shape);  // some compilers drop the stores otherwise
    _tile_loadconfig(shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Loads the next two of each operand from L1. With zeros these loads cost nothing; changing
// operands do.
QUIRE_VEC void load_tiles(const char* operands) {
    _tile_loadd(4, operands, 64);
    _tile_loadd(5, operands + kOperandBytes, 64);
    _tile_loadd(6, operands + 2 * kOperandBytes, 64);
    _tile_loadd(7, operands + 3 * kOperandBytes, 64);
}

int64_t tile_bf16() {
    open_tiles();
    for (int64_t n = 0; n < kSteps / 4; ++n) {
        load_tiles(reinterpret_cast<const char*>(kBell.bf16[n % 2 * 4]));
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
        load_tiles(reinterpret_cast<const char*>(kBell.int8[n % 2 * 4]));
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return int64_t{2} * 16 * 16 * 64 * (kSteps / 4 * 4);
}

#endif

// One chunk's work; null if this instruction set has no such loop.
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
    int64_t each = 0;  // the same for every chunk
    args.pool->deal(args.chunks, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t chunk = begin; chunk < end; ++chunk) {
            __atomic_store_n(&each, loop(), __ATOMIC_RELAXED);
        }
    });
    *args.done = each * args.chunks;
}

}  // namespace quire::QUIRE_ISA_NS
