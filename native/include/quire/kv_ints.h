// Keys and values as int8: a row of one head (of K or of V) is its integers times its scale.
//
// scale = absmax / 127, integers rint(x * (127 / absmax)), as rows of activations are quantized
// (see int_rows.h for tiny, infinite and NaN values). Integers up to 127 are exact in bf16 and in
// f32, so products use them directly and the scale is applied separately (attention.cc). The bytes
// of a row depend on that row only.
#pragma once

#include "quire/int_vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// Quantizes x[0 .. n), zero-padded to a whole vector; returns the scale.
template <class T>
QUIRE_VEC float quantize_head(const T* x, int64_t n, int8_t* to) {
    Ints most = set1_int(0);
    int64_t c = 0;
    for (; c + kLanes <= n; c += kLanes) {
        most = max(most, Ints{bits_of(load(x + c)).v & 0x7fffffff});
    }
    if (c < n) {
        const Vec last = load_n(x + c, static_cast<int>(n - c));
        most = max(most, Ints{bits_of(last).v & 0x7fffffff});
    }
    // The bit patterns of magnitudes are ordered like them, infinity and NaN above all.
    const IntScale made = int_scale(max_lanes(most));
    for (c = 0; c < n; c += kLanes) {
        const Vec values = c + kLanes <= n ? load(x + c) : load_n(x + c, static_cast<int>(n - c));
        const Ints q = made.finite ? round_ints(mul(values, set1(made.inverse))) : set1_int(0);
#if defined(QUIRE_ZMM)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + c), _mm512_cvtepi32_epi8((__m512i)q.v));
#else
        for (int i = 0; i < kLanes; ++i) to[c + i] = static_cast<int8_t>(q.v[i]);
#endif
    }
    return made.scale;
}

QUIRE_VEC Vec load_ints(const int8_t* p) {
#if defined(QUIRE_ZMM)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#elif defined(QUIRE_YMM)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
#else
    Vec a = zero();
    for (int i = 0; i < kLanes; ++i) a.v[i] = static_cast<float>(p[i]);
    return a;
#endif
}

// to[i] = from[i] for i in 0 .. n, a multiple of 16.
QUIRE_VEC void expand(const int8_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) store(to + i, load_ints(from + i));
}
QUIRE_VEC void expand(const int8_t* from, bf16* to, int64_t n) {
    int64_t i = 0;
#if defined(QUIRE_HAS_BF16_DOT)
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const __m512bh both = _mm512_cvtne2ps_pbh(load_ints(from + i + kLanes).v,
                                                  load_ints(from + i).v);
        _mm512_storeu_si512(to + i, (__m512i)both);
    }
#endif
    for (; i < n; i += kLanes) store(to + i, load_ints(from + i));
}

}  // namespace

}  // namespace quire::QUIRE_ISA_NS
