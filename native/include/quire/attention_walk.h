// Walk: up to some tens of rows of one KV head over the pieces of a paged cache, with their sums so
// far; WalkOf selects the one of a cache type. attention.cc has the recipe; attention_parts.cc uses
// a walk for single pieces. For files compiled once per instruction set.
#pragma once

#include "quire/amx_attention.h"
#include "quire/attention_tiles.h"
#include "quire/kernels.h"
#include "quire/kv_ints.h"
#include "quire/vec.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kRows = 96;  // rows that share a walk through the cache

// Up to kRows rows of one KV head, and their sums so far.
template <class T>
class Walk {
  public:
    static constexpr int kMostRows = kRows;

    // scratch: Expanded<T>::bytes(), for a cache of integers or of small blocks.
    Walk(const AttentionArgs& args, int64_t kv_head, char* scratch)
        : args_(args), stride_(round_up(args.shape.head_dim, kLanes)),
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

    // What the thread computes next; this variant prefetches nothing.
    void expect(const int32_t*, int64_t, int64_t, int64_t) {}

    // Rows begin .. end over pieces from `piece` on and before `stop`, or as far as they see. Their
    // positions rise, or they see all of every such piece. Returns how many pieces were read.
    int64_t attend(const int32_t* table, int begin, int end, int64_t piece, int64_t stop) {
        if (begin == end) return 0;
        const Stretch stretch = stretch_of(first_[begin], end_[end - 1], piece, stop);
        for (piece = stretch.piece; piece < stretch.stop; ++piece) {
            find(table, piece, stretch.first, stretch.end);
            for (int row = begin; row < end; row += kVecRows) {
                const int rows = end - row < kVecRows ? end - row : kVecRows;
                attend_tile(piece * kPiece, row, rows);
            }
        }
        return stretch.count();
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

    // Of a row that has attended to one piece: the weighted sum of its values [head_dim], the
    // largest score, and the sum of the probabilities.
    bool has_part(int row) const { return num_pieces_[row] > 0; }
    void write_part(int row, float* to) const {
        const int64_t dim = args_.shape.head_dim;
        __builtin_memcpy(to, out_ + row * stride_, static_cast<size_t>(dim) * sizeof(float));
        to[dim] = largest_[row];
        to[dim + 1] = sum_[row];
    }

    int num_rows() const { return num_rows_; }
    void clear() { num_rows_ = 0; }

  private:
    // Sets pointers to the keys and values of a piece, as far as they lie in first .. end.
    void find(const int32_t* table, int64_t piece, int64_t first, int64_t end) {
        const int64_t start = piece * kPiece, block_size = args_.shape.block_size;
        for (int64_t i = 0; i < kPiece; i += kGroup) {
            const int64_t position = start + i;
            if (position + kGroup <= first || position >= end) continue;
            const T *keys, *values;
            const bool is_small = block_size < kGroup;
            const char* block = head_ + (is_small ? 0 : table[position / block_size]) * block_bytes_;
            const int64_t within = position % block_size;
            if (is_small) {
                expanded_.gather(args_.shape, head_, table, position, first, end, i, &keys, &values);
            } else if (args_.shape.ints) {
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
    const int64_t stride_;  // of rows of sums, in whole vectors
    const int64_t block_bytes_, part_bytes_;
    const char* const head_;
    Scale scale_;
    Expanded<T> expanded_;
    Values<T> values_;
    const T* keys_[kPiece / kLanes];

    int num_rows_ = 0;
    const T* query_[kRows];
    int64_t first_[kRows], end_[kRows];  // visible positions
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

}  // namespace

}  // namespace quire::QUIRE_ISA_NS
