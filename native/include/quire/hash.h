// SipHash-2-4 with 128 bits of output, digests of chains of token blocks, and of large contents. A
// digest is the same on every machine, whatever its byte order, and depends on all tokens from the
// start of the chain on, or on every byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

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

// A large content, digested in pieces so that threads can share it: take() each once, in any order.
// The digest is SipHash over the length and the pieces' digests in order. A piece is read once, in
// stripes of eight words like XXH3, with SipHash at the end: at memory speed, and one changed word
// always changes a sum. Detects accidents and edits; no defence against forgery. Where there is an
// `out`, pieces are copied there while they are read; what is digested is what was copied, even if
// another process writes `bytes` meanwhile.
class Content {
  public:
    static constexpr int64_t kPieceBytes = int64_t{1} << 20;

    Content(const uint8_t* bytes, int64_t size, uint8_t* out = nullptr);

    const uint8_t* bytes() const { return bytes_; }
    int64_t pieces() const { return static_cast<int64_t>(digests_.size()); }
    void take(int64_t piece);
    Digest digest() const;  // requires that all pieces have been taken

  private:
    const uint8_t* bytes_;
    int64_t size_;
    uint8_t* out_;
    std::vector<Digest> digests_;
};

}  // namespace quire
