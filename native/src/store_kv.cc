// store_kv: scatters keys and values into the paged cache. The layout (kernels.h) is the one
// attention.cc reads: keys with positions side by side, so that one vector holds the same
// columns of many positions; values with columns side by side; bf16 in pairs of what a step of
// either product takes. The column beside an odd last one is stored as zero, once per token.

#include "quire/kernels.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int64_t kTokens = 16;  // of a chunk: neighbours mostly share a block

void store_head(const float* k, const float* v, int64_t within, const CacheShape& shape,
                float* keys, float* values) {
    const int64_t dim = shape.head_dim;
    keys += within / kKeyGroup * kKeyGroup * dim + within % kKeyGroup;
    for (int64_t d = 0; d < dim; ++d) keys[d * kKeyGroup] = k[d];
    for (int64_t d = 0; d < dim; ++d) values[within * dim + d] = v[d];
}

void store_head(const bf16* k, const bf16* v, int64_t within, const CacheShape& shape, bf16* keys,
                bf16* values) {
    const int64_t dim = shape.head_dim;
    keys += within / kKeyGroup * kKeyGroup * round_up(dim, 2) + within % kKeyGroup * 2;
    int64_t d = 0;
    for (; d + 2 <= dim; d += 2) __builtin_memcpy(keys + d * kKeyGroup, k + d, 4);
    if (d < dim) {
        keys[d * kKeyGroup] = k[d];
        keys[d * kKeyGroup + 1] = bf16{0};
    }
    bf16* out = values + within / 2 * 2 * dim + within % 2;
    for (d = 0; d < dim; ++d) out[2 * d] = v[d];
}

template <class T>
void store_token(const StoreKvArgs& args, int64_t token, int64_t slot) {
    const CacheShape& shape = args.shape;
    const int64_t part = kv_part_bytes(shape);
    char* at = static_cast<char*>(args.cache) + slot / shape.block_size * kv_block_bytes(shape);
    const T* k = static_cast<const T*>(args.k.at(token));
    const T* v = static_cast<const T*>(args.v.at(token));
    for (int64_t head = 0; head < shape.kv_heads; ++head, at += 2 * part) {
        store_head(k + head * shape.head_dim, v + head * shape.head_dim, slot % shape.block_size,
                   shape, reinterpret_cast<T*>(at), reinterpret_cast<T*>(at + part));
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
