// attention: causal, over a paged cache, in pieces of 256 positions aligned to position 0.
//
// The recipe of a row (one head of one token), whatever else is computed beside it. For each
// piece that holds a position it sees, in order:
//   t = score * scale * log2(e)   (or cap * tanh(score * scale / cap) * log2(e))
//   m = the largest t, p = 2^(t - m), l = the sum of p: lane by lane in order, then the lanes
//   p rounded to the cache's type, o = sum of p v in order of position, from zero
// then pieces are merged in order: with m' the larger m, l and o are weighed by 2^(m - m').
// Of a cache of integers a score is multiplied by its key's scale first, and p by its value's
// scale before it is rounded; l is the sum of p without.
// A score is one chain over head_dim. What the row does not see (later positions, before its
// window, and the unseen half of a bf16 pair) takes no part in a product: slots hold anything.
//
// Rows of one KV head share loads in tiles; a tile multiplies what all its rows see, and each
// row's ends by themselves, resuming the same chains.

#include "quire/amx_attention.h"
#include "quire/attention_tiles.h"
#include "quire/kernels.h"
#include "quire/kv_ints.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kRows = 96;  // rows that share a walk through the cache

// Up to kRows rows of one KV head of one sequence, and what they have summed so far.
template <class T>
class Walk {
  public:
    // scratch: Expanded<T>::bytes(), for a cache of integers.
    Walk(const AttentionArgs& args, int64_t sequence, int64_t kv_head, char* scratch)
        : args_(args), table_(args.block_tables + sequence * args.table_columns),
          stride_(round_up(args.shape.head_dim, kLanes)),
          block_bytes_(kv_block_bytes(args.shape)), part_bytes_(kv_part_bytes(args.shape)),
          head_(static_cast<const char*>(args.cache) + 2 * part_bytes_ * kv_head),
          scale_(scale_of(args)), expanded_(args.shape, scratch) {
        if (args.shape.ints) expanded_.lend_scales(scale_);
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
            for (int row = 0; row < num_rows_; row += kVecRows) {
                const int rows = num_rows_ - row < kVecRows ? num_rows_ - row : kVecRows;
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
            const T *keys, *values;
            if (args_.shape.ints) {
                expanded_.group(block, block + part_bytes_, within, i, &keys, &values);
            } else {
                keys = reinterpret_cast<const T*>(block) +
                       within * round_up(values_.dim, kStep<T>);
                values = reinterpret_cast<const T*>(block + part_bytes_) + within * values_.dim;
            }
            for (int j = 0; j < kGroup / kLanes; ++j) {
                keys_[i / kLanes + j] = keys + j * kLanes * kStep<T>;
            }
            values_.groups[i / kGroup] = values;
        }
    }

    // Adds the piece that begins at position `start` to rows row .. row + count.
    void attend_tile(int64_t start, int row, int count) {
        while (count > 0 && end_[row] <= start) ++row, --count;
        while (count > 0 && first_[row + count - 1] >= start + kPiece) --count;
        if (count == 0) return;
        Span spans[kVecRows];
        for (int i = 0; i < count; ++i) {
            const int64_t first = first_[row + i] - start, end = end_[row + i] - start;
            spans[i] = {static_cast<int>(first > 0 ? first : 0),
                        static_cast<int>(end < kPiece ? end : kPiece)};
        }
        const int from = spans[0].first / kLanes;
        const int to = (spans[count - 1].end + kLanes - 1) / kLanes;
        for (int v = from; v < to; v += kTileVecs) {
            const int vecs = to - v < kTileVecs ? to - v : kTileVecs;
            score<T>(count, vecs, query_ + row, keys_ + v, kGroup * kStep<T>, values_.dim,
                     scores_ + v * kLanes);
        }
        float largest[kVecRows], sum[kVecRows];
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
    Expanded<T> expanded_;
    Values<T> values_;
    const T* keys_[kPiece / kLanes];

    int num_rows_ = 0;
    const T* query_[kRows];
    int64_t first_[kRows], end_[kRows];  // positions seen
    int num_pieces_[kRows];
    float largest_[kRows], sum_[kRows];

    alignas(64) float scores_[kVecRows * kPiece];
    alignas(64) T weights_[kVecRows * kPiece];
    alignas(64) float piece_[kVecRows * kMaxHeadDim];
    alignas(64) float out_[kRows * kMaxHeadDim];
};

#if defined(QUIRE_AMX)
template <class T> struct WalkOf { using type = Walk<T>; };
template <> struct WalkOf<bf16> { using type = TileWalk; };
#else
template <class T> struct WalkOf { using type = Walk<T>; };
#endif

// Tokens begin..end of a sequence, one KV head.
template <class T>
void attend(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t begin,
            int64_t end, char* scratch) {
    const int64_t group = args.heads / args.shape.kv_heads, dim = args.shape.head_dim;
    typename WalkOf<T>::type walk(args, sequence, kv_head, scratch);
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
    const bool wide = args.shape.type == Type::f32;
    args.pool->deal(num_tiles * kv_heads, 1, [&](int64_t begin, int64_t end, int thread) {
        char* scratch = nullptr;
        if (args.shape.ints) {
            scratch = args.pool->scratch(
                thread, wide ? Expanded<float>::bytes(args.shape) : Expanded<bf16>::bytes(args.shape));
        }
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
            const auto walk = wide ? attend<float> : attend<bf16>;
            walk(args, sequence, item % kv_heads, first, last, scratch);
        }
    });
}

}  // namespace quire::QUIRE_ISA_NS
