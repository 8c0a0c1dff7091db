// store_kv: scatters keys and values into the paged cache. The layout (kernels.h) is the one
// attention.cc reads: keys with positions side by side, so that one vector holds the same
// columns of many positions; values with columns side by side; bf16 in pairs of what a step of
// either product takes. The column beside an odd last one is stored as zero, once per token.
// Integers lie as what they stand for would, a byte each.

#include "quire/kernels.h"
#include "quire/kv_ints.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kTokens = 16;  // of a chunk: neighbours mostly share a block

// One column beside another.
template <class E>
void store_singles(const E* k, const E* v, int64_t within, int64_t dim, E* keys, E* values) {
    keys += within / kKeyGroup * kKeyGroup * dim + within % kKeyGroup;
    for (int64_t d = 0; d < dim; ++d) keys[d * kKeyGroup] = k[d];
    for (int64_t d = 0; d < dim; ++d) values[within * dim + d] = v[d];
}

// Keys in pairs of columns, values in pairs of positions.
template <class E>
void store_pairs(const E* k, const E* v, int64_t within, int64_t dim, E* keys, E* values) {
    keys += within / kKeyGroup * kKeyGroup * round_up(dim, 2) + within % kKeyGroup * 2;
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2) __builtin_memcpy(keys + d * kKeyGroup, k + d, 2 * sizeof(E));
    if (d < dim) {
        keys[d * kKeyGroup] = k[d];
        keys[d * kKeyGroup + 1] = E{};
    }
    E* out = values + within / 2 * 2 * dim + within % 2;
    for (d = 0; d < dim; ++d) out[2 * d] = v[d];
}

template <class T, class E>
void store_head(const E* k, const E* v, int64_t within, int64_t dim, char* keys, char* values) {
    const auto scatter = sizeof(T) == 4 ? store_singles<E> : store_pairs<E>;
    scatter(k, v, within, dim, reinterpret_cast<E*>(keys), reinterpret_cast<E*>(values));
}

template <class T>
void store_ints(const T* k, const T* v, int64_t within, const CacheShape& shape, char* keys,
                char* values) {
    int8_t k_ints[kMaxHeadDim], v_ints[kMaxHeadDim];
    const float k_scale = quantize_head(k, shape.head_dim, k_ints);
    const float v_scale = quantize_head(v, shape.head_dim, v_ints);
    const int64_t scales = kv_element_bytes(shape);
    store_head<T>(k_ints, v_ints, within, shape.head_dim, keys, values);
    reinterpret_cast<float*>(keys + scales)[within] = k_scale;
    reinterpret_cast<float*>(values + scales)[within] = v_scale;
}

template <class T>
void store_token(const StoreKvArgs& args, int64_t token, int64_t slot) {
    const CacheShape& shape = args.shape;
    const int64_t part = kv_part_bytes(shape);
    char* at = static_cast<char*>(args.cache) + slot / shape.block_size * kv_block_bytes(shape);
    const T* k = static_cast<const T*>(args.k.at(token));
    const T* v = static_cast<const T*>(args.v.at(token));
    for (int64_t head = 0; head < shape.kv_heads; ++head, at += 2 * part) {
        const int64_t c = head * shape.head_dim, within = slot % shape.block_size;
        if (shape.ints) {
            store_ints(k + c, v + c, within, shape, at, at + part);
        } else {
            store_head<T>(k + c, v + c, within, shape.head_dim, at, at + part);
        }
    }
}

}  // namespace

void store_kv(const StoreKvArgs& args) {
    args.pool->deal(args.num_tokens, kTokens, [&](int64_t begin, int64_t end, int) {
        for (int64_t token = begin; token < end; ++token) {
            const int64_t slot = args.kv_slots[token];
            if (slot < 0) continue;
            if (args.shape.type == Type::f32) {
                store_token<float>(args, token, slot);
            } else {
                store_token<bf16>(args, token, slot);
            }
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
