// Vectors of 32-bit integers in addition to those of f32 in vec.h, and products of four bytes a
// lane.
//
// dot_quads adds, in each lane, four unsigned bytes of a weight times four signed ones of a row:
// exact on every instruction set, so its results are the same on all. The layout of rows in memory
// depends on it (RowElement, place_in_quad). Only for files compiled once per instruction set; no
// library code, for the reasons in vec.h.
#pragma once

#include "quire/int_layout.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

typedef int32_t IntLanes __attribute__((vector_size(kLanes * 4), may_alias));
typedef float FloatLanes __attribute__((vector_size(kLanes * 4), may_alias));
struct Ints { IntLanes v; };

QUIRE_VEC Ints set1_int(int32_t x) { return {IntLanes{} + x}; }
QUIRE_VEC Ints bits_of(Vec a) { return {(IntLanes)a.v}; }
QUIRE_VEC Vec of_bits(Ints a) { return {(decltype(Vec::v))a.v}; }
QUIRE_VEC Vec to_float(Ints a) {
    return {(decltype(Vec::v))__builtin_convertvector(a.v, FloatLanes)};
}
QUIRE_VEC Ints max(Ints a, Ints b) { return {a.v > b.v ? a.v : b.v}; }
QUIRE_VEC Ints add(Ints a, Ints b) { return {a.v + b.v}; }
QUIRE_VEC Ints mul(Ints a, Ints b) { return {a.v * b.v}; }
QUIRE_VEC void store_ints(void* p, Ints a) { __builtin_memcpy(p, &a.v, kLanes * 4); }

// The nearest whole number, ties to even, of |a| < 2^22; as a float and as an integer.
QUIRE_VEC Vec round_near(Vec a) {
    const Vec magic = set1(12582912.0f);
    return sub(add(a, magic), magic);
}
QUIRE_VEC Ints round_ints(Vec a) {
    return {bits_of(add(a, set1(12582912.0f))).v - 0x4b400000};
}

QUIRE_VEC int32_t max_lanes(Ints a) {
#if defined(QUIRE_ZMM)
    return _mm512_reduce_max_epi32((__m512i)a.v);
#else
    int32_t most = a.v[0];
    for (int i = 1; i < kLanes; ++i) most = a.v[i] > most ? a.v[i] : most;
    return most;
#endif
}
QUIRE_VEC int32_t sum_lanes(Ints a) {
#if defined(QUIRE_ZMM)
    return _mm512_reduce_add_epi32((__m512i)a.v);
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += a.v[i];
    return sum;
#endif
}

// How values with a largest magnitude of these bits become integers: value * inverse, rounded, with
// scale = largest / 127. Below 2^-100 all count as zeros with the scale 0; if one is infinite or
// NaN the scale is NaN. (quire/quant/int_rows.py is the reference.)
struct IntScale {
    float scale = 0.0f, inverse = 0.0f;
    bool finite;
};
QUIRE_VEC IntScale int_scale(int32_t magnitude_bits) {
    IntScale made;
    float largest;
    __builtin_memcpy(&largest, &magnitude_bits, 4);
    made.finite = magnitude_bits < 0x7f800000;
    if (!made.finite) {
        made.scale = __builtin_nanf("");
    } else if (largest >= 0x1p-100f) {
        made.scale = largest / 127.0f;
        made.inverse = 127.0f / largest;
    }
    return made;
}

// Zero points of kLanes lanes, a byte each.
QUIRE_VEC Ints load_bytes(const uint8_t* p) {
    Ints a;
    for (int i = 0; i < kLanes; ++i) a.v[i] = p[i];
    return a;
}

// ---- products of quads: four of K of a row by four of K of kLanes lanes of a weight

#if defined(QUIRE_ZMM) || defined(QUIRE_YMM)

#if defined(QUIRE_ZMM)
typedef __m512i Bytes;
QUIRE_VEC Bytes load_words(const void* p) { return _mm512_loadu_si512(p); }
QUIRE_VEC Bytes set1_words(int32_t bits) { return _mm512_set1_epi32(bits); }
QUIRE_VEC Bytes and_words(Bytes a, int32_t bits) {
    return _mm512_and_si512(a, _mm512_set1_epi32(bits));
}
QUIRE_VEC Bytes shift_words(Bytes a, unsigned n) { return _mm512_srli_epi16(a, n); }
#else
typedef __m256i Bytes;
QUIRE_VEC Bytes load_words(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
QUIRE_VEC Bytes set1_words(int32_t bits) { return _mm256_set1_epi32(bits); }
QUIRE_VEC Bytes and_words(Bytes a, int32_t bits) {
    return _mm256_and_si256(a, _mm256_set1_epi32(bits));
}
QUIRE_VEC Bytes shift_words(Bytes a, unsigned n) {
    return _mm256_srli_epi16(a, static_cast<int>(n));
}
#endif
using PackedQuad = Bytes;
QUIRE_VEC PackedQuad load_packed(const char* p) { return load_words(p); }

#endif

#if defined(QUIRE_HAS_VNNI)

using RowElement = int8_t;
constexpr int place_in_quad(int i) { return i; }
struct RowQuad { Bytes v; };
struct WeightQuad { Bytes v; };

QUIRE_VEC RowQuad set1_quad(const RowElement* p) {
    int32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return {set1_words(bits)};
}
QUIRE_VEC WeightQuad whole_quad(PackedQuad w) { return {w}; }
QUIRE_VEC WeightQuad low_quad(PackedQuad w) { return {and_words(w, 0x0f0f0f0f)}; }
QUIRE_VEC WeightQuad high_quad(PackedQuad w) {
    return {and_words(shift_words(w, 4), 0x0f0f0f0f)};
}
// In assembly: GCC 12 keeps such sums in registers only if it cannot see through the product.
QUIRE_VEC Ints dot_quads(Ints sum, WeightQuad w, RowQuad x) {
#if defined(QUIRE_ZMM)
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
#else  // AVX-VNNI has its own encoding
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.v) : "x"(w.v), "x"(x.v));
#endif
    return sum;
}

#elif defined(QUIRE_ZMM) || defined(QUIRE_YMM)

// Rows as words, the even two of a quad before the odd two, as the weight's are masked out.
using RowElement = int16_t;
constexpr int place_in_quad(int i) { return i % 2 * 2 + i / 2; }
struct RowQuad { Bytes even, odd; };
struct WeightQuad { Bytes even, odd; };

// sum + pairs of products, in assembly for the same reason as above.
QUIRE_VEC Ints dot_words(Ints sum, Bytes a, Bytes b) {
    Bytes products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
            : "+v"(sum.v), "=&v"(products)
            : "v"(a), "v"(b));
    return sum;
}
QUIRE_VEC WeightQuad split_words(Bytes w) {
    return {and_words(w, 0x00ff00ff), shift_words(w, 8)};
}

QUIRE_VEC RowQuad set1_quad(const RowElement* p) {
    int32_t bits[2];
    __builtin_memcpy(bits, p, 8);
    return {set1_words(bits[0]), set1_words(bits[1])};
}
QUIRE_VEC WeightQuad whole_quad(PackedQuad w) { return split_words(w); }
QUIRE_VEC WeightQuad low_quad(PackedQuad w) { return split_words(and_words(w, 0x0f0f0f0f)); }
QUIRE_VEC WeightQuad high_quad(PackedQuad w) {
    return split_words(and_words(shift_words(w, 4), 0x0f0f0f0f));
}
// A product of a byte and a row's is below 2^15; two of them never overflow.
QUIRE_VEC Ints dot_quads(Ints sum, WeightQuad w, RowQuad x) {
    return dot_words(dot_words(sum, w.even, x.even), w.odd, x.odd);
}

#else

using RowElement = int16_t;
constexpr int place_in_quad(int i) { return i; }
struct RowQuad { int32_t v[4]; };
struct WeightQuad { Words4 v; };

QUIRE_VEC RowQuad set1_quad(const RowElement* p) { return {{p[0], p[1], p[2], p[3]}}; }
using PackedQuad = Words4;
QUIRE_VEC PackedQuad load_packed(const char* p) {
    PackedQuad w;
    __builtin_memcpy(&w, p, 16);
    return w;
}
QUIRE_VEC WeightQuad whole_quad(PackedQuad w) { return {w}; }
QUIRE_VEC WeightQuad low_quad(PackedQuad w) { return {w & 0x0f0f0f0fu}; }
QUIRE_VEC WeightQuad high_quad(PackedQuad w) { return {(w >> 4) & 0x0f0f0f0fu}; }
QUIRE_VEC Ints dot_quads(Ints sum, WeightQuad w, RowQuad x) {
    for (int i = 0; i < 4; ++i) sum.v += (IntLanes)((w.v >> (8 * i)) & 0xffu) * x.v[i];
    return sum;
}

#endif

}  // namespace quire::QUIRE_ISA_NS
