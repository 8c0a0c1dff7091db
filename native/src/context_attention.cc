// Rounds of attention over the pieces of several ranks; context_attention.h has the plan. The parts
// of a round lie token after token, those of a token piece after piece; every rank counts the parts
// of all, so that nothing is announced.

#include "quire/context_attention.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace quire {

namespace {

// Parts that a rank computes in a round, in bytes: enough for many tokens to share a piece.
constexpr int64_t kPartBytes = int64_t{4} << 20;
constexpr int64_t kTokensAtOnce = 128;

// Numbers of the parts of `heads` heads, for a token and a piece.
int64_t numbers(const ContextShape& shape, int64_t heads) {
    return heads * (shape.head_dim + kPartNumbers);
}

// Pairs of a token and a piece of which a rank computes the parts in a round.
int64_t pairs_of(const ContextShape& shape) {
    const int64_t bytes = numbers(shape, shape.heads) * static_cast<int64_t>(sizeof(float));
    return std::max<int64_t>(kPartBytes / bytes, 1);
}

int64_t tokens_of(const ContextShape& shape) {
    return std::min({pairs_of(shape), kTokensAtOnce, std::max<int64_t>(shape.tokens, 1)});
}

// Pieces of rank `rank` among from .. to.
int64_t own_pieces(int64_t from, int64_t to, int64_t rank, int64_t degree) {
    const int64_t first = from + (rank + degree - from % degree) % degree;
    return first < to ? (to - first - 1) / degree + 1 : 0;
}

}  // namespace

struct ContextRunner::Places {
    TokenRun* runs;   // [tokens of a round]
    int64_t* starts;  // [degree, tokens] where a token has its parts of a rank
    float *parts, *received, *sums;
    int64_t num_bytes;
};

ContextRunner::Places ContextRunner::place(const ContextShape& shape) const {
    const int64_t pairs = pairs_of(shape), tokens = tokens_of(shape);
    const int64_t own = numbers(shape, shape.own_heads);
    int64_t bytes = 0;
    const auto take = [&](int64_t count, auto* of) {
        char* at = memory_.data() == nullptr ? nullptr : memory_.data() + bytes;
        bytes += round_up(count * static_cast<int64_t>(sizeof(*of)), 64);
        return reinterpret_cast<decltype(of)>(at);
    };
    Places places{};
    places.runs = take(tokens, places.runs);
    places.starts = take(shape.degree * shape.tokens, places.starts);
    places.parts = take(pairs * numbers(shape, shape.heads), places.parts);
    places.received = take(pairs * shape.degree * own, places.received);
    places.sums = take(tokens * own, places.sums);
    places.num_bytes = bytes;
    return places;
}

int64_t ContextRunner::bytes(const ContextShape& shape) {
    return ContextRunner().place(shape).num_bytes;
}

void ContextRunner::reserve(const ContextShape& shape) {
    const auto needed = static_cast<std::size_t>(bytes(shape));
    if (needed > memory_.bytes()) {
        memory_ = Memory(needed);
    }
}

void ContextRunner::poison() {
    if (memory_.bytes() > 0) std::memset(memory_.data(), 0xff, memory_.bytes());
}

void ContextRunner::run(const ContextArgs& args) {
    const AttentionArgs& all = args.attention;
    const ContextShape shape{all.num_tokens, all.heads, args.heads.end - args.heads.start,
                             all.shape.head_dim, args.degree};
    const Places places = place(shape);
    int64_t sequence = 0;
    for (int64_t begin = 0, count = 0; begin < all.num_tokens; begin += count) {
        count = std::min(tokens_of(shape), all.num_tokens - begin);
        Round round{begin, count, 0, INT64_MAX, 0};
        int64_t end = 0;
        for (int64_t token = begin; token < begin + count; ++token) {
            while (all.seq_starts[sequence + 1] <= token) ++sequence;
            const bool goes_on = token > begin && all.seq_starts[sequence] < token;
            const auto at = static_cast<int32_t>(token);
            if (!goes_on) {
                places.runs[round.num_runs++] = {at, at, static_cast<int32_t>(sequence)};
            }
            places.runs[round.num_runs - 1].end = at + 1;
            const int64_t position = all.positions[token];
            round.first = std::min(round.first, first_piece_of(position, all.window));
            end = std::max(end, position / kPiecePositions + 1);
        }
        const int64_t pieces = std::max<int64_t>(pairs_of(shape) / count, 1) * args.degree;
        for (; round.first < end; round.first += pieces) {
            round.stop = std::min(round.first + pieces, end);
            run_round(args, shape, places, round);
        }
    }
}

void ContextRunner::run_round(const ContextArgs& args, const ContextShape& shape,
                              const Places& places, const Round& round) {
    const AttentionArgs& all = args.attention;
    RankGroup& group = args.group;
    const KernelTable& kernels = all.pool->kernels();
    const auto first_member = static_cast<int64_t>(group.member()) / args.degree * args.degree;
    std::array<int64_t, RankGroup::kMaxDegree> counts{}, firsts{};
    for (int64_t rank = 0; rank < args.degree; ++rank) {
        int64_t* starts = places.starts + rank * shape.tokens;
        int64_t total = 0;
        for (int64_t token = round.begin; token < round.begin + round.count; ++token) {
            const int64_t position = all.positions[token];
            starts[token] = total;
            total += own_pieces(std::max(first_piece_of(position, all.window), round.first),
                                std::min(position / kPiecePositions + 1, round.stop), rank,
                                args.degree);
        }
        counts[static_cast<size_t>(first_member + rank)] = total;
    }
    kernels.attention_parts({all, places.runs, round.num_runs, args.rank, args.degree, round.first,
                             round.stop, places.parts, places.starts + args.rank * shape.tokens});
    int64_t before = 0;
    for (int64_t rank = 0; rank < args.degree; ++rank) {
        const auto member = static_cast<size_t>(first_member + rank);
        int64_t* starts = places.starts + rank * shape.tokens;
        for (int64_t i = 0; i < round.count; ++i) starts[round.begin + i] += before;
        firsts[member] = before;
        before += counts[member];
    }
    const int64_t size = shape.head_dim + kPartNumbers, bytes = sizeof(float);
    group.all_to_all({reinterpret_cast<const char*>(places.parts),
                      numbers(shape, shape.heads) * bytes, reinterpret_cast<char*>(places.received),
                      numbers(shape, shape.own_heads) * bytes, shape.heads * size, size, bytes,
                      {args.heads.start * size, args.heads.end * size}},
                     counts.data(), firsts.data(), *all.pool);
    kernels.merge_parts({all.y, round.begin, round.count, shape.own_heads, shape.head_dim,
                         all.window, all.positions, args.degree, round.first, round.stop,
                         places.received, places.starts, shape.tokens, places.sums, all.pool});
}

}  // namespace quire
