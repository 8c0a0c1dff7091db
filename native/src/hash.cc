// SipHash-2-4 with 128 bits of output; chained digests of token blocks; digests of contents. Words
// are read as little-endian on every machine, so the reference in quire/cache/plain_digest.py gives
// the same digests everywhere.

#include "quire/hash.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// A value that was read stays what it is: the compiler may not read it again.
#define QUIRE_READ_ONCE(kind, value) __asm__("" : "+" kind(value))

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

constexpr uint8_t kContentKey[16] = {'q', 'u', 'i', 'r', 'e', ' ', 'c', 'o',
                                     'n', 't', 'e', 'n', 't', '-', '-', '1'};
constexpr int kSums = 8;            // words of a stripe
constexpr int kStripesABlock = 16;  // sums are scrambled afterwards
constexpr uint64_t kScramble = 0x9e3779b1;

// The accumulation of XXH3 (Collet): a word is added to its neighbour's sum unchanged, and the
// product of its halves, mixed with a key of its position, to its own.
class Stripes {
  public:
    Stripes() {
        uint64_t word = 0;
        for (uint64_t& key : keys_) {  // SplitMix64 from 0
            uint64_t z = word += 0x9e3779b97f4a7c15ull;
            z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
            z = (z ^ z >> 27) * 0x94d049bb133111ebull;
            key = z ^ z >> 31;
        }
        for (int i = 0; i < kSums; ++i) sums_[i] = keys_[i];
    }

    // `bytes` are num_stripes * 64. kCopies: what is absorbed is also written to `out`.
    template <bool kCopies>
    void absorb(const uint8_t* bytes, int64_t num_stripes, uint8_t* out) {
        while (num_stripes > 0) {
            const int64_t room = kStripesABlock - place_;
            const int64_t count = num_stripes < room ? num_stripes : room;
            accumulate<kCopies>(bytes, count, keys_ + place_, out);
            bytes += count * 8 * kSums;
            if (kCopies) out += count * 8 * kSums;
            num_stripes -= count;
            place_ += count;
            if (place_ == kStripesABlock) {
                place_ = 0;
                for (int i = 0; i < kSums; ++i) {
                    const uint64_t sum = sums_[i];
                    sums_[i] = (sum ^ sum >> 47 ^ keys_[kStripesABlock + i]) * kScramble;
                }
            }
        }
    }

    Digest finish(int64_t size) const {
        State state(kContentKey);
        state.absorb(static_cast<uint64_t>(size));
        for (const uint64_t sum : sums_) state.absorb(sum);
        state.absorb(last_word(nullptr, 0, 8 + sizeof sums_));
        return state.finish();
    }

  private:
    // Other processes may write `bytes` meanwhile: each word is read once, summed and written.
    template <bool kCopies>
    void accumulate(const uint8_t* bytes, int64_t count, const uint64_t* keys, uint8_t* out) {
#if defined(__SSE2__)
        __m128i sums[kSums / 2];
        std::memcpy(sums, sums_, sizeof sums);
        for (int64_t stripe = 0; stripe < count; ++stripe, bytes += 8 * kSums) {
            for (int i = 0; i < kSums / 2; ++i) {
                __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i));
                if (kCopies) {
                    QUIRE_READ_ONCE("x", words);
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), words);
                }
                const __m128i key = _mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(keys + stripe + 2 * i));
                const __m128i mixed = _mm_xor_si128(words, key);
                const __m128i product = _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32));
                const __m128i swapped = _mm_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
                sums[i] = _mm_add_epi64(sums[i], _mm_add_epi64(product, swapped));
            }
            if (kCopies) out += 8 * kSums;
        }
        std::memcpy(sums_, sums, sizeof sums);
#else
        for (int64_t stripe = 0; stripe < count; ++stripe, bytes += 8 * kSums) {
            for (int i = 0; i < kSums; ++i) {
                uint64_t stored;
                std::memcpy(&stored, bytes + 8 * i, sizeof stored);
                if (kCopies) {
                    QUIRE_READ_ONCE("r", stored);
                    std::memcpy(out + 8 * i, &stored, sizeof stored);
                }
                const uint64_t word = read_word(reinterpret_cast<const uint8_t*>(&stored));
                const uint64_t mixed = word ^ keys[stripe + i];
                sums_[i ^ 1] += word;
                sums_[i] += (mixed & 0xffffffffu) * (mixed >> 32);
            }
            if (kCopies) out += 8 * kSums;
        }
#endif
    }

    int64_t place_ = 0;  // of the next stripe in its block
    uint64_t keys_[kStripesABlock + kSums], sums_[kSums];
};

// kCopies: `bytes` are also written to `out`.
template <bool kCopies>
Digest piece_digest(const uint8_t* bytes, int64_t size, uint8_t* out) {
    Stripes stripes;
    const int64_t whole = size / (8 * kSums);
    stripes.absorb<kCopies>(bytes, whole, out);
    uint8_t rest[8 * kSums] = {};
    const int64_t at = whole * 8 * kSums;
    if (at < size) {
        const size_t left = static_cast<size_t>(size - at);
        std::memcpy(rest, bytes + at, left);
        if (kCopies) {
            __asm__("" : "+m"(rest));
            std::memcpy(out + at, rest, left);
        }
        stripes.absorb<false>(rest, 1, nullptr);
    }
    return stripes.finish(size);
}

}  // namespace

Content::Content(const uint8_t* bytes, int64_t size, uint8_t* out)
    : bytes_(bytes), size_(size), out_(out),
      digests_(static_cast<size_t>((size + kPieceBytes - 1) / kPieceBytes)) {}

void Content::take(int64_t piece) {
    const int64_t first = piece * kPieceBytes, left = size_ - first;
    const int64_t size = left < kPieceBytes ? left : kPieceBytes;
    digests_[static_cast<size_t>(piece)] =
        out_ == nullptr ? piece_digest<false>(bytes_ + first, size, nullptr)
                        : piece_digest<true>(bytes_ + first, size, out_ + first);
}

Digest Content::digest() const {
    State state(kContentKey);
    state.absorb(static_cast<uint64_t>(size_));
    for (const Digest& digest : digests_) {
        state.absorb(digest.low);
        state.absorb(digest.high);
    }
    state.absorb(last_word(nullptr, 0, 8 + sizeof(Digest) * digests_.size()));
    return state.finish();
}

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
