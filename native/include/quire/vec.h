// f32 vectors of kLanes lanes, one wrapper for every instruction set.
//
// Only for files compiled once per instruction set (QUIRE_ISA_NS). Those files must contain no
// inline library code: an inline function compiled with AVX-512 in one file may be the copy the
// linker keeps for all. So everything here is static and always inlined, in the namespace of its
// instruction set, and nothing of std:: is used.
//
// No call touches memory outside what it is asked for: the `_n` forms read or write the first n
// lanes only (0 <= n <= kLanes) and set the others to zero. Reductions and exp are fixed
// sequences of rounded operations. fma is one rounding, except on `portable`: multiply, then add.
#pragma once

#include "quire/types.h"

#if defined(QUIRE_ISA_AMX)
#define QUIRE_AMX 1
#endif
#if defined(QUIRE_ISA_AVX512BF16) || defined(QUIRE_ISA_AMX)
#define QUIRE_HAS_BF16_DOT 1
#endif
#if defined(QUIRE_HAS_BF16_DOT) || defined(QUIRE_ISA_AVX512VNNI) || defined(QUIRE_ISA_AVX2VNNI)
#define QUIRE_HAS_VNNI 1
#endif
#if defined(QUIRE_ISA_AVX512) || defined(QUIRE_ISA_AVX512VNNI) || defined(QUIRE_HAS_BF16_DOT)
#define QUIRE_ZMM 1
#elif defined(QUIRE_ISA_AVX2) || defined(QUIRE_ISA_AVX2VNNI)
#define QUIRE_YMM 1
#endif
#if defined(QUIRE_ZMM) || defined(QUIRE_YMM)
#include <immintrin.h>
#endif

#define QUIRE_VEC static inline __attribute__((always_inline))

namespace quire::QUIRE_ISA_NS {

// ---- one instruction set each: the same functions over its registers

#if defined(QUIRE_ZMM)

constexpr int kLanes = 16;
struct Vec { __m512 v; };
struct Pairs { __m512i v; };  // kLanes pairs of bf16: the lower half of a lane is the first

QUIRE_VEC __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
QUIRE_VEC Vec set1(float x) { return {_mm512_set1_ps(x)}; }
QUIRE_VEC Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
QUIRE_VEC Vec load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
QUIRE_VEC Vec widen_words(__m256i words) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16))};
}
QUIRE_VEC Vec load(const bf16* p) {
    return widen_words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUIRE_VEC Vec load_n(const bf16* p, int n) {
    return widen_words(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
QUIRE_VEC void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
QUIRE_VEC void store_n(float* p, Vec a, int n) {
    _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
QUIRE_VEC __m256i round_any_words(Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}
#if defined(QUIRE_HAS_BF16_DOT)
// The instruction flushes denormals to zero; it rounds everything else as round_any_words does.
QUIRE_VEC bool has_denormals(Vec a) { return _mm512_fpclass_ps_mask(a.v, 0x20) != 0; }
QUIRE_VEC __m256i round_words(Vec a) {
    if (__builtin_expect(has_denormals(a), false)) return round_any_words(a);
    return (__m256i)_mm512_cvtneps_pbh(a.v);
}
#else
QUIRE_VEC __m256i round_words(Vec a) { return round_any_words(a); }
#endif
QUIRE_VEC void store(bf16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_words(a));
}
QUIRE_VEC void store_n(bf16* p, Vec a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), round_words(a));
}
#if defined(QUIRE_HAS_BF16_DOT)
QUIRE_VEC void store_two(bf16* p, Vec a, Vec b) {
    if (__builtin_expect(has_denormals(a) | has_denormals(b), false)) {
        store(p, a);
        store(p + kLanes, b);
        return;
    }
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
}
#endif
QUIRE_VEC Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
QUIRE_VEC Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
QUIRE_VEC Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
QUIRE_VEC Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
QUIRE_VEC Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_VEC Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }  // b if one is NaN
QUIRE_VEC Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }  // b if one is NaN
// The first n lanes of a, `fill` in the others.
QUIRE_VEC Vec keep_first(Vec a, int n, float fill) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), first_lanes(n), a.v)};
}
// a where x < y, else b (b where x or y is NaN).
QUIRE_VEC Vec select_less(Vec x, Vec y, Vec a, Vec b) {
    return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ), a.v)};
}
QUIRE_VEC Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
QUIRE_VEC Vec copy_sign(Vec a, Vec sign) {
    const __m512 bit = _mm512_set1_ps(-0.0f);
    return {_mm512_or_ps(_mm512_andnot_ps(bit, a.v), _mm512_and_ps(bit, sign.v))};
}
// 2^n for n in -126..127, given t = n + 12582912 (1.5 * 2^23).
QUIRE_VEC Vec power_of_two(Vec t) {
    const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}
QUIRE_VEC Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_VEC Pairs load_pairs_n(const bf16* p, int n) {
    return {_mm512_maskz_loadu_epi32(first_lanes(n), p)};
}
QUIRE_VEC Pairs set1_pair_bits(uint32_t bits) {
    return {_mm512_set1_epi32(static_cast<int>(bits))};
}
QUIRE_VEC Pairs mask_pairs(Pairs a, uint32_t bits) {
    return {_mm512_and_si512(a.v, _mm512_set1_epi32(static_cast<int>(bits)))};
}
#if defined(QUIRE_HAS_BF16_DOT)
QUIRE_VEC Vec dot_pairs(Vec sum, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}
#else
QUIRE_VEC Vec first_of(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
QUIRE_VEC Vec second_of(Pairs a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32(-65536)))};
}
#endif
QUIRE_VEC void prefetch_l1(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
QUIRE_VEC void prefetch_l2(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

#elif defined(QUIRE_YMM)

constexpr int kLanes = 8;
struct Vec { __m256 v; };
struct Pairs { __m256i v; };  // kLanes pairs of bf16: the lower half of a lane is the first

QUIRE_VEC __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
QUIRE_VEC Vec set1(float x) { return {_mm256_set1_ps(x)}; }
QUIRE_VEC Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
QUIRE_VEC Vec load_n(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
QUIRE_VEC Vec widen_words(__m128i words) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16))};
}
QUIRE_VEC Vec load(const bf16* p) {
    return widen_words(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_VEC Vec load_n(const bf16* p, int n) {
    alignas(16) uint16_t words[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int i = 0; i < n; ++i) words[i] = p[i].bits;
    return widen_words(_mm_load_si128(reinterpret_cast<const __m128i*>(words)));
}
QUIRE_VEC void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
QUIRE_VEC void store_n(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }
QUIRE_VEC __m128i round_words(Vec a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i halves = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    const __m256i packed = _mm256_packus_epi32(halves, halves);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
QUIRE_VEC void store(bf16* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_words(a));
}
QUIRE_VEC void store_n(bf16* p, Vec a, int n) {
    alignas(16) uint16_t words[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(words), round_words(a));
    for (int i = 0; i < n; ++i) p[i].bits = words[i];
}
QUIRE_VEC Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
QUIRE_VEC Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
QUIRE_VEC Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
QUIRE_VEC Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
QUIRE_VEC Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_VEC Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
QUIRE_VEC Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
QUIRE_VEC Vec keep_first(Vec a, int n, float fill) {
    return {_mm256_blendv_ps(_mm256_set1_ps(fill), a.v, _mm256_castsi256_ps(first_lanes(n)))};
}
QUIRE_VEC Vec select_less(Vec x, Vec y, Vec a, Vec b) {
    return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, y.v, _CMP_LT_OQ))};
}
QUIRE_VEC Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
QUIRE_VEC Vec copy_sign(Vec a, Vec sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(bit, a.v), _mm256_and_ps(bit, sign.v))};
}
QUIRE_VEC Vec power_of_two(Vec t) {
    const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(t.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 23))};
}
QUIRE_VEC Pairs load_pairs(const bf16* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
QUIRE_VEC Pairs load_pairs_n(const bf16* p, int n) {
    return {_mm256_maskload_epi32(reinterpret_cast<const int*>(p), first_lanes(n))};
}
QUIRE_VEC Pairs set1_pair_bits(uint32_t bits) {
    return {_mm256_set1_epi32(static_cast<int>(bits))};
}
QUIRE_VEC Pairs mask_pairs(Pairs a, uint32_t bits) {
    return {_mm256_and_si256(a.v, _mm256_set1_epi32(static_cast<int>(bits)))};
}
QUIRE_VEC Vec first_of(Pairs a) { return {_mm256_castsi256_ps(_mm256_slli_epi32(a.v, 16))}; }
QUIRE_VEC Vec second_of(Pairs a) {
    return {_mm256_castsi256_ps(_mm256_and_si256(a.v, _mm256_set1_epi32(-65536)))};
}
QUIRE_VEC void prefetch_l1(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
QUIRE_VEC void prefetch_l2(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

#else  // portable: the compiler's own vectors of four

constexpr int kLanes = 4;
typedef float Floats4 __attribute__((vector_size(16)));
typedef uint32_t Words4 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));
struct Vec { Floats4 v; };
struct Pairs { Words4 v; };  // kLanes pairs of bf16: the lower half of a lane is the first

QUIRE_VEC Vec set1(float x) { return {Floats4{x, x, x, x}}; }
QUIRE_VEC Vec load(const float* p) {
    Vec a;
    __builtin_memcpy(&a.v, p, 16);
    return a;
}
QUIRE_VEC Vec load_n(const float* p, int n) {
    Vec a = set1(0.0f);
    for (int i = 0; i < n; ++i) a.v[i] = p[i];
    return a;
}
QUIRE_VEC Vec load_n(const bf16* p, int n) {
    Words4 bits = {0, 0, 0, 0};
    for (int i = 0; i < n; ++i) bits[i] = static_cast<uint32_t>(p[i].bits) << 16;
    return {(Floats4)bits};
}
QUIRE_VEC Vec load(const bf16* p) {
    const Words4 bits = {p[0].bits, p[1].bits, p[2].bits, p[3].bits};
    return {(Floats4)(bits << 16)};
}
QUIRE_VEC void store(float* p, Vec a) { __builtin_memcpy(p, &a.v, 16); }
QUIRE_VEC void store_n(float* p, Vec a, int n) {
    for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
QUIRE_VEC void store_n(bf16* p, Vec a, int n) {
    for (int i = 0; i < n; ++i) p[i] = round_bf16(a.v[i]);
}
QUIRE_VEC void store(bf16* p, Vec a) { store_n(p, a, 4); }
QUIRE_VEC Vec add(Vec a, Vec b) { return {a.v + b.v}; }
QUIRE_VEC Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
QUIRE_VEC Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
QUIRE_VEC Vec div(Vec a, Vec b) { return {a.v / b.v}; }
QUIRE_VEC Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
QUIRE_VEC Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
QUIRE_VEC Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
QUIRE_VEC Vec keep_first(Vec a, int n, float fill) {
    for (int i = n; i < 4; ++i) a.v[i] = fill;
    return a;
}
QUIRE_VEC Vec select_less(Vec x, Vec y, Vec a, Vec b) { return {x.v < y.v ? a.v : b.v}; }
QUIRE_VEC Vec abs(Vec a) { return {(Floats4)((Words4)a.v & 0x7fffffffu)}; }
QUIRE_VEC Vec copy_sign(Vec a, Vec sign) {
    return {(Floats4)(((Words4)a.v & 0x7fffffffu) | ((Words4)sign.v & 0x80000000u))};
}
QUIRE_VEC Vec power_of_two(Vec t) { return {(Floats4)(((Words4)t.v + 127u) << 23)}; }
QUIRE_VEC Pairs load_pairs(const bf16* p) {
    Pairs a;
    __builtin_memcpy(&a.v, p, 16);
    return a;
}
QUIRE_VEC Pairs load_pairs_n(const bf16* p, int n) {
    Pairs a = {Words4{0, 0, 0, 0}};
    for (int i = 0; i < n; ++i) {
        a.v[i] = p[2 * i].bits | static_cast<uint32_t>(p[2 * i + 1].bits) << 16;
    }
    return a;
}
QUIRE_VEC Pairs set1_pair_bits(uint32_t bits) { return {Words4{bits, bits, bits, bits}}; }
QUIRE_VEC Pairs mask_pairs(Pairs a, uint32_t bits) { return {a.v & bits}; }
QUIRE_VEC Vec first_of(Pairs a) { return {(Floats4)(a.v << 16)}; }
QUIRE_VEC Vec second_of(Pairs a) { return {(Floats4)(a.v & 0xffff0000u)}; }
QUIRE_VEC void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
QUIRE_VEC void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

#endif

// How far ahead of its use a weight is prefetched if rows take one pass, a line per load: twice the
// lines a core has in flight. At 8 KiB products of 4 bits ran at 0.7 of this.
constexpr int64_t kStreamAheadBytes = 2048;
constexpr int64_t kTileAheadBytes = 8192;  // the same for tiles of the matrix unit, bursts of lines

// ---- the same on every instruction set

// Loads, stores and prefetches are not reordered across it by the compiler.
QUIRE_VEC void memory_barrier() { __asm__ volatile("" ::: "memory"); }

QUIRE_VEC Vec zero() { return set1(0.0f); }

// Vectors that lie one behind the other.
#if !defined(QUIRE_HAS_BF16_DOT)
QUIRE_VEC void store_two(bf16* p, Vec a, Vec b) {
    store(p, a);
    store(p + kLanes, b);
}
#endif
QUIRE_VEC void store_two(float* p, Vec a, Vec b) {
    store(p, a);
    store(p + kLanes, b);
}

// A pair of bf16 from memory in every lane; `set1_single` reads one and pairs it with zero.
QUIRE_VEC Pairs set1_pair(const bf16* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return set1_pair_bits(bits);
}
QUIRE_VEC Pairs set1_single(const bf16* p) { return set1_pair_bits(p->bits); }

#if !defined(QUIRE_HAS_BF16_DOT)
// sum + a.first * b.first, then + a.second * b.second: two steps of one chain.
QUIRE_VEC Vec dot_pairs(Vec sum, Pairs a, Pairs b) {
    sum = fma(first_of(a), first_of(b), sum);
    return fma(second_of(a), second_of(b), sum);
}
#endif

// Lanes added in a fixed order: halves onto halves.
QUIRE_VEC float sum_lanes(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// The largest lane; lanes must not be NaN.
QUIRE_VEC float max_lanes(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
        }
    }
    return lanes[0];
}

// 2^n for integers n in -252..254 times a, which is near 1: overflows to infinity and underflows to
// zero correctly. In two factors, the first of which is exact, or by the instruction for it.
QUIRE_VEC Vec scale_by_power(Vec a, Vec n) {
#if defined(QUIRE_ZMM)
    return {_mm512_scalef_ps(a.v, n.v)};
#else
    const Vec magic = set1(12582912.0f);
    const Vec half = add(mul(n, set1(0.5f)), magic);
    const Vec rest = add(sub(n, sub(half, magic)), magic);
    return mul(mul(a, power_of_two(half)), power_of_two(rest));
#endif
}

// x[i] becomes e^x[i], within about 1.5 units in the last place; e^-inf is 0, NaN stays NaN. x = n
// ln 2 + r with ln 2 in two parts; our own minimax polynomial of degree 6 for e^r. Each step is
// done for all vectors before the next, which hides latencies.
template <int count>
QUIRE_VEC void exp_each(Vec* x) {
    constexpr float kPolynomial[] = {8.374824188649654e-3f, 4.166822507977486e-2f,
                                     1.6666419804096222e-1f, 4.9999991059303284e-1f, 1.0f, 1.0f};
    const Vec magic = set1(12582912.0f);
    Vec n[count], p[count];
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) x[i] = min(set1(89.0f), max(set1(-104.0f), x[i]));
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) n[i] = sub(add(mul(x[i], set1(1.44269504f)), magic), magic);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) x[i] = fma(n[i], set1(-0.693359375f), x[i]);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) x[i] = fma(n[i], set1(2.12194440e-4f), x[i]);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) p[i] = set1(1.3836831785738468e-3f);
#pragma GCC unroll 6
    for (float coefficient : kPolynomial) {
#pragma GCC unroll 4
        for (int i = 0; i < count; ++i) p[i] = fma(p[i], x[i], set1(coefficient));
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) x[i] = scale_by_power(p[i], n[i]);
}

QUIRE_VEC Vec exp(Vec x) {
    exp_each<1>(&x);
    return x;
}

// (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x: within about 1e-7 of tanh.
QUIRE_VEC Vec tanh(Vec x) {
    const Vec e = exp(mul(abs(x), set1(-2.0f)));
    return copy_sign(div(sub(set1(1.0f), e), add(set1(1.0f), e)), x);
}

// 2^x within about 1 unit in the last place, by the same means.
QUIRE_VEC Vec exp2(Vec x) {
    x = min(set1(129.0f), max(set1(-151.0f), x));
    const Vec magic = set1(12582912.0f);
    const Vec n = sub(add(x, magic), magic);
    const Vec f = sub(x, n);
    Vec p = set1(1.5345784777309746e-4f);
    p = fma(p, f, set1(1.3399957679212093e-3f));
    p = fma(p, f, set1(9.618489071726799e-3f));
    p = fma(p, f, set1(5.550328642129898e-2f));
    p = fma(p, f, set1(2.4022646248340607e-1f));
    p = fma(p, f, set1(6.931471824645996e-1f));
    p = fma(p, f, set1(1.0f));
    return scale_by_power(p, n);
}

}  // namespace quire::QUIRE_ISA_NS
