// Attention's products for few query rows of one head, by vector instructions that compute what the
// matrix unit does (recipe: amx_tiles.h), step by step and bit for bit.
//
// Few rows are memory-bound, and each block of a sequence is a page or less. Reading one page after
// the other waits at the beginning of each, so four are read at once, and lines are prefetched far
// enough ahead that products never wait. Values need no copy if a step's positions lie in two
// blocks.
//
// Denormals are flushed to zero during the products. Only for files compiled once per instruction
// set, with AMX.
#pragma once

#include "quire/amx_tiles.h"
#include "quire/attention_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kFewRows = 4;  // rows with sums and steps that fit into registers

// Flushes denormals to zero from here on, like the matrix unit. Returns the previous mode. (No
// object with a destructor: unwinding it is library code.)
QUIRE_VEC unsigned flush_denormals() {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    memory_barrier();
    return mode;
}
QUIRE_VEC void restore_mode(unsigned mode) {
    memory_barrier();
    _mm_setcsr(mode);
}

// Elements of the cache in 16 pairs: their bytes, and the even and odd ones as f32.
template <bool ints>
constexpr int kPairsBytes = ints ? 32 : 64;

template <bool ints>
QUIRE_VEC void load_split(const char* p, Vec* even, Vec* odd) {
    if constexpr (ints) {
        // With its sign bit flipped, a byte is the integer + 128. Inserted into the mantissa of
        // 2^23, or of 2^15, it makes that power + 128 + the integer: exact, like the difference to
        // the first two. The table selects: bits of the byte, flipped where the second constant has
        // a one, and bits of that constant elsewhere.
        const __m512i words = _mm512_cvtepu16_epi32(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        const __m512i low = _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0x00ff),
                                                      _mm512_set1_epi32(0x4b000080), 0x6a);
        const __m512i high = _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(0xff00),
                                                       _mm512_set1_epi32(0x47008000), 0x6a);
        *even = sub({_mm512_castsi512_ps(low)}, set1(8388608.0f + 128.0f));
        *odd = sub({_mm512_castsi512_ps(high)}, set1(32768.0f + 128.0f));
    } else {
        const __m512i both = _mm512_loadu_si512(p);
        *even = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
        *odd = {_mm512_castsi512_ps(
            _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
    }
}

// Groups read together: the same 16 or (for integers) 8 lines of four groups, as four streams: a
// single stream restarts at every page and waits. Lines come in eighths, `stride` bytes apart.
constexpr int kStreams = 4;
constexpr int kFewPositions = kStreams * kGroup;
struct FewLines {
    const char* at[kStreams];
    int64_t stride;
};

// Prefetches a line, separated from other prefetches: GCC would combine them into one burst, behind
// which loads wait.
QUIRE_VEC void fetch_line(const char* p) {
    prefetch_l1(p);
    memory_barrier();
}

// out[i][16 j ..] += q[i] . k for a step of 32 columns of four groups of 16 positions. q: rows
// q_stride apart, in f32; out: kPiece apart.
template <int rows, bool ints>
__attribute__((noinline)) void few_scores(const float* q, int64_t q_stride, const FewLines& keys,
                                          const FewLines& ahead, float* out) {
    constexpr int kBytes = kPairsBytes<ints>;
    Vec even[rows][kStreams], odd[rows][kStreams];
#pragma GCC unroll 2
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kStreams; ++j) even[i][j] = odd[i][j] = zero();
    }
    // Pointers are kept in registers: after a prefetch the compiler would reload them.
    const char* const at[kStreams] = {keys.at[0], keys.at[1], keys.at[2], keys.at[3]};
    const char* const next[kStreams] = {ahead.at[0], ahead.at[1], ahead.at[2], ahead.at[3]};
    const int64_t stride = ahead.stride;
    int64_t there = 0;  // in `next`
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < kTileRows; ++pair) {
        if (pair % 2 == 0 && pair > 0) there += stride;
        Vec x_even[rows], x_odd[rows];
#pragma GCC unroll 2
        for (int i = 0; i < rows; ++i) {
            x_even[i] = set1(q[i * q_stride + 2 * pair]);
            x_odd[i] = set1(q[i * q_stride + 2 * pair + 1]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < kStreams; ++j) {
            if (pair % 2 == 0) fetch_line(next[j] + there);
            if (pair % 2 == 1 && !ints) fetch_line(next[j] + there + 64);
            Vec k_even, k_odd;
            load_split<ints>(at[j] + pair * kBytes, &k_even, &k_odd);
#pragma GCC unroll 2
            for (int i = 0; i < rows; ++i) {
                even[i][j] = fma(x_even[i], k_even, even[i][j]);
                odd[i][j] = fma(x_odd[i], k_odd, odd[i][j]);
            }
        }
    }
#pragma GCC unroll 2
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kStreams; ++j) {
            float* to = out + i * kPiece + j * kGroup;
            store(to, add(load(to), add(even[i][j], odd[i][j])));
        }
    }
}

// sums[i][0 .. 32) += p[i] v for `steps` steps of 32 positions, one after the other: two groups
// each. p: rows kPiece apart, in f32.
template <int rows, int steps, bool ints>
__attribute__((noinline)) void few_values(const float* p, const FewLines& values,
                                          const FewLines& ahead, float* sums, int64_t stride) {
    constexpr int kBytes = kPairsBytes<ints>, kVecs = 2, kLines = kVecs * kBytes / 64;
    Vec even[steps][rows][kVecs], odd[steps][rows][kVecs];
#pragma GCC unroll 2
    for (int s = 0; s < steps; ++s) {
#pragma GCC unroll 2
        for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
            for (int j = 0; j < kVecs; ++j) even[s][i][j] = odd[s][i][j] = zero();
        }
    }
    const int64_t bytes = values.stride, stride_ahead = ahead.stride;
    for (int half = 0; half < 2; ++half) {
        const char* const at[2] = {values.at[half], values.at[2 + half]};
        const char* const next[2] = {ahead.at[half], ahead.at[2 + half]};
        int64_t here = 0, there = 0;
#pragma GCC unroll 4
        for (int pair = 0; pair < kGroup / 2; ++pair) {
#pragma GCC unroll 2
            for (int s = 0; s < 2; ++s) {
#pragma GCC unroll 2
                for (int j = 0; j < kVecs; ++j) {
                    if (j < kLines) fetch_line(next[s] + there + 64 * j);
                    if (s >= steps) continue;
                    Vec v_even, v_odd;
                    load_split<ints>(at[s] + here + j * kBytes, &v_even, &v_odd);
#pragma GCC unroll 2
                    for (int i = 0; i < rows; ++i) {
                        const float* weights = p + i * kPiece + s * kTileStep + 2 * pair;
                        even[s][i][j] = fma(set1(weights[0]), v_even, even[s][i][j]);
                        odd[s][i][j] = fma(set1(weights[1]), v_odd, odd[s][i][j]);
                    }
                }
            }
            here += bytes;
            there += stride_ahead;
        }
        p += kGroup;
    }
#pragma GCC unroll 2
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < kVecs; ++j) {
            Vec sum = load(sums + i * stride + j * kLanes);
#pragma GCC unroll 2
            for (int s = 0; s < steps; ++s) sum = add(sum, add(even[s][i][j], odd[s][i][j]));
            store(sums + i * stride + j * kLanes, sum);
        }
    }
}

// A piece as few rows read it: groups of 16 positions, and from them lines in reading order. Masked
// groups are null until lines are made of them.
template <bool ints>
class FewPiece {
  public:
    static constexpr int kGroups = kPiece / kGroup;

    const char* keys[kGroups];
    const char* values[kGroups];
    const char* key_scales[kGroups];  // these two for integers only
    const char* value_scales[kGroups];
    const char* after[kStreams];  // the groups of keys that are read next; null: unknown

    // Groups from .. to are visible; a head has `dim` columns, 32 n of them.
    FewPiece(int64_t dim) : dim_(dim) {}

    // Called after keys, values and `after` are set. Steps of values hold two groups or none. Four
    // groups are prefetched while the previous four are read.
    void lay_out(int from, int to) {
        from_ = from / kStreams * kStreams;
        to_ = to;
        num_reads_ = num_fetches_ = 0;
        for (int g = from_; g < to; g += kStreams) {
            fill(keys + g);
            for (int s = 0; s < steps(); ++s) reads_[num_reads_++] = as_it_lies(keys + g, s);
            if (g > from_) fetch_later(keys + g);
        }
        first_values_ = num_reads_;
        for (int g = from_; g < to; g += kStreams) {
            const char* four[kStreams];
            for (int j = 0; j < kStreams; ++j) four[j] = values[g + j];
            fill(four);
            for (int s = 0; s < steps(); ++s) {
                FewLines& read = reads_[num_reads_++];
                for (int j = 0; j < kStreams; ++j) {
                    read.at[j] = four[j] + s * 2 * kPairsBytes<ints>;
                }
                read.stride = dim_ / kLanes * kPairsBytes<ints>;
            }
            fetch_later(four);
        }
        if (after[0] != nullptr) {
            fetch_later(after);
        } else {
            while (num_fetches_ < num_reads_) fetches_[num_fetches_++] = reads_[num_reads_ - 1];
        }
    }

    // out[i] = q[i] . k; q: rows q_stride apart, in f32; out: kPiece apart.
    void score(int rows, const float* q, int64_t q_stride, float* out) const {
        const unsigned mode = flush_denormals();
        int n = 0;
        for (int g = from_; g < to_; g += kStreams) {
            for (int i = 0; i < rows; ++i) {
                for (int j = 0; j < kStreams; ++j) {
                    store(out + i * kPiece + (g + j) * kGroup, zero());
                }
            }
            if constexpr (ints) fetch_scales(g);
            for (int s = 0; s < steps(); ++s, ++n) {
                const FewLines* ahead = fetches_ + n;
                for (int i = 0; i < rows; i += 2) {
                    const auto add_some = rows - i < 2 ? few_scores<1, ints> : few_scores<2, ints>;
                    add_some(q + i * q_stride + s * kTileStep, q_stride, reads_[n], *ahead,
                             out + i * kPiece + g * kGroup);
                    ahead = reads_ + n;  // these need no prefetch
                }
            }
        }
        restore_mode(mode);
    }

    // sums[i] = p[i] v. p: rows kPiece apart, in f32, zeros for invisible positions of a step.
    void weigh(int rows, const float* p, float* sums, int64_t stride) const {
        for (int i = 0; i < rows; ++i) {
            for (int64_t c = 0; c < dim_; c += kLanes) store(sums + i * stride + c, zero());
        }
        const unsigned mode = flush_denormals();
        int n = first_values_;
        for (int g = from_; g < to_; g += kStreams) {
            const bool first = values[g] != nullptr, second = values[g + 2] != nullptr;
            for (int64_t c = 0; c < dim_; c += kTileStep, ++n) {
                const FewLines* ahead = fetches_ + n;
                for (int i = 0; i < rows; i += 2) {
                    const float* weights = p + i * kPiece + g * kGroup;
                    float* to = sums + i * stride + c;
                    const bool one = rows - i < 2;
                    if (first && second) {
                        const auto add_some = one ? few_values<1, 2, ints> : few_values<2, 2, ints>;
                        add_some(weights, reads_[n], *ahead, to, stride);
                    } else {  // a missing group is replaced by the other
                        const auto add_some = one ? few_values<1, 1, ints> : few_values<2, 1, ints>;
                        add_some(weights + (first ? 0 : kTileStep), reads_[n], *ahead, to, stride);
                    }
                    ahead = reads_ + n;
                }
            }
        }
        restore_mode(mode);
    }

  private:
    static constexpr int kMostReads = 2 * kGroups / kStreams * (kMaxHeadDim / kTileStep);

    int steps() const { return static_cast<int>(dim_ / kTileStep); }

    // Fills up to four streams; the steps of values stay whole.
    static void fill(const char** groups) {
        for (int i = 0; i < 2; ++i) {
            if (groups[i] == nullptr) groups[i] = groups[i + 2];
            if (groups[i + 2] == nullptr) groups[i + 2] = groups[i];
        }
        for (int i = 0; i < kStreams; i += 2) {
            if (groups[i] == nullptr) groups[i] = groups[i + 1];
            if (groups[i + 1] == nullptr) groups[i + 1] = groups[i];
        }
    }

    // One of steps() parts of four groups.
    static FewLines as_it_lies(const char* const* groups, int part) {
        constexpr int64_t kBytes = kTileRows * kPairsBytes<ints>;
        FewLines lines;
        for (int j = 0; j < kStreams; ++j) lines.at[j] = groups[j] + part * kBytes;
        lines.stride = kBytes / 8;
        return lines;
    }

    void fetch_later(const char* const* groups) {
        for (int s = 0; s < steps(); ++s) fetches_[num_fetches_++] = as_it_lies(groups, s);
    }

    void fetch_scales(int first) const {
        for (int g = first; g < first + kStreams; ++g) {
            if (key_scales[g] != nullptr) prefetch_l1(key_scales[g]);
            if (key_scales[g] != nullptr) prefetch_l1(value_scales[g]);
        }
    }

    const int64_t dim_;
    int from_, to_, num_reads_, num_fetches_, first_values_;
    FewLines reads_[kMostReads], fetches_[kMostReads];  // while n is read, n is prefetched
};

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
