// SipHash-2-4 with 128 bits of output; chained digests of token blocks.
// Knows no index and no block numbers. Words are read as little-endian on every machine, so the
// plain twin in quire/cache/digest.py gives the same digests everywhere.

#include "quire/hash.h"

#include <cstring>

namespace quire {
namespace {

inline uint64_t rotate(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

inline uint64_t read_word(const uint8_t* bytes) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

struct State {
    uint64_t v0, v1, v2, v3;

    explicit State(const uint8_t key[16]) {
        const uint64_t k0 = read_word(key);
        const uint64_t k1 = read_word(key + 8);
        v0 = k0 ^ 0x736f6d6570736575ull;
        v1 = k1 ^ 0x646f72616e646f6dull ^ 0xee;
        v2 = k0 ^ 0x6c7967656e657261ull;
        v3 = k1 ^ 0x7465646279746573ull;
    }

    void round() {
        v0 += v1;
        v1 = rotate(v1, 13) ^ v0;
        v0 = rotate(v0, 32);
        v2 += v3;
        v3 = rotate(v3, 16) ^ v2;
        v0 += v3;
        v3 = rotate(v3, 21) ^ v0;
        v2 += v1;
        v1 = rotate(v1, 17) ^ v2;
        v2 = rotate(v2, 32);
    }

    void absorb(uint64_t word) {
        v3 ^= word;
        round();
        round();
        v0 ^= word;
    }

    Digest finish() {
        v2 ^= 0xee;
        Digest digest;
        for (int i = 0; i < 4; ++i) round();
        digest.low = v0 ^ v1 ^ v2 ^ v3;
        v1 ^= 0xdd;
        for (int i = 0; i < 4; ++i) round();
        digest.high = v0 ^ v1 ^ v2 ^ v3;
        return digest;
    }
};

// The last word of a message: its remaining bytes, and its length modulo 256 on top.
uint64_t last_word(const uint8_t* rest, size_t num_rest, size_t size) {
    uint64_t word = static_cast<uint64_t>(size & 0xff) << 56;
    for (size_t i = 0; i < num_rest; ++i) word |= static_cast<uint64_t>(rest[i]) << (8 * i);
    return word;
}

inline uint64_t pair(int32_t low, int32_t high) {
    return static_cast<uint64_t>(static_cast<uint32_t>(low)) |
           static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32;
}

}  // namespace

Digest siphash128(const uint8_t* message, size_t size, const uint8_t key[16]) {
    State state(key);
    size_t at = 0;
    for (; at + 8 <= size; at += 8) state.absorb(read_word(message + at));
    state.absorb(last_word(message + at, size - at, size));
    return state.finish();
}

void hash_chain(const int32_t* tokens, int64_t num_blocks, int64_t block_size, Digest seed,
                const uint8_t key[16], Digest* out) {
    const uint64_t length = static_cast<uint64_t>((16 + 4 * block_size) & 0xff) << 56;
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int32_t* part = tokens + block * block_size;
        State state(key);
        state.absorb(seed.low);
        state.absorb(seed.high);
        int64_t at = 0;
        for (; at + 2 <= block_size; at += 2) state.absorb(pair(part[at], part[at + 1]));
        state.absorb(at < block_size ? pair(part[at], 0) | length : length);
        seed = state.finish();
        out[block] = seed;
    }
}

}  // namespace quire
