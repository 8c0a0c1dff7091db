// Attention over a bf16 cache by AMX tiles. attention.cc has the recipe of a row, which differs
// here only in the products: a score is a chain of steps of 32 columns, a piece's weighted values
// are a chain of steps of 32 positions, each step as in amx_tiles.h.
//
// Rows share tiles although they see different positions. A masked score is a column of its own and
// is dropped. A value that a row does not see is multiplied by probability 0, which changes nothing
// unless it is infinite or NaN: values that no row of the walk sees are replaced by zeros, and if a
// value that some rows see is not finite, these rows are computed one by one.
//
// Few rows that see the same positions of a piece are computed by amx_few_attention.h, with the
// same bits.
#pragma once

#include "quire/amx_beside.h"
#include "quire/amx_few_attention.h"
#include "quire/amx_probabilities.h"
#include "quire/amx_tiles.h"
#include "quire/attention_tiles.h"

#if defined(QUIRE_AMX)

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kWalkRows = 512;     // rows that share a walk through the cache
constexpr int kPairRows = 32;      // rows of two tiles
constexpr int kAhead = 64;         // positions that integers are prefetched ahead of their use
constexpr int kSteps = kPiece / static_cast<int>(kTileStep);
constexpr int kDimSteps = kMaxHeadDim / static_cast<int>(kTileStep);
static_assert(2 * kSteps * kDimSteps <= TileSteps::kMost, "scores and values of two units");

// What is prefetched while a group's values are copied: the values copied next, and the keys of the
// next scores. Null: nothing.
struct GroupsAhead {
    const bf16* values = nullptr;
    const bf16* keys = nullptr;
};

// Up to 32 rows and the positions of a piece that they see.
struct TileUnit {
    int row, count;
    int from, to;  // steps of positions that some rows see
    Span spans[kPairRows];
    const bf16* values[kSteps];  // from step `from` on
    float *scores, *largest, *sum;
    bf16* weights;
};

// Up to kWalkRows rows of one KV head, and their sums so far.
class TileWalk {
  public:
    static constexpr int kMostRows = kWalkRows;

    // scratch: Expanded<bf16>::bytes(), for a cache of integers or of small blocks.
    TileWalk(const AttentionArgs& args, int64_t kv_head, char* scratch)
        : args_(args), kv_head_(kv_head), dim_(args.shape.head_dim),
          stride_(round_up(args.shape.head_dim, kTileStep)),
          block_bytes_(kv_block_bytes(args.shape)), part_bytes_(kv_part_bytes(args.shape)),
          head_(static_cast<const char*>(args.cache) + 2 * part_bytes_ * kv_head),
          scale_(scale_of(args)), expanded_(args.shape, scratch) {
        if (args.shape.ints) expanded_.lend_scales(scale_);
        for (int i = 0; i < kPiece; ++i) ones_[i] = 1.0f;
    }

    void add_row(int64_t token, int64_t head) {
        const int64_t position = args_.positions[token];
        const int64_t first = args_.window > 0 ? position - args_.window + 1 : 0;
        pack_row(static_cast<const bf16*>(args_.q.at(token)) + head * dim_,
                 query_ + num_rows_ * stride_);
        first_[num_rows_] = first > 0 ? first : 0;
        end_[num_rows_] = position + 1;
        num_pieces_[num_rows_++] = 0;
    }

    bool full() const { return num_rows_ == kWalkRows; }

    // What the thread computes next: few rows of a KV head that see positions first .. end.
    void expect(const int32_t* table, int64_t kv_head, int64_t first, int64_t end) {
        if (args_.shape.key_group() < kGroup) return;
        const int64_t heads_on = 2 * part_bytes_ * (kv_head - kv_head_);
        first_keys(table, first / kFewPositions * kFewPositions, end, expected_);
        for (const char*& keys : expected_) keys += heads_on;
    }

    // Rows begin .. end over pieces from `piece` on and before `stop`, or as far as they see. Their
    // positions rise, or they see all of every such piece. Returns how many pieces were read.
    int64_t attend(const int32_t* table, int begin, int end, int64_t piece, int64_t stop) {
        if (begin == end) return 0;
        configured_ = false;
        const Stretch stretch = stretch_of(first_[begin], end_[end - 1], piece, stop);
        const int count = end - begin;
        const bool few = count <= kFewRows && dim_ % kTileStep == 0 &&
                         args_.shape.key_group() == kGroup;
        if (few) widen_queries(begin, count);
        for (piece = stretch.piece; piece < stretch.stop; ++piece) {
            if (few && see_the_same(piece * kPiece, begin, count)) {
                const auto attend = args_.shape.ints ? &TileWalk::attend_few<true>
                                                     : &TileWalk::attend_few<false>;
                (this->*attend)(table, piece * kPiece, stretch.end, begin, count);
                continue;
            }
            find(table, piece * kPiece, stretch.first, stretch.end);
            if (!configured_) configure_tiles(count < kTileRows ? count : kTileRows, kTileRows);
            configured_ = true;
            for (int row = begin; row < end; row += kPairRows) {
                const int rows = end - row < kPairRows ? end - row : kPairRows;
                attend_unit(piece * kPiece, row, rows);
            }
            drain();
        }
        if (configured_) release_tiles();
        return stretch.count();
    }

    template <class Y>
    void write(int row, Y* y) const {
        const Vec l = set1(sum_[row]);
        const float* o = out_ + row * stride_;
        int64_t c = 0;
        for (; c + kLanes <= dim_; c += kLanes) store(y + c, div(load(o + c), l));
        if (c < dim_) store_n(y + c, div(load(o + c), l), static_cast<int>(dim_ - c));
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
    // A query's columns, zero-padded to a whole step.
    void pack_row(const bf16* from, bf16* to) const {
        for (int64_t c = 0; c < stride_; c += kTileStep) {
            const int64_t left = dim_ - c;
            const __mmask32 some = left >= kTileStep ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
            _mm512_storeu_si512(to + c, _mm512_maskz_loadu_epi16(some, from + c));
        }
    }

    // ---- few rows

    void widen_queries(int row, int count) {
        for (int64_t i = 0; i < count * stride_; i += kLanes) {
            store(few_query_ + i, load(query_ + row * stride_ + i));
        }
    }

    Span seen(int row, int64_t start) const {
        const int64_t first = first_[row] - start, end = end_[row] - start;
        return {static_cast<int>(first > 0 ? first : 0),
                static_cast<int>(end < kPiece ? end : kPiece)};
    }

    bool see_the_same(int64_t start, int row, int count) const {
        const Span one = seen(row, start);
        if (one.first >= one.end) return false;
        for (int i = 1; i < count; ++i) {
            const Span other = seen(row + i, start);
            if (other.first != one.first || other.end != one.end) return false;
        }
        return true;
    }

    // Adds the piece at `start` to rows that see the same positions of it; they end at `end`.
    template <bool ints>
    __attribute__((noinline)) void attend_few(const int32_t* table, int64_t start, int64_t end,
                                              int row, int count) {
        constexpr int step = static_cast<int>(kTileStep);
        const Span span = seen(row, start);
        const int from = span.first / kGroup, to = (span.end + kGroup - 1) / kGroup;
        const int from_step = span.first / step, to_step = (span.end + step - 1) / step;
        FewPiece<ints> piece(dim_);
        find_few(table, start, end, span, &piece);
        piece.lay_out(from, to);
        piece.score(count, few_query_, stride_, scores_);
        if (ints) {
            for (int g = from; g < to; ++g) {
                expanded_.take_scales(piece.key_scales[g], piece.value_scales[g], g * kGroup);
            }
        }
        float largest[kFewRows], sum[kFewRows];
        for (int i = 0; i < count; ++i) {
            bf16* weights = weights_ + i * kPiece;
            probabilities(scores_ + i * kPiece, weights, span.first, span.end, scale_,
                          &largest[i], &sum[i]);
            for (int p = from_step * step; p < to_step * step; p += kLanes) {
                const bool is_seen = p >= from * kGroup && p < to * kGroup;
                store(few_weights_ + i * kPiece + p, is_seen ? load(weights + p) : zero());
            }
        }
        piece.weigh(count, few_weights_, piece_, stride_);
        merge_rows(row, count, largest, sum, piece_);
    }

    // Sets pointers to the groups of keys from `start` on that are read together.
    void first_keys(const int32_t* table, int64_t start, int64_t end, const char** keys) const {
        const int64_t block_size = args_.shape.block_size;
        const int64_t group_bytes = kGroup * dim_ * (args_.shape.ints ? 1 : 2);
        for (int j = 0; j < kStreams; ++j) {
            const int64_t next = start + j * kGroup, position = next < end ? next : start;
            keys[j] = head_ + table[position / block_size] * block_bytes_ +
                      position % block_size / kGroup * group_bytes;
        }
    }

    // Sets pointers to the groups of the piece at `start` of which `span` is visible. Partly
    // visible steps of values are zero-padded; integers are not, as they are finite and have
    // probability 0.
    template <bool ints>
    void find_few(const int32_t* table, int64_t start, int64_t end, Span span,
                  FewPiece<ints>* piece) {
        const int64_t block_size = args_.shape.block_size;
        const int64_t group_bytes = kGroup * dim_ * (ints ? 1 : 2);
        const auto block_at = [&](int64_t position) {
            return head_ + table[position / block_size] * block_bytes_;
        };
        for (int g = 0; g < kPiece / kGroup; ++g) {
            piece->keys[g] = piece->values[g] = nullptr;
            piece->key_scales[g] = piece->value_scales[g] = nullptr;
            if ((g + 1) * kGroup <= span.first || g * kGroup >= span.end) continue;
            const int64_t position = start + g * kGroup, within = position % block_size;
            const char* keys = block_at(position);
            const char* values = keys + part_bytes_;
            piece->keys[g] = keys + within / kGroup * group_bytes;
            piece->values[g] = values + within / kGroup * group_bytes;
            if (!ints) continue;
            piece->key_scales[g] = keys + expanded_.scales_at(within);
            piece->value_scales[g] = values + expanded_.scales_at(within);
        }
        if (start + kPiece < end) {
            first_keys(table, start + kPiece, end, piece->after);
        } else {
            for (int j = 0; j < kStreams; ++j) piece->after[j] = expected_[j];
        }
        constexpr int step = static_cast<int>(kTileStep);
        for (int s = span.first / step; s * step < span.end; ++s) {
            const char** values = piece->values + 2 * s;
            if (ints) {
                if (values[0] == nullptr) values[0] = values[1];
                if (values[1] == nullptr) values[1] = values[0];
            } else if (s * step < span.first || (s + 1) * step > span.end) {
                const Span here = {span.first - s * step, span.end - s * step};
                for (int half = 0; half < 2; ++half) {
                    bf16* copy = copied_ + (s * kTileStep + half * kGroup) * dim_;
                    const char* from = values[half] != nullptr ? values[half] : values[1 - half];
                    copy_group(reinterpret_cast<const bf16*>(from), half * kGroup, here, copy);
                    values[half] = reinterpret_cast<const char*>(copy);
                }
            }
        }
    }

    // ---- tiles

    // Sets pointers to the keys and values of the piece at `start`, as far as they lie in first ..
    // end.
    void find(const int32_t* table, int64_t start, int64_t first, int64_t end) {
        const int64_t block_size = args_.shape.block_size, key_size = kGroup * round_up(dim_, 2);
        const bf16* keys[kPiece / kGroup];
        const bf16* values[kPiece / kGroup];
        for (int g = 0; g < kPiece / kGroup; ++g) {
            const int64_t position = start + g * kGroup;
            keys[g] = values[g] = nullptr;
            if (position + kGroup <= first || position >= end) continue;
            if (block_size < kGroup) {
                expanded_.gather(args_.shape, head_, table, position, first, end, g * kGroup,
                                 &keys[g], &values[g]);
                continue;
            }
            const char* block = head_ + table[position / block_size] * block_bytes_;
            const int64_t group = position % block_size / kGroup;
            if (args_.shape.ints) {
                const int64_t ahead = position + kAhead;
                if (ahead < end) {
                    const char* later = head_ + table[ahead / block_size] * block_bytes_;
                    expanded_.fetch(later, later + part_bytes_, ahead % block_size);
                }
                expanded_.group(block, block + part_bytes_, group * kGroup, g * kGroup, &keys[g],
                                &values[g]);
                continue;
            }
            keys[g] = reinterpret_cast<const bf16*>(block) + group * key_size;
            values[g] = reinterpret_cast<const bf16*>(block + part_bytes_) + group * kGroup * dim_;
        }
        for (int s = 0; s < kSteps; ++s) {
            const int64_t position = start + s * kTileStep;
            if (position + kTileStep <= first || position >= end) continue;
            find_keys(keys[2 * s] != nullptr ? keys[2 * s] : keys[2 * s + 1], 2 * s);
            find_keys(keys[2 * s + 1] != nullptr ? keys[2 * s + 1] : keys[2 * s], 2 * s + 1);
            finite_[s] = args_.shape.ints ? 1 : -1;
            valid_[s].first = static_cast<int>(first > position ? first - position : 0);
            valid_[s].end = static_cast<int>(end - position < kTileStep ? end - position
                                                                        : kTileStep);
            const bool whole = valid_[s].first == 0 && valid_[s].end == kTileStep;
            if (whole && values[2 * s + 1] == values[2 * s] + kGroup * dim_) {
                values_[s] = values[2 * s];
            } else {
                values_[s] = copied_ + s * kTileStep * dim_;
                const int next = 2 * s + 2 < kPiece / kGroup ? 2 * s + 2 : 2 * s + 1;
                copy_group(values[2 * s], 0, valid_[s], copied_ + s * kTileStep * dim_,
                           {values[2 * s + 1], keys[2 * s]});
                copy_group(values[2 * s + 1], kGroup, valid_[s],
                           copied_ + (s * kTileStep + kGroup) * dim_,
                           {values[next], keys[2 * s + 1]});
            }
        }
    }

    // Steps of a group of keys; the last is zero-padded if it is not whole.
    void find_keys(const bf16* keys, int group) {
        const int64_t pairs = round_up(dim_, 2) / 2, steps = stride_ / kTileStep;
        for (int64_t d = 0; d < steps; ++d) keys_[group][d] = keys + d * kTileRows * kTileStep;
        const int64_t whole = pairs / kTileRows;
        if (whole == steps) return;
        bf16* to = last_keys_ + group * kTileRows * kTileStep;
        const bf16* from = keys + whole * kTileRows * kTileStep;
        for (int64_t pair = 0; pair < kTileRows; ++pair) {
            _mm512_storeu_si512(to + pair * kTileStep,
                                pair < pairs - whole * kTileRows
                                    ? _mm512_loadu_si512(from + pair * kTileStep)
                                    : _mm512_setzero_si512());
        }
        keys_[group][whole] = to;
    }

    // Values of 16 positions, `offset` positions into their step; zeros for those outside `seen`.
    void copy_group(const bf16* from, int offset, Span seen, bf16* to,
                    GroupsAhead ahead = {}) const {
        for (int pair = 0; pair < kGroup / 2; ++pair) {
            for (int64_t i = pair * dim_ * 2; i < (pair + 1) * dim_ * 2; i += 32) {
                if (ahead.values != nullptr) prefetch_l1(ahead.values + i);
                if (ahead.keys != nullptr) prefetch_l2(ahead.keys + i);
            }
            const int position = offset + 2 * pair;
            const bool one = position >= seen.first && position < seen.end;
            const bool other = position + 1 >= seen.first && position + 1 < seen.end;
            const uint32_t bits = (one ? 0xffffu : 0u) | (other ? 0xffff0000u : 0u);
            for (int64_t c = 0; c < dim_; c += kLanes) {
                const __mmask16 some = first_lanes(static_cast<int>(
                    dim_ - c < kLanes ? dim_ - c : kLanes));
                const int64_t at = pair * dim_ * 2 + 2 * c;
                const __m512i v = bits == 0 ? _mm512_setzero_si512()
                                            : _mm512_maskz_loadu_epi32(some, from + at);
                _mm512_mask_storeu_epi32(to + at, some,
                                         _mm512_and_si512(v, _mm512_set1_epi32(
                                                                 static_cast<int>(bits))));
            }
        }
    }

    bool finite(int s) {
        if (finite_[s] < 0) {
            const __m512i exponent = _mm512_set1_epi16(0x7f80);
            finite_[s] = 1;
            for (int64_t i = 0; i < kTileStep * dim_; i += 32) {
                const int64_t left = kTileStep * dim_ - i;
                const __mmask32 some = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
                const __m512i v = _mm512_maskz_loadu_epi16(some, values_[s] + i);
                if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent) != 0) {
                    finite_[s] = 0;
                    break;
                }
            }
        }
        return finite_[s] == 1;
    }

    // Adds the piece at position `start` to rows row .. row + count, or starts to.
    void attend_unit(int64_t start, int row, int count) {
        while (count > 0 && end_[row] <= start) ++row, --count;
        while (count > 0 && first_[row + count - 1] >= start + kPiece) --count;
        if (count == 0) return;
        TileUnit& unit = units_[num_units_ % 3];
        const int slot = num_units_++ % 2;
        unit.row = row;
        unit.count = count;
        unit.scores = scores_ + slot * kPairRows * kPiece;
        unit.weights = weights_ + slot * kPairRows * kPiece;
        unit.largest = largest_of_[slot];
        unit.sum = sum_of_[slot];
        for (int i = 0; i < count; ++i) {
            const int64_t first = first_[row + i] - start, end = end_[row + i] - start;
            unit.spans[i] = {static_cast<int>(first > 0 ? first : 0),
                             static_cast<int>(end < kPiece ? end : kPiece)};
        }
        constexpr int step = static_cast<int>(kTileStep);
        unit.from = unit.spans[0].first / step;
        unit.to = (unit.spans[count - 1].end + step - 1) / step;
        if (count > 1 && !may_share(unit.spans, count, unit.from, unit.to)) {
            drain();  // this unit replaces one in progress
            for (int i = 0; i < count; ++i) {
                attend_unit(start, row + i, 1);
                drain();
            }
            return;
        }
        for (int s = unit.from; s < unit.to; ++s) unit.values[s - unit.from] = values_[s];
        if (count == 1) mask_values(unit.spans[0], unit.from, unit.to, unit.values);
        push(&unit);
    }

    // Three units are in progress: while this one is scored, the previous one becomes
    // probabilities, and the one before that is added to its rows.
    void push(TileUnit* unit) {
        if (weighed_ != nullptr) plan_values(*weighed_);
        if (unit != nullptr) plan_scores(*unit);
        if (scored_ != nullptr) make_probabilities(*scored_);
        steps_.finish();
        if (weighed_ != nullptr) merge_unit(*weighed_);
        weighed_ = scored_;
        scored_ = unit;
    }

    // Finishes the units in progress.
    void drain() {
        push(nullptr);
        push(nullptr);
    }

    void plan_scores(const TileUnit& unit) {
        const int64_t stride = stride_ * 2, steps = stride_ / kTileStep;
        for (int s = unit.from; s < unit.to; ++s) {
            for (int64_t d = 0; d < steps; ++d) {
                steps_.plan({query_ + unit.row * stride_ + d * kTileStep, keys_[2 * s][d],
                             keys_[2 * s + 1][d],
                             d + 1 == steps ? unit.scores + s * kTileStep : nullptr,
                             static_cast<int32_t>(stride), kTileStep * 2, kPiece * 4,
                             unit.count > kTileRows, d == 0});
            }
        }
    }

    void plan_values(const TileUnit& unit) {
        const int steps = unit.to - unit.from;
        for (int64_t c = 0; c < dim_; c += 2 * kLanes) {
            const int64_t second = c + kLanes < dim_ ? 2 * kLanes : 0;
            for (int s = 0; s < steps; ++s) {
                const bf16* left = unit.values[s] + 2 * c;
                steps_.plan({unit.weights + (unit.from + s) * kTileStep, left, left + second,
                             s + 1 == steps ? piece_ + c : nullptr, kPiece * 2,
                             static_cast<int32_t>(dim_ * 4), static_cast<int32_t>(stride_ * 4),
                             unit.count > kTileRows, s == 0});
            }
        }
    }

    void make_probabilities(const TileUnit& unit) {
        steps_.spread(unit.count * (unit.to - unit.from) / 4 + unit.count / 4);
        constexpr int step = static_cast<int>(kTileStep);
        for (int i = 0; i < unit.count; i += kTileRows) {
            const int count = unit.count - i < kTileRows ? unit.count - i : kTileRows;
            const auto make = args_.shape.ints ? probabilities_beside<true>
                                               : probabilities_beside<false>;
            make(unit.scores + i * kPiece, unit.weights + i * kPiece, unit.spans + i, count, scale_,
                 ones_, unit.largest + i, unit.sum + i, steps_);
        }
        for (int i = 0; i < unit.count; ++i) {
            bf16* weights = unit.weights + i * kPiece;
            const int begun = unit.spans[i].first / kLanes * kLanes;
            const int ended = (unit.spans[i].end + kLanes - 1) / kLanes * kLanes;
            for (int p = unit.from * step; p < begun; p += kLanes) store(weights + p, zero());
            for (int p = ended; p < unit.to * step; p += kLanes) store(weights + p, zero());
        }
    }

    void merge_unit(const TileUnit& unit) {
        for (int first = 0; first < unit.count; first += kLanes) {
            const int count = unit.count - first < kLanes ? unit.count - first : kLanes;
            merge_rows(unit.row + first, count, unit.largest + first, unit.sum + first,
                       piece_ + first * stride_);
        }
    }

    // Returns whether no row of a tile meets an invisible value that is not finite.
    bool may_share(const Span* spans, int count, int from, int to) {
        for (int s = from; s < to; ++s) {
            const int begin = s * static_cast<int>(kTileStep);
            const int seen_from = spans[count - 1].first - begin, seen_to = spans[0].end - begin;
            const bool all = seen_from <= valid_[s].first && seen_to >= valid_[s].end;
            if (!all && !finite(s)) return false;
        }
        return true;
    }

    // Zeroes values of a step that a row alone does not see, if they are not finite.
    void mask_values(Span seen, int from, int to, const bf16** values) {
        bf16* free = masked_;
        for (int s = from; s < to; ++s) {
            const int begin = s * static_cast<int>(kTileStep);
            const Span here = {seen.first - begin, seen.end - begin};
            const bool all = here.first <= valid_[s].first && here.end >= valid_[s].end;
            if (all || finite(s)) continue;
            copy_group(values_[s], 0, here, free);
            copy_group(values_[s] + kGroup * dim_, kGroup, here, free + kGroup * dim_);
            values[s - from] = free;
            free += kTileStep * dim_;
        }
    }

    // Adds a piece to `count` rows, at most 16.
    void merge_rows(int row, int count, const float* largest, const float* sum,
                    const float* piece) {
        const Vec old = load_n(largest_ + row, count), fresh = load_n(largest, count);
        const Vec most = max(old, fresh);
        const Vec a = exp2_below<float>(sub(old, most)), b = exp2_below<float>(sub(fresh, most));
        const Vec sums = fma(load_n(sum, count), b, mul(load_n(sum_ + row, count), a));
        float max_of[kLanes], sum_of[kLanes], old_part[kLanes], fresh_part[kLanes];
        store(max_of, most);
        store(sum_of, sums);
        store(old_part, a);
        store(fresh_part, b);
        for (int i = 0; i < count; ++i, piece += stride_) {
            float* out = out_ + (row + i) * stride_;
            const bool first = num_pieces_[row + i]++ == 0;
            largest_[row + i] = first ? largest[i] : max_of[i];
            sum_[row + i] = first ? sum[i] : sum_of[i];
            if (first) {
                for (int64_t c = 0; c < stride_; c += kLanes) store(out + c, load(piece + c));
                continue;
            }
            const Vec kept = set1(old_part[i]), added = set1(fresh_part[i]);
            for (int64_t c = 0; c < stride_; c += kLanes) {
                store(out + c, fma(load(piece + c), added, mul(load(out + c), kept)));
            }
        }
    }

    const AttentionArgs& args_;
    const int64_t kv_head_;
    const int64_t dim_, stride_;  // columns of a head; of rows of queries and sums, in whole steps
    const int64_t block_bytes_, part_bytes_;
    const char* const head_;
    Scale scale_;
    Expanded<bf16> expanded_;
    const bf16* keys_[kPiece / kGroup][kDimSteps];
    const bf16* values_[kSteps];
    Span valid_[kSteps];  // positions of a step that some row of the walk sees
    int finite_[kSteps];  // -1: not checked yet
    const char* expected_[kStreams] = {};  // null: unknown
    bool configured_ = false;              // whether the tiles are configured

    int num_rows_ = 0;
    int64_t first_[kWalkRows], end_[kWalkRows];  // visible positions
    int num_pieces_[kWalkRows];
    float largest_[kWalkRows], sum_[kWalkRows];

    TileSteps steps_;
    alignas(64) float ones_[kPiece];
    TileUnit units_[3];
    int num_units_ = 0;
    TileUnit *scored_ = nullptr, *weighed_ = nullptr;
    float largest_of_[2][kPairRows], sum_of_[2][kPairRows];

    alignas(64) bf16 query_[(kWalkRows + kPairRows) * kMaxHeadDim];
    alignas(64) float few_query_[kFewRows * kMaxHeadDim];
    alignas(64) float few_weights_[kFewRows * kPiece];
    alignas(64) bf16 last_keys_[kPiece * kTileStep];
    alignas(64) bf16 copied_[kPiece * kMaxHeadDim + 64];
    alignas(64) bf16 masked_[2 * kTileStep * kMaxHeadDim + 64];
    alignas(64) float scores_[2 * kPairRows * kPiece];
    alignas(64) bf16 weights_[2 * kPairRows * kPiece];
    alignas(64) float piece_[kPairRows * kMaxHeadDim];
    alignas(64) float out_[kWalkRows * kMaxHeadDim];
};

}  // namespace

}  // namespace quire::QUIRE_ISA_NS

#endif
