// SipHash-2-4 with 128 bits of output, and digests of chains of token blocks.
// Knows nothing of an index or of block numbers. A digest is the same on every machine, whatever
// its byte order, and depends on all tokens from the start of the chain on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

struct Digest {
    uint64_t low;
    uint64_t high;
};

// SipHash-2-4-128 of `size` bytes (Aumasson and Bernstein).
Digest siphash128(const uint8_t* message, size_t size, const uint8_t key[16]);

// Digests of a chain: out[i] = siphash128(out[i-1] followed by the i-th block of `block_size`
// tokens as little-endian int32), out[-1] being `seed`. Writes num_blocks digests.
void hash_chain(const int32_t* tokens, int64_t num_blocks, int64_t block_size, Digest seed,
                const uint8_t key[16], Digest* out);

}  // namespace quire
