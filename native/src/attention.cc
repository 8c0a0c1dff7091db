// attention: causal, over a paged cache, in pieces of 256 positions aligned to position 0.
//
// The recipe of a row (one head of one token), whatever else is computed beside it. For each
// piece that holds a position it sees, in order:
//   t = score * scale * log2(e)   (or cap * tanh(score * scale / cap) * log2(e))
//   m = the largest t, p = 2^(t - m), l = the sum of p: lane by lane in order, then the lanes
//   p rounded to the cache's type, o = sum of p v in order of position, from zero
// then pieces are merged in order: with m' the larger m, l and o are weighed by 2^(m - m').
// A score is one chain over head_dim. What the row does not see (later positions, before its
// window, and the unseen half of a bf16 pair) takes no part in a product: slots hold anything.
//
// Rows of one KV head share loads in tiles; a tile multiplies what all its rows see, and each
// row's ends by themselves, resuming the same chains.

#include "quire/kernels.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kPiece = 256;
constexpr int kGroup = 16;   // positions behind one pointer to V
constexpr int kRows = 96;    // rows that share a walk through the cache
constexpr int kMaxDim = 256;
constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504f;
#if defined(QUIRE_ZMM)
constexpr int kTileRows = 6, kTileVecs = 4;
#else
constexpr int kTileRows = 4, kTileVecs = 2;
#endif

// Elements that one step of a chain takes from a row of the cache.
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
        if (dim % 2 != 0) {  // the partner in K is zero; beside q lies another head
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

template <class T, int rows = kTileRows, int vecs = kTileVecs>
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

// 2^x of x <= 0; exactly 0 below -126, and so for -inf. For a bf16 cache, where the result is
// rounded to 8 bits, a shorter polynomial.
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

QUIRE_VEC Vec tanh(Vec x) {
    const Vec e = exp(mul(abs(x), set1(-2.0f)));
    return copy_sign(div(sub(set1(1.0f), e), add(set1(1.0f), e)), x);
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
};

// Scores of positions first .. end of a piece become probabilities; returns their largest t and
// sum. Lanes beside them in the first and last vector become zero.
template <class T>
QUIRE_VEC void probabilities(float* scores, T* p, int first, int end, Scale scale, float* largest,
                             float* sum) {
    const int from = first / kLanes * kLanes, to = (end + kLanes - 1) / kLanes * kLanes;
    const Vec factor = set1(scale.factor);
    for (int i = from; i < to; i += kLanes) {
        Vec t = mul(load(scores + i), factor);
        if (scale.capped != 0.0f) t = mul(tanh(t), set1(scale.capped));
        store(scores + i, t);
    }
    for (int i = from; i < first; ++i) scores[i] = -kInfinity;
    for (int i = end; i < to; ++i) scores[i] = -kInfinity;
    Vec most = set1(-kInfinity);
    for (int i = from; i < to; i += kLanes) most = max(load(scores + i), most);
    *largest = max_lanes(most);
    const Vec m = set1(*largest);
    Vec total = zero();
    for (int i = from; i < to; i += kLanes) {
        const Vec e = exp2_below<T>(sub(load(scores + i), m));
        total = add(total, e);
        store_rounded(p + i, e);
    }
    *sum = sum_lanes(total);
}

// ---- values

// Where a piece's values lie: groups[g] is the V row (f32) or row of pairs (bf16) of positions
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

// How much of a pair of positions counts.
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

template <class T, int rows = kTileRows>
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

// ---- rows

// Up to kRows rows of one KV head of one sequence, and what they have summed so far.
template <class T>
class Walk {
  public:
    Walk(const AttentionArgs& args, int64_t sequence, int64_t kv_head)
        : args_(args), table_(args.block_tables + sequence * args.table_columns),
          stride_(round_up(args.shape.head_dim, kLanes)),
          block_bytes_(kv_block_bytes(args.shape)), part_bytes_(kv_part_bytes(args.shape)),
          head_(static_cast<const char*>(args.cache) + 2 * part_bytes_ * kv_head) {
        const bool capped = args.soft_cap != 0.0f;
        scale_.factor = capped ? args.scale / args.soft_cap : args.scale * kLog2E;
        scale_.capped = capped ? args.soft_cap * kLog2E : 0.0f;
        values_.dim = args.shape.head_dim;
    }

    void add_row(int64_t token, int64_t head) {
        const int64_t position = args_.positions[token];
        const int64_t first = args_.window > 0 ? position - args_.window + 1 : 0;
        query_[num_rows_] = static_cast<const T*>(args_.q.at(token)) + head * values_.dim;
        first_[num_rows_] = first > 0 ? first : 0;
        end_[num_rows_] = position + 1;
        num_pieces_[num_rows_++] = 0;
    }

    bool full() const { return num_rows_ == kRows; }

    // Rows must have rising positions.
    void attend() {
        if (num_rows_ == 0) return;
        const int64_t last = (end_[num_rows_ - 1] - 1) / kPiece;
        for (int64_t piece = first_[0] / kPiece; piece <= last; ++piece) {
            find(piece);
            for (int row = 0; row < num_rows_; row += kTileRows) {
                const int rows = num_rows_ - row < kTileRows ? num_rows_ - row : kTileRows;
                attend_tile(piece * kPiece, row, rows);
            }
        }
    }

    template <class Y>
    void write(int row, Y* y) const {
        const Vec l = set1(sum_[row]);
        const float* o = out_ + row * stride_;
        int64_t c = 0;
        for (; c + kLanes <= values_.dim; c += kLanes) store(y + c, div(load(o + c), l));
        if (c < values_.dim) {
            store_n(y + c, div(load(o + c), l), static_cast<int>(values_.dim - c));
        }
    }

    int num_rows() const { return num_rows_; }
    void clear() { num_rows_ = 0; }

  private:
    // Points at the keys and values of a piece, as far as any row sees it.
    void find(int64_t piece) {
        const int64_t start = piece * kPiece, block_size = args_.shape.block_size;
        const int64_t end = end_[num_rows_ - 1], first = first_[0];
        for (int64_t i = 0; i < kPiece; i += kGroup) {
            const int64_t position = start + i;
            if (position + kGroup <= first || position >= end) continue;
            const char* block = head_ + table_[position / block_size] * block_bytes_;
            const int64_t within = position % block_size;
            const T* keys = reinterpret_cast<const T*>(block) + within * kStep<T>;
            for (int j = 0; j < kGroup / kLanes; ++j) {
                keys_[i / kLanes + j] = keys + j * kLanes * kStep<T>;
            }
            values_.groups[i / kGroup] =
                reinterpret_cast<const T*>(block + part_bytes_) + within * values_.dim;
        }
    }

    // Adds the piece that begins at position `start` to rows row .. row + count.
    void attend_tile(int64_t start, int row, int count) {
        while (count > 0 && end_[row] <= start) ++row, --count;
        while (count > 0 && first_[row + count - 1] >= start + kPiece) --count;
        if (count == 0) return;
        Span spans[kTileRows];
        for (int i = 0; i < count; ++i) {
            const int64_t first = first_[row + i] - start, end = end_[row + i] - start;
            spans[i] = {static_cast<int>(first > 0 ? first : 0),
                        static_cast<int>(end < kPiece ? end : kPiece)};
        }
        const int from = spans[0].first / kLanes;
        const int to = (spans[count - 1].end + kLanes - 1) / kLanes;
        for (int v = from; v < to; v += kTileVecs) {
            const int vecs = to - v < kTileVecs ? to - v : kTileVecs;
            score<T>(count, vecs, query_ + row, keys_ + v, args_.shape.block_size * kStep<T>,
                     values_.dim, scores_ + v * kLanes);
        }
        float largest[kTileRows], sum[kTileRows];
        for (int i = 0; i < count; ++i) {
            probabilities(scores_ + i * kPiece, weights_ + i * kPiece, spans[i].first,
                          spans[i].end, scale_, &largest[i], &sum[i]);
        }
        for (int64_t c = 0; c < count * stride_; c += kLanes) store(piece_ + c, zero());
        weigh(count, spans, weights_, values_, piece_, stride_);
        for (int i = 0; i < count; ++i) {
            merge(row + i, largest[i], sum[i], piece_ + i * stride_);
        }
    }

    void merge(int row, float largest, float sum, const float* piece) {
        float* out = out_ + row * stride_;
        if (num_pieces_[row]++ == 0) {
            largest_[row] = largest;
            sum_[row] = sum;
            for (int64_t c = 0; c < stride_; c += kLanes) store(out + c, load(piece + c));
            return;
        }
        const Vec old = set1(largest_[row]), fresh = set1(largest);
        const Vec most = max(old, fresh);
        const Vec a = exp2_below<float>(sub(old, most)), b = exp2_below<float>(sub(fresh, most));
        largest_[row] = first_lane(most);
        sum_[row] = first_lane(fma(set1(sum), b, mul(set1(sum_[row]), a)));
        for (int64_t c = 0; c < stride_; c += kLanes) {
            store(out + c, fma(load(piece + c), b, mul(load(out + c), a)));
        }
    }

    const AttentionArgs& args_;
    const int32_t* const table_;
    const int64_t stride_;  // of rows of sums, in whole vectors
    const int64_t block_bytes_, part_bytes_;
    const char* const head_;
    Scale scale_;
    Values<T> values_;
    const T* keys_[kPiece / kLanes];

    int num_rows_ = 0;
    const T* query_[kRows];
    int64_t first_[kRows], end_[kRows];  // positions seen
    int num_pieces_[kRows];
    float largest_[kRows], sum_[kRows];

    alignas(64) float scores_[kTileRows * kPiece];
    alignas(64) T weights_[kTileRows * kPiece];
    alignas(64) float piece_[kTileRows * kMaxDim];
    alignas(64) float out_[kRows * kMaxDim];
};

// Tokens begin..end of a sequence, one KV head.
template <class T>
void attend(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t begin,
            int64_t end) {
    const int64_t group = args.heads / args.shape.kv_heads, dim = args.shape.head_dim;
    Walk<T> walk(args, sequence, kv_head);
    int64_t first = begin * group;  // rows are numbered token * group + head within the group
    for (int64_t row = first; row < end * group; ++row) {
        walk.add_row(row / group, kv_head * group + row % group);
        if (!walk.full() && row + 1 < end * group) continue;
        walk.attend();
        for (int i = 0; i < walk.num_rows(); ++i, ++first) {
            const int64_t token = first / group, c = (kv_head * group + first % group) * dim;
            if (args.y.type == Type::f32) {
                walk.write(i, static_cast<float*>(args.y.at(token)) + c);
            } else {
                walk.write(i, static_cast<bf16*>(args.y.at(token)) + c);
            }
        }
        walk.clear();
    }
}

}  // namespace

// Work is dealt as (tile of tokens of one sequence) x (KV head).
void attention(const AttentionArgs& args) {
    if (args.num_tokens == 0) return;
    const int64_t group = args.heads / args.shape.kv_heads;
    const int64_t tokens = group < kRows ? kRows / group : 1;  // of a tile
    const int64_t kv_heads = args.shape.kv_heads;
    int64_t num_tiles = 0;
    for (int64_t s = 0; s < args.num_sequences; ++s) {
        num_tiles += (args.seq_starts[s + 1] - args.seq_starts[s] + tokens - 1) / tokens;
    }
    args.pool->deal(num_tiles * kv_heads, 1, [&](int64_t begin, int64_t end, int) {
        int64_t sequence = 0, before = 0;  // tiles of earlier sequences
        for (int64_t item = begin; item < end; ++item) {
            const int64_t tile = item / kv_heads;
            int64_t tiles = 0;
            for (;; ++sequence, before += tiles) {
                const int64_t count = args.seq_starts[sequence + 1] - args.seq_starts[sequence];
                tiles = (count + tokens - 1) / tokens;
                if (tile < before + tiles) break;
            }
            const int64_t first = args.seq_starts[sequence] + (tile - before) * tokens;
            const int64_t stop = args.seq_starts[sequence + 1];
            const int64_t last = first + tokens < stop ? first + tokens : stop;
            if (args.shape.type == Type::f32) {
                attend<float>(args, sequence, item % kv_heads, first, last);
            } else {
                attend<bf16>(args, sequence, item % kv_heads, first, last);
            }
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
