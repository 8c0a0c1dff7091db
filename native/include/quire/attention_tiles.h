// The tiles of attention: scores of rows by positions, their probabilities, and the weighted sum of
// values. attention.cc has the recipe and iterates over the cache; this file has only the
// arithmetic of one piece. For files compiled once per instruction set. A row's chain of operations
// is the same in every tile, and invisible positions are never multiplied.
#pragma once

#include "quire/kernels.h"
#include "quire/kv_ints.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kPiece = 256;
constexpr int kGroup = kKeyGroup;  // positions that are stored together in every block
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
#if defined(QUIRE_ZMM)
constexpr int kVecRows = 6, kTileVecs = 4;
#else
constexpr int kVecRows = 4, kTileVecs = 2;
#endif

// Elements that one step of a chain reads from a row of the cache.
template <class T>
constexpr int kStep = sizeof(T) == 2 ? 2 : 1;

// ---- scores

// out[i][j] = q[i] . k[j] for `rows` rows and kVecs vectors of positions; K is [dim][positions],
// or [dim pairs][positions][2], `stride` elements from step to step.
template <class T, int rows, int kVecs>
__attribute__((noinline)) void score_tile(const T* const* q, const T* const* k, int64_t stride,
                                          int64_t dim, float* out) {
    Vec sums[rows][kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sums[i][j] = zero();
    }
    const T *query[rows], *key[kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) query[i] = q[i];
#pragma GCC unroll 8
    for (int j = 0; j < kVecs; ++j) key[j] = k[j];
    const int64_t steps = dim / kStep<T>;
    for (int64_t s = 0; s < steps; ++s) {
        if constexpr (kStep<T> == 1) {
            Vec b[kVecs];
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) b[j] = load(key[j] + s * stride);
#pragma GCC unroll 8
            for (int i = 0; i < rows; ++i) {
                const Vec a = set1(query[i][s]);
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) sums[i][j] = fma(a, b[j], sums[i][j]);
            }
        } else {
            Pairs b[kVecs];
#pragma GCC unroll 8
            for (int j = 0; j < kVecs; ++j) b[j] = load_pairs(key[j] + s * stride);
#pragma GCC unroll 8
            for (int i = 0; i < rows; ++i) {
                const Pairs a = set1_pair(query[i] + 2 * s);
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) sums[i][j] = dot_pairs(sums[i][j], a, b[j]);
            }
        }
    }
    if constexpr (kStep<T> == 2) {
        if (dim % 2 != 0) {  // the partner in K is zero; after q lies another head
#pragma GCC unroll 8
            for (int i = 0; i < rows; ++i) {
                const Pairs a = set1_single(query[i] + dim - 1);
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) {
                    sums[i][j] = dot_pairs(sums[i][j], a, load_pairs(key[j] + steps * stride));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) store(out + i * kPiece + j * kLanes, sums[i][j]);
    }
}

template <class T, int rows = kVecRows, int vecs = kTileVecs>
QUIRE_VEC void score(int num_rows, int num_vecs, const T* const* q, const T* const* k,
                     int64_t stride, int64_t dim, float* out) {
    if constexpr (rows > 1) {
        if (num_rows < rows) {
            return score<T, rows - 1, vecs>(num_rows, num_vecs, q, k, stride, dim, out);
        }
    }
    if constexpr (vecs > 1) {
        if (num_vecs < vecs) {
            return score<T, rows, vecs - 1>(num_rows, num_vecs, q, k, stride, dim, out);
        }
    }
    score_tile<T, rows, vecs>(q, k, stride, dim, out);
}

// ---- probabilities

// 2^x of x <= 0; exactly 0 below -126, and so for -inf. For a bf16 cache, which rounds the result
// to 8 bits, a shorter polynomial.
template <class T>
QUIRE_VEC Vec exp2_below(Vec x) {
    const Vec magic = set1(12582912.0f);
    const Vec t = add(x, magic);
    const Vec f = sub(x, sub(t, magic));
    Vec p;
    if constexpr (sizeof(T) == 2) {
        p = set1(9.6700313e-3f);
        p = fma(p, f, set1(5.5876694e-2f));
        p = fma(p, f, set1(2.4022106e-1f));
        p = fma(p, f, set1(6.9313675e-1f));
        p = fma(p, f, set1(1.0f));
    } else {
        p = set1(1.5469732e-4f);
        p = fma(p, f, set1(1.3400433e-3f));
        p = fma(p, f, set1(9.618025e-3f));
        p = fma(p, f, set1(5.550327e-2f));
        p = fma(p, f, set1(2.402265e-1f));
        p = fma(p, f, set1(6.931472e-1f));
        p = fma(p, f, set1(1.0f));
    }
    return select_less(x, set1(-126.0f), zero(), mul(p, power_of_two(t)));
}

QUIRE_VEC float first_lane(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    return lanes[0];
}

QUIRE_VEC void store_rounded(float* p, Vec a) { store(p, a); }
QUIRE_VEC void store_rounded(bf16* p, Vec a) {
#if defined(QUIRE_HAS_BF16_DOT)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
    store(p, a);
#endif
}

struct Scale {
    float factor;  // of a score: scale * log2(e), or scale / cap
    float capped;  // cap * log2(e), or 0 for no cap
    const float* keys = nullptr;    // [kPiece] of a piece's keys, for integers
    const float* values = nullptr;  // of its values
};

// Converts scores of positions first .. end of a piece to probabilities, multiplied by the scales
// of values; returns their largest t and sum. Lanes outside in the first and last vector become
// zero.
template <class T>
QUIRE_VEC void probabilities(float* scores, T* p, int first, int end, Scale scale, float* largest,
                             float* sum) {
    const int from = first / kLanes * kLanes, to = (end + kLanes - 1) / kLanes * kLanes;
    if (scale.keys != nullptr) {
        for (int i = from; i < to; i += kLanes) {
            store(scores + i, mul(load(scores + i), load(scale.keys + i)));
        }
    }
    Vec factor = set1(scale.factor);
    if (scale.capped != 0.0f) {
        for (int i = from; i < to; i += kLanes) {
            store(scores + i, mul(tanh(mul(load(scores + i), factor)), set1(scale.capped)));
        }
        factor = set1(1.0f);
    }
    // t is score * factor, computed twice rather than kept: it is one operation.
    for (int i = from; i < first; ++i) scores[i] = -kInfinity;
    for (int i = end; i < to; ++i) scores[i] = -kInfinity;
    Vec most = set1(-kInfinity);
    for (int i = from; i < to; i += kLanes) most = max(mul(load(scores + i), factor), most);
    *largest = max_lanes(most);
    const Vec m = set1(*largest);
    Vec total = zero();
    for (int i = from; i < to; i += kLanes) {
        const Vec e = exp2_below<T>(sub(mul(load(scores + i), factor), m));
        total = add(total, e);
        store_rounded(p + i, scale.values != nullptr ? mul(e, load(scale.values + i)) : e);
    }
    if (scale.values != nullptr) {  // masked slots may hold NaN
        for (int i = from; i < first; ++i) p[i] = T{};
        for (int i = end; i < to; ++i) p[i] = T{};
    }
    *sum = sum_lanes(total);
}

// ---- values

// Addresses of a piece's values: groups[g] is the V row (f32) or row of pairs (bf16) of positions
// 16 g on.
template <class T>
struct Values {
    const T* groups[kPiece / kGroup];
    int64_t dim;

    // Elements of column c at step s (a position, or a pair of positions).
    __attribute__((always_inline)) const T* at(int s, int64_t c) const {
        const int position = s * kStep<T>;
        return groups[position / kGroup] + (position % kGroup) * dim + c * kStep<T>;
    }
};

// The visible part of a pair of positions.
enum class Part { both, first, second };

// out[i][0 .. kVecs * kLanes) += sum of p[i][s] v[s] for steps from..to; columns from c on.
// tail: n columns only (kVecs is 1).
template <class T, int rows, int kVecs, Part part, bool tail>
__attribute__((noinline)) void weigh_tile(const T* p, const Values<T>& values, int from, int to,
                                          int64_t c, int n, float* out, int64_t stride) {
    Vec sums[rows][kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) sums[i][j] = load(out + i * stride + j * kLanes);
    }
    constexpr int kSteps = kGroup / kStep<T>;
    for (int s = from; s < to;) {
        const int stop = (s / kSteps + 1) * kSteps < to ? (s / kSteps + 1) * kSteps : to;
        const T* v = values.at(s, c);
        for (; s < stop; ++s, v += values.dim * kStep<T>) {
            if constexpr (kStep<T> == 1) {
                Vec b[kVecs];
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) {
                    b[j] = tail ? load_n(v, n) : load(v + j * kLanes);
                }
#pragma GCC unroll 8
                for (int i = 0; i < rows; ++i) {
                    const Vec a = set1(p[i * kPiece + s]);
#pragma GCC unroll 8
                    for (int j = 0; j < kVecs; ++j) sums[i][j] = fma(a, b[j], sums[i][j]);
                }
            } else {
                Pairs b[kVecs];
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; ++j) {
                    b[j] = tail ? load_pairs_n(v, n) : load_pairs(v + 2 * j * kLanes);
                    if constexpr (part == Part::first) b[j] = mask_pairs(b[j], 0x0000ffffu);
                    if constexpr (part == Part::second) b[j] = mask_pairs(b[j], 0xffff0000u);
                }
#pragma GCC unroll 8
                for (int i = 0; i < rows; ++i) {
                    const Pairs a = set1_pair(p + i * kPiece + 2 * s);
#pragma GCC unroll 8
                    for (int j = 0; j < kVecs; ++j) sums[i][j] = dot_pairs(sums[i][j], a, b[j]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; ++j) store(out + i * stride + j * kLanes, sums[i][j]);
    }
}

// All columns of steps from..to for exactly `rows` rows.
template <class T, int rows, Part part>
void weigh_columns(const T* p, const Values<T>& values, int from, int to, float* out,
                   int64_t stride) {
    const int64_t dim = values.dim;
    int64_t c = 0;
    for (; c + kTileVecs * kLanes <= dim; c += kTileVecs * kLanes) {
        weigh_tile<T, rows, kTileVecs, part, false>(p, values, from, to, c, 0, out + c, stride);
    }
    for (; c + kLanes <= dim; c += kLanes) {
        weigh_tile<T, rows, 1, part, false>(p, values, from, to, c, 0, out + c, stride);
    }
    if (c < dim) {
        const int n = static_cast<int>(dim - c);
        weigh_tile<T, rows, 1, part, true>(p, values, from, to, c, n, out + c, stride);
    }
}

template <class T, int rows = kVecRows>
QUIRE_VEC void weigh_rows(int num_rows, const T* p, const Values<T>& values, int from, int to,
                          float* out, int64_t stride) {
    if (from >= to) return;
    if constexpr (rows > 1) {
        if (num_rows < rows) {
            return weigh_rows<T, rows - 1>(num_rows, p, values, from, to, out, stride);
        }
    }
    weigh_columns<T, rows, Part::both>(p, values, from, to, out, stride);
}

struct Span {
    int first, end;  // positions of the piece that a row sees
};

constexpr int64_t kAllPieces = int64_t{1} << 40;

// Pieces that rows iterate over, and positions that some of them see there.
struct Stretch {
    int64_t piece, stop;  // pieces piece .. stop
    int64_t first, end;

    int64_t count() const { return stop > piece ? stop - piece : 0; }
};

// For rows that see positions first .. end, the part in pieces piece .. stop.
QUIRE_VEC Stretch stretch_of(int64_t first, int64_t end, int64_t piece, int64_t stop) {
    const int64_t before = (end + kPiece - 1) / kPiece;
    if (piece < first / kPiece) piece = first / kPiece;
    if (stop > before) stop = before;
    return {piece, stop, first, end < stop * kPiece ? end : stop * kPiece};
}

// out[i] = sum over the positions of spans[i] of p[i] v, in order.
template <class T>
void weigh(int num_rows, const Span* spans, const T* p, const Values<T>& values, float* out,
           int64_t stride) {
    constexpr int step = kStep<T>;
    int from = 0, to = kPiece / step;  // whole steps that every row sees
    for (int i = 0; i < num_rows; ++i) {
        const int whole = (spans[i].first + step - 1) / step;
        if (whole > from) from = whole;
        if (spans[i].end / step < to) to = spans[i].end / step;
    }
    if (to < from) to = from;
    for (int i = 0; i < num_rows; ++i) {
        const T* row = p + i * kPiece;
        float* sums = out + i * stride;
        const int whole = (spans[i].first + step - 1) / step, last = spans[i].end / step;
        if (step == 2 && spans[i].first % 2 != 0) {
            weigh_columns<T, 1, Part::second>(row, values, whole - 1, whole, sums, stride);
        }
        weigh_rows<T, 1>(1, row, values, whole, from < last ? from : last, sums, stride);
    }
    weigh_rows<T>(num_rows, p, values, from, to, out, stride);
    for (int i = 0; i < num_rows; ++i) {
        const T* row = p + i * kPiece;
        float* sums = out + i * stride;
        const int last = spans[i].end / step;
        weigh_rows<T, 1>(1, row, values, to, last, sums, stride);
        if (step == 2 && spans[i].end % 2 != 0) {
            weigh_columns<T, 1, Part::first>(row, values, last, last + 1, sums, stride);
        }
    }
}

// ---- caches of integers

QUIRE_VEC Scale scale_of(const AttentionArgs& args) {
    Scale scale;
    const bool capped = args.soft_cap != 0.0f;
    scale.factor = capped ? args.scale / args.soft_cap : args.scale * kLog2E;
    scale.capped = capped ? args.soft_cap * kLog2E : 0.0f;
    return scale;
}

// Expands a piece's integers to T, group by group in the cache's order, and their scales.
template <class T>
class Expanded {
  public:
    static int64_t bytes(const CacheShape& shape) {
        const int64_t columns = round_up(shape.head_dim, 2) + shape.head_dim;
        return kPiece * (columns * static_cast<int64_t>(sizeof(T)) + 2 * 4);
    }

    Expanded(const CacheShape& shape, char* scratch)
        : dim_(shape.head_dim), key_dim_(round_up(shape.head_dim, kStep<T>)),
          element_bytes_(kv_element_bytes(shape)) {
        key_scales_ = reinterpret_cast<float*>(scratch);
        value_scales_ = key_scales_ + kPiece;
        keys_ = reinterpret_cast<T*>(value_scales_ + kPiece);
        values_ = keys_ + kPiece * round_up(dim_, 2);
    }

    void lend_scales(Scale& scale) const {
        scale.keys = key_scales_;
        scale.values = value_scales_;
    }

    // The group at position `within` of a block's parts, `at` positions into its piece.
    void group(const char* key_part, const char* value_part, int64_t within, int64_t at,
               const T** keys, const T** values) const {
        T* to = keys_ + at * key_dim_;
        expand(reinterpret_cast<const int8_t*>(key_part) + within * key_dim_, to,
               kGroup * key_dim_);
        *keys = to;
        to = values_ + at * dim_;
        expand(reinterpret_cast<const int8_t*>(value_part) + within * dim_, to, kGroup * dim_);
        *values = to;
        const int64_t scales = scales_at(within);
        take_scales(key_part + scales, value_part + scales, at);
    }

    // The same for a cache with blocks smaller than a group: positions from `position` on, within
    // first .. end, gathered from their blocks. head: offset of the KV head in block 0.
    void gather(const CacheShape& shape, const char* head, const int32_t* table, int64_t position,
                int64_t first, int64_t end, int64_t at, const T** keys, const T** values) const {
        T *to_keys = keys_ + at * key_dim_, *to_values = values_ + at * dim_;
        *keys = to_keys;
        *values = to_values;
        alignas(64) int8_t ints[2 * kGroup * kMaxHeadDim];
        int8_t* value_ints = ints + kGroup * key_dim_;
        for (int64_t i = 0; i < kGroup; i += shape.block_size) {
            const int64_t from = position + i;
            const char* block = nullptr;
            if (from + shape.block_size > first && from < end) {
                block = head + table[from / shape.block_size] * kv_block_bytes(shape);
            }
            if (shape.ints) {
                gather_block(shape, block, i, ints, value_ints);
                gather_scales(shape, block, at + i);
            } else {
                gather_block(shape, block, i, to_keys, to_values);
            }
        }
        if (!shape.ints) return;
        expand(ints, to_keys, kGroup * key_dim_);
        expand(value_ints, to_values, kGroup * dim_);
    }

    // Offset of a group's scales in a part.
    int64_t scales_at(int64_t within) const { return element_bytes_ + within * 4; }

    // A group's scales, `at` positions into its piece.
    void take_scales(const char* key_scales, const char* value_scales, int64_t at) const {
        __builtin_memcpy(key_scales_ + at, key_scales, kGroup * 4);
        __builtin_memcpy(value_scales_ + at, value_scales, kGroup * 4);
    }

    // Prefetches a group. (Inlined, since gcc drops calls that only prefetch.)
    __attribute__((always_inline)) void fetch(const char* key_part, const char* value_part,
                                              int64_t within) const {
        const char* keys = key_part + within * key_dim_;
        for (int64_t i = 0; i < kGroup * key_dim_; i += 64) prefetch_l2(keys + i);
        const char* values = value_part + within * dim_;
        for (int64_t i = 0; i < kGroup * dim_; i += 64) prefetch_l2(values + i);
        prefetch_l2(key_part + element_bytes_ + within * 4);
        prefetch_l2(value_part + element_bytes_ + within * 4);
    }

  private:
    // A small block's keys and values, `i` positions into their group; zeros for a null block.
    template <class E>
    void gather_block(const CacheShape& shape, const char* block, int64_t i, E* keys,
                      E* values) const {
        const int64_t run = shape.block_size * kStep<T>;
        const E* from = reinterpret_cast<const E*>(block);
        for (int64_t d = 0; d < key_dim_; d += kStep<T>) {
            E* to = keys + d * kGroup + i * kStep<T>;
            if (block == nullptr) {
                for (int64_t j = 0; j < run; ++j) to[j] = E{};
            } else {
                __builtin_memcpy(to, from + d * shape.block_size, run * sizeof(E));
            }
        }
        E* to = values + i * dim_;
        const int64_t count = shape.block_size * dim_;
        if (block == nullptr) {
            for (int64_t j = 0; j < count; ++j) to[j] = E{};
        } else {
            __builtin_memcpy(to, block + kv_part_bytes(shape), count * sizeof(E));
        }
    }

    void gather_scales(const CacheShape& shape, const char* block, int64_t at) const {
        for (int64_t j = 0; j < shape.block_size; ++j) {
            key_scales_[at + j] = value_scales_[at + j] = 0.0f;
        }
        if (block == nullptr) return;
        const int64_t bytes = shape.block_size * 4;
        __builtin_memcpy(key_scales_ + at, block + element_bytes_, bytes);
        __builtin_memcpy(value_scales_ + at, block + kv_part_bytes(shape) + element_bytes_, bytes);
    }

    const int64_t dim_, key_dim_, element_bytes_;
    float *key_scales_, *value_scales_;
    T *keys_, *values_;
};

}  // namespace

}  // namespace quire::QUIRE_ISA_NS
