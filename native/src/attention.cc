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
// Rows of sequences with tables that have the same blocks in whole pieces that all of them see walk
// those together, and what is before and after each by itself: a row's pieces and their order are
// as ever.

#include "quire/attention_walk.h"

namespace quire::QUIRE_ISA_NS {

namespace {

// Rows processed together: tokens begin .. end of one sequence, or all tokens of several sequences
// with the same blocks in pieces from .. to, which all of these tokens see completely.
struct Share {
    int32_t begin, end;  // tokens; or, with shared pieces, sequences of `order`
    int32_t sequence;    // of the tokens
    int32_t from, to;
    int32_t run_begin = 0, run_end = 0;  // shares of the same sequence, including this one

    bool is_shared() const { return from < to; }

    // One token, which is memory-bound.
    bool is_single() const { return !is_shared() && end - begin == 1; }
};

// A share and a KV head.
struct Item {
    const Share* share;
    int64_t kv_head;
};

template <class WalkType>
void write_rows(const AttentionArgs& args, const WalkType& walk, int row, int64_t token,
                int64_t column) {
    if (args.y.type == Type::f32) {
        walk.write(row, static_cast<float*>(args.y.at(token)) + column);
    } else {
        walk.write(row, static_cast<bf16*>(args.y.at(token)) + column);
    }
}

// Returns the next work of a thread, for prefetching, if that is one token.
template <class WalkType>
void expect(const AttentionArgs& args, const Item& next, WalkType& walk) {
    if (next.share == nullptr || !next.share->is_single()) return;
    const int64_t end = args.positions[next.share->begin] + 1;
    const int64_t first = args.window > 0 && end > args.window ? end - args.window : 0;
    walk.expect(args.block_tables + next.share->sequence * args.table_columns, next.kv_head, first,
                end);
}

// Attends tokens begin..end of a sequence, one KV head; `next` follows. Returns the pieces read.
template <class T>
int64_t attend_tokens(const AttentionArgs& args, const Share& share, int64_t kv_head,
                      const Item& next, char* scratch) {
    const int64_t group = args.heads / args.shape.kv_heads, dim = args.shape.head_dim;
    typename WalkOf<T>::type walk(args, kv_head, scratch);
    expect(args, next, walk);
    int64_t first = share.begin * group;  // rows are numbered token * group + head of the group
    const int64_t stop = share.end * group;
    int64_t num_pieces = 0;
    for (int64_t row = first; row < stop; ++row) {
        walk.add_row(row / group, kv_head * group + row % group);
        if (!walk.full() && row + 1 < stop) continue;
        num_pieces += walk.attend(args.block_tables + share.sequence * args.table_columns, 0,
                                  walk.num_rows(), 0, kAllPieces);
        for (int i = 0; i < walk.num_rows(); ++i, ++first) {
            write_rows(args, walk, i, first / group, (kv_head * group + first % group) * dim);
        }
        walk.clear();
    }
    return num_pieces;
}

// Attends all tokens of several sequences: together in shared pieces, separately before and after.
template <class T>
int64_t attend_sharers(const AttentionArgs& args, const Share& share, const int32_t* order,
                    int64_t kv_head, char* scratch) {
    const int64_t group = args.heads / args.shape.kv_heads, dim = args.shape.head_dim;
    typename WalkOf<T>::type walk(args, kv_head, scratch);
    for (int32_t i = share.begin; i < share.end; ++i) {
        const int32_t* starts = args.seq_starts + order[i];
        for (int64_t row = starts[0] * group; row < starts[1] * group; ++row) {
            walk.add_row(row / group, kv_head * group + row % group);
        }
    }
    const auto each = [&](auto&& body) {
        int64_t num_pieces = 0;
        int row = 0;
        for (int32_t i = share.begin; i < share.end; ++i) {
            const int32_t* starts = args.seq_starts + order[i];
            const int rows = static_cast<int>((starts[1] - starts[0]) * group);
            num_pieces += body(args.block_tables + order[i] * args.table_columns, starts[0], row,
                               row + rows);
            row += rows;
        }
        return num_pieces;
    };
    int64_t num_pieces = 0;
    if (share.from > 0) {  // after a window's start: less than a piece, or unshared pieces
        num_pieces += each([&](const int32_t* table, int32_t, int begin, int end) {
            return walk.attend(table, begin, end, 0, share.from);
        });
    }
    num_pieces += walk.attend(args.block_tables + order[share.begin] * args.table_columns, 0,
                              walk.num_rows(), share.from, share.to);
    return num_pieces + each([&](const int32_t* table, int32_t token, int begin, int end) {
        const int64_t read = walk.attend(table, begin, end, share.to, kAllPieces);
        int64_t at = token * group;
        for (int row = begin; row < end; ++row, ++at) {
            write_rows(args, walk, row, at / group, (kv_head * group + at % group) * dim);
        }
        return read;
    });
}

// Groups sequences that are processed together. Sequences with a common prefix mostly have one
// token.
class Shares {
  public:
    // max_rows: of a group.
    Shares(const AttentionArgs& args, int64_t max_rows)
        : args_(args), group_(args.heads / args.shape.kv_heads),
          tokens_(tokens_of_walk(args, max_rows)), max_rows_(max_rows) {
        const int64_t most = args.num_tokens / tokens_ + args.num_sequences;
        const int64_t bytes = most * static_cast<int64_t>(sizeof(Share)) + args.num_sequences * 8;
        char* memory = args.pool->shared(bytes);
        shares_ = reinterpret_cast<Share*>(memory);
        order_ = reinterpret_cast<int32_t*>(memory + most * static_cast<int64_t>(sizeof(Share)));
        taken_ = order_ + args.num_sequences;
        // Every thread should have work, even with few KV heads.
        const int64_t parts = (2 * args.pool->num_threads() - 1) / args.shape.kv_heads + 1;
        if (parts > 1 && args.num_tokens * group_ / parts < max_rows_) {
            max_rows_ = args.num_tokens * group_ / parts;
        }
        for (int64_t s = 0; s < args.num_sequences; ++s) taken_[s] = 0;
        for (int64_t s = 0; s < args.num_sequences; ++s) {
            const int64_t begin = count_;
            if (!taken_[s] && !add_sharers(s)) add_tokens(s);
            for (int64_t i = begin; i < count_; ++i) {
                shares_[i].run_begin = static_cast<int32_t>(begin);
                shares_[i].run_end = static_cast<int32_t>(count_);
            }
        }
    }

    int64_t num_items() const { return count_ * args_.shape.kv_heads; }

    // Ordered by sequence, then by KV head: heads of a block are adjacent in memory.
    Item item(int64_t i) const {
        const Share& some = shares_[i / args_.shape.kv_heads];
        const int64_t run = some.run_end - some.run_begin;
        const int64_t within = i - some.run_begin * args_.shape.kv_heads;
        return {&shares_[some.run_begin + within % run], within / run};
    }

    const int32_t* order() const { return order_; }

  private:
    // As many as fit, but with few KV heads no more than leaves work for every thread.
    static int64_t tokens_of_walk(const AttentionArgs& args, int64_t max_rows) {
        const int64_t group = args.heads / args.shape.kv_heads;
        const int64_t most = group < max_rows ? max_rows / group : 1;
        const int64_t parts = (4 * args.pool->num_threads() - 1) / args.shape.kv_heads + 1;
        const int64_t each = (args.num_tokens - 1) / parts + 1;
        const int64_t least = group < 96 ? 96 / group : 1;
        const int64_t tokens = each > least ? each : least;
        return tokens < most ? tokens : most;
    }

    int64_t rows(int64_t s) const {
        return (args_.seq_starts[s + 1] - args_.seq_starts[s]) * group_;
    }

    // Pieces that all tokens of a sequence see to the end.
    int64_t whole_pieces(int64_t s) const {
        return (args_.positions[args_.seq_starts[s]] + 1) / kPiece;
    }

    // The first piece that all tokens of a sequence see from its beginning.
    int64_t first_piece(int64_t s) const {
        const int64_t first = args_.positions[args_.seq_starts[s + 1] - 1] - args_.window + 1;
        return args_.window > 0 && first > 0 ? (first + kPiece - 1) / kPiece : 0;
    }

    // Returns the end of the pieces in which two sequences have the same blocks, from piece `from`
    // on.
    int64_t shared_end(int64_t s, int64_t t, int64_t from) const {
        const int32_t* one = args_.block_tables + s * args_.table_columns;
        const int32_t* other = args_.block_tables + t * args_.table_columns;
        const int64_t a = whole_pieces(s), b = whole_pieces(t), most = a < b ? a : b;
        int64_t column = from * kPiece / args_.shape.block_size, piece = from;
        for (; piece < most; ++piece) {
            const int64_t end = ((piece + 1) * kPiece - 1) / args_.shape.block_size + 1;
            while (column < end && one[column] == other[column]) ++column;
            if (column < end) break;
        }
        return piece;
    }

    // s and the later sequences that share with it; false: there are none. The first two of them
    // determine the pieces; a sequence that attends to fewer of these is left out.
    bool add_sharers(int64_t s) {
        if (rows(s) == 0 || 2 * rows(s) > max_rows_) return false;
        int64_t from = first_piece(s), to = 0, together = rows(s);
        const int32_t first = num_ordered_;
        for (int64_t t = s + 1; t < args_.num_sequences; ++t) {
            if (taken_[t] || rows(t) == 0 || together + rows(t) > max_rows_) continue;
            const int64_t theirs = first_piece(t);
            if (to > 0 && theirs > from) continue;
            const int64_t begin = theirs > from ? theirs : from, end = shared_end(s, t, begin);
            if (end <= begin || end < to) continue;
            if (to == 0) {
                from = begin;
                to = end;
                order_[num_ordered_++] = static_cast<int32_t>(s);
            }
            order_[num_ordered_++] = static_cast<int32_t>(t);
            taken_[t] = 1;
            together += rows(t);
        }
        if (to == 0) return false;
        shares_[count_++] = {first, num_ordered_, 0, static_cast<int32_t>(from),
                             static_cast<int32_t>(to)};
        return true;
    }

    void add_tokens(int64_t s) {
        const int32_t stop = args_.seq_starts[s + 1];
        for (int32_t token = args_.seq_starts[s]; token < stop;) {
            const int32_t end = stop - token > tokens_ ? token + static_cast<int32_t>(tokens_)
                                                       : stop;
            shares_[count_++] = {token, end, static_cast<int32_t>(s), 0, 0};
            token = end;
        }
    }

    const AttentionArgs& args_;
    const int64_t group_, tokens_;  // heads of a KV head; tokens of a group
    int64_t max_rows_, count_ = 0;
    int32_t num_ordered_ = 0;
    Share* shares_;
    int32_t *order_, *taken_;
};

template <class T>
int64_t attend_share(const AttentionArgs& args, const Shares& shares, int64_t item,
                     char* scratch) {
    const Item now = shares.item(item);
    if (now.share->is_shared()) {
        return attend_sharers<T>(args, *now.share, shares.order(), now.kv_head, scratch);
    }
    const Item next = item + 1 < shares.num_items() ? shares.item(item + 1) : Item{nullptr, 0};
    return attend_tokens<T>(args, *now.share, now.kv_head, next, scratch);
}

}  // namespace

// Work is ordered by sequence, then KV head, then rows processed together: memory is faster if the
// heads of a block are read shortly after each other.
void attention(const AttentionArgs& args) {
    if (args.num_tokens == 0) return;
    const bool wide = args.shape.type == Type::f32;
    const Shares shares(args, wide ? WalkOf<float>::type::kMostRows : WalkOf<bf16>::type::kMostRows);
    args.pool->deal(shares.num_items(), 1,
                    [&](int64_t begin, int64_t end, int thread) {
        char* scratch = nullptr;
        if (args.shape.ints || args.shape.key_group() < kKeyGroup) {
            scratch = args.pool->scratch(
                thread, wide ? Expanded<float>::bytes(args.shape) : Expanded<bf16>::bytes(args.shape));
        }
        const auto attend = wide ? attend_share<float> : attend_share<bf16>;
        int64_t num_pieces = 0;
        for (int64_t item = begin; item < end; ++item) {
            num_pieces += attend(args, shares, item, scratch);
        }
        __atomic_fetch_add(args.pieces_read, num_pieces, __ATOMIC_RELAXED);
    });
}

}  // namespace quire::QUIRE_ISA_NS
