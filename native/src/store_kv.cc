// store_kv: scatters keys and values into the paged cache. The layout (kernels.h) is the one
// attention.cc reads: keys with positions side by side, so that one vector holds the same columns
// of many positions; values with columns side by side; bf16 in pairs as one step of either product
// reads them. The partner of an odd last column is stored as zero, once per token. Integers have
// the same positions, a byte each. A token's key is four bytes of each of many lines: neighbours in
// one group write theirs together, whole lines at a time, if vectors are as long as a line. For a
// single token, since its lines mostly come from memory, those of the following heads are
// prefetched while one is stored.

#include "quire/kernels.h"
#include "quire/kv_ints.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kTokens = 16;  // of a chunk: neighbours mostly share a block

// One column beside another.
template <class E>
void store_singles(const E* k, const E* v, int64_t within, int64_t group, int64_t dim, E* keys,
                   E* values) {
    keys += within / group * group * dim + within % group;
    for (int64_t d = 0; d < dim; ++d) keys[d * group] = k[d];
    for (int64_t d = 0; d < dim; ++d) values[within * dim + d] = v[d];
}

// Every second element.
template <class E>
void store_value(const E* v, int64_t dim, E* out) {
    int64_t d = 0;
#if defined(QUIRE_ZMM)
    if constexpr (sizeof(E) == 2) {
        for (; d + kLanes <= dim; d += kLanes) {
            const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + d));
            _mm512_mask_storeu_epi16(out + 2 * d, 0x55555555, _mm512_cvtepu16_epi32(some));
        }
    }
#endif
    for (; d < dim; ++d) out[2 * d] = v[d];
}

// Keys in pairs of columns, values in pairs of positions.
template <class E>
void store_pairs(const E* k, const E* v, int64_t within, int64_t group, int64_t dim, E* keys,
                 E* values) {
    keys += within / group * group * round_up(dim, 2) + within % group * 2;
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2) __builtin_memcpy(keys + d * group, k + d, 2 * sizeof(E));
    if (d < dim) {
        keys[d * group] = k[d];
        keys[d * group + 1] = E{};
    }
    store_value(v, dim, values + within / 2 * 2 * dim + within % 2);
}

template <class T, class E>
void store_head(const E* k, const E* v, int64_t within, const CacheShape& shape, char* keys,
                char* values) {
    const auto scatter = sizeof(T) == 4 ? store_singles<E> : store_pairs<E>;
    scatter(k, v, within, shape.key_group(), shape.head_dim, reinterpret_cast<E*>(keys),
            reinterpret_cast<E*>(values));
}

template <class T>
void store_ints(const T* k, const T* v, int64_t within, const CacheShape& shape, char* keys,
                char* values) {
    int8_t k_ints[kMaxHeadDim], v_ints[kMaxHeadDim];
    const float k_scale = quantize_head(k, shape.head_dim, k_ints);
    const float v_scale = quantize_head(v, shape.head_dim, v_ints);
    const int64_t scales = kv_element_bytes(shape);
    store_head<T>(k_ints, v_ints, within, shape, keys, values);
    reinterpret_cast<float*>(keys + scales)[within] = k_scale;
    reinterpret_cast<float*>(values + scales)[within] = v_scale;
}

#if defined(__x86_64__)
// Prefetches for writing: a line that others have read is fetched again otherwise.
QUIRE_VEC void fetch_for_writing(const char* line) {
    __asm__ volatile("prefetchw %0" : : "m"(*line));
}
#else
QUIRE_VEC void fetch_for_writing(const char* line) { __builtin_prefetch(line, 1, 3); }
#endif

// The lines that hold a head's key and value of one position; `at`: the offset of its parts.
QUIRE_VEC void fetch_head(const CacheShape& shape, const char* at, int64_t within) {
    const int64_t bytes = kv_element_bytes(shape), of_position = bytes / shape.block_size;
    const int64_t group = shape.key_group();
    const char* keys = at + within / group * group * of_position;
    const char* values = at + kv_part_bytes(shape) + within / 2 * 2 * of_position;
    for (int64_t i = 0; i < group * of_position; i += 64) fetch_for_writing(keys + i);
    for (int64_t i = 0; i < 2 * of_position; i += 64) fetch_for_writing(values + i);
}

constexpr int64_t kHeadsAhead = 1;

template <class T>
void store_token(const StoreKvArgs& args, int64_t token, int64_t slot) {
    const CacheShape& shape = args.shape;
    const int64_t part = kv_part_bytes(shape);
    char* at = static_cast<char*>(args.cache) + slot / shape.block_size * kv_block_bytes(shape);
    const T* k = static_cast<const T*>(args.k.at(token));
    const T* v = static_cast<const T*>(args.v.at(token));
    const int64_t within = slot % shape.block_size;
    for (int64_t head = 0; head < shape.kv_heads; ++head, at += 2 * part) {
        const int64_t c = head * shape.head_dim;
        if (head + kHeadsAhead < shape.kv_heads) {
            fetch_head(shape, at + kHeadsAhead * 2 * part, within);
        }
        if (shape.ints) {
            store_ints(k + c, v + c, within, shape, at, at + part);
        } else {
            store_head<T>(k + c, v + c, within, shape, at, at + part);
        }
    }
}

#if defined(QUIRE_ZMM)

constexpr int kFewestTogether = 4;

// Words [16][16]: rows become columns.
QUIRE_VEC void transpose(__m512i* r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        const __m512i more_even = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        const __m512i more_odd = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        t[j] = _mm512_shuffle_i32x4(even, more_even, 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
        t[12 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Keys of `count` tokens, `lane` and on of a group; an even dim.
void store_keys(const bf16* k, int64_t stride, int count, int64_t lane, int64_t dim, bf16* group) {
    const __mmask16 lanes = static_cast<__mmask16>(((1u << count) - 1) << lane);
    for (int64_t pair = 0; 2 * pair < dim; pair += 16) {
        const int64_t left = dim / 2 - pair < 16 ? dim / 2 - pair : 16;
        const auto some = static_cast<__mmask16>((1u << left) - 1);
        __m512i words[16];
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) {
            const bool is_there = i >= lane && i < lane + count;
            words[i] = is_there
                           ? _mm512_maskz_loadu_epi32(some, k + (i - lane) * stride + 2 * pair)
                           : _mm512_setzero_si512();
        }
        transpose(words);
        for (int64_t i = 0; i < left; ++i) {
            _mm512_mask_storeu_epi32(group + (pair + i) * 2 * kKeyGroup, lanes, words[i]);
        }
    }
}

// Values of two positions side by side, the first of them even.
void store_value_pair(const bf16* one, const bf16* other, int64_t dim, bf16* to) {
    for (int64_t d = 0; d < dim; d += 16) {
        const int64_t left = dim - d < 16 ? dim - d : 16;
        const auto some = static_cast<__mmask16>((1u << left) - 1);
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, one + d));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, other + d));
        _mm512_mask_storeu_epi32(to + 2 * d, some,
                                 _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

// `count` tokens with consecutive slots within a group of keys.
void store_together(const StoreKvArgs& args, int64_t token, int64_t slot, int count) {
    const CacheShape& shape = args.shape;
    const int64_t dim = shape.head_dim, part = kv_part_bytes(shape);
    const int64_t within = slot % shape.block_size, lane = within % kKeyGroup;
    char* at = static_cast<char*>(args.cache) + slot / shape.block_size * kv_block_bytes(shape);
    const bf16* k = static_cast<const bf16*>(args.k.at(token));
    const bf16* v = static_cast<const bf16*>(args.v.at(token));
    for (int64_t head = 0; head < shape.kv_heads; ++head, at += 2 * part, k += dim, v += dim) {
        store_keys(k, args.k.stride, count, lane, dim,
                   reinterpret_cast<bf16*>(at) + (within - lane) * dim);
        bf16* values = reinterpret_cast<bf16*>(at + part);
        for (int64_t i = 0; i < count;) {
            const bf16* row = v + i * args.v.stride;
            bf16* to = values + (within + i) / 2 * 2 * dim;
            if ((within + i) % 2 == 0 && i + 1 < count) {
                store_value_pair(row, row + args.v.stride, dim, to);
                i += 2;
                continue;
            }
            for (int64_t d = 0; d < dim; ++d) to[2 * d + (within + i) % 2] = row[d];
            ++i;
        }
    }
}

// How many tokens from `token` (at `slot`) on may be stored together.
int run_of(const StoreKvArgs& args, int64_t token, int64_t slot, int64_t end) {
    int64_t most = kKeyGroup - slot % kKeyGroup;
    if (end - token < most) most = end - token;
    int count = 1;
    while (count < most && args.kv_slots[token + count] == slot + count) ++count;
    return count;
}

#endif

}  // namespace

void store_kv(const StoreKvArgs& args) {
    args.pool->deal(args.num_tokens, kTokens, [&](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t slot = args.kv_slots[token];
            if (slot < 0) continue;
#if defined(QUIRE_ZMM)
            if (args.shape.type == Type::bf16 && !args.shape.ints &&
                args.shape.head_dim % 2 == 0 && args.shape.key_group() == kKeyGroup) {
                const int count = run_of(args, token, slot, end);
                if (count >= kFewestTogether) {
                    store_together(args, token, slot, count);
                    token += count - 1;
                    continue;
                }
            }
#endif
            if (args.shape.type == Type::f32) {
                store_token<float>(args, token, slot);
            } else {
                store_token<bf16>(args, token, slot);
            }
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
