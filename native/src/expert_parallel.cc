// Experts that are distributed over ranks (experts.h): every rank has all rows and all routing
// weights, so that each knows which rank computes which pair of a row and an expert, and nothing is
// asked for. A rank computes the pairs of its experts, whole; the ranks exchange the outputs
// (all_to_all: each receives its own columns of all pairs), and sum them by row in the order of the
// experts' ids. A pair has the same bits on every rank, so an expert that several ranks have is
// shared as suits the load.

#include <algorithm>
#include <array>
#include <cstring>

#include "quire/expert_scratch.h"

namespace quire {

namespace {

// Reading an expert's weights takes about as long as the arithmetic of so many rows; a replicated
// expert is computed by a further rank for each so many.
constexpr int64_t kReadPairs = 16;

bool holds(uint64_t holders, int64_t rank) { return (holders >> rank & 1) != 0; }

}  // namespace

// Sets part[rank, expert], the pairs of an expert that a rank computes: all of them where one rank
// has the expert, else as many ranks as it pays to read it at, those with the least to do.
void ExpertRunner::deal(const ExpertsArgs& args, int64_t degree, const Pairs& pairs) const {
    const int64_t experts = args.routing.width;
    std::array<int64_t, RankGroup::kMaxDegree> work{};
    std::fill_n(pairs.part, degree * experts, 0);
    const auto give = [&](int64_t rank, int64_t expert, int64_t count) {
        pairs.part[rank * experts + expert] = static_cast<int32_t>(count);
        work[static_cast<size_t>(rank)] += count + kReadPairs;
    };
    const auto is_replicated = [&](int64_t expert) {
        return (args.holders[expert] & (args.holders[expert] - 1)) != 0;
    };
    for (int64_t expert = 0; expert < experts; ++expert) {
        const int64_t count = pairs.start[expert + 1];
        if (count == 0 || is_replicated(expert)) continue;
        for (int64_t rank = 0; rank < degree; ++rank) {
            if (holds(args.holders[expert], rank)) give(rank, expert, count);
        }
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
        const int64_t count = pairs.start[expert + 1];
        if (count == 0 || !is_replicated(expert)) continue;
        std::array<int64_t, RankGroup::kMaxDegree> of{};
        int64_t holders = 0;
        for (int64_t rank = 0; rank < degree; ++rank) {
            if (holds(args.holders[expert], rank)) of[static_cast<size_t>(holders++)] = rank;
        }
        std::stable_sort(of.begin(), of.begin() + holders, [&](int64_t one, int64_t other) {
            return work[static_cast<size_t>(one)] < work[static_cast<size_t>(other)];
        });
        const int64_t parts = std::clamp<int64_t>(count / kReadPairs, 1, holders);
        for (int64_t i = 0; i < parts; ++i) {
            give(of[static_cast<size_t>(i)], expert, count * (i + 1) / parts - count * i / parts);
        }
    }
}

// Places the pairs by rank, then by expert, then by row: part[rank, expert] becomes the end of what
// the rank computes of the expert, and the begin is the end before it. Returns the ends of ranks.
std::array<int64_t, RankGroup::kMaxDegree> ExpertRunner::place_by_rank(const ExpertsArgs& args,
                                                                       int64_t degree,
                                                                       const Pairs& pairs) const {
    const int64_t experts = args.routing.width;
    std::array<int64_t, RankGroup::kMaxDegree> ends{};
    int32_t end = 0;
    for (int64_t at = 0; at < degree * experts; ++at) {
        pairs.next[at] = end;
        end += pairs.part[at];
        pairs.part[at] = end;
        ends[static_cast<size_t>(at / experts)] = end;
    }
    std::fill_n(pairs.start, experts, 0);  // from here on the rank that gets an expert's next pair
    for (int64_t i = 0; i < args.rows * args.top_k; ++i) {
        const int64_t expert = pairs.expert[i];
        pairs.place[i] = -1;
        if (expert < 0) continue;
        int32_t& rank = pairs.start[expert];
        const auto at = [&] { return rank * experts + expert; };
        while (pairs.next[at()] == pairs.part[at()]) ++rank;
        pairs.place[i] = pairs.next[at()]++;
        pairs.row[pairs.place[i]] = static_cast<int32_t>(i / args.top_k);
    }
    return ends;
}

// The pairs first .. end of this rank as pieces; returns how many there are.
int64_t ExpertRunner::own_pieces(const ExpertsArgs& args, const Pairs& pairs, int64_t first,
                                 int64_t end) const {
    const int64_t experts = args.routing.width, rank = args.group->member();
    int64_t count = 0, own = 0;
    for (int64_t expert = 0; expert < experts; ++expert) {
        if (!holds(args.holders[expert], rank)) continue;
        const int64_t at = rank * experts + expert;
        const int64_t from = std::max<int64_t>(at > 0 ? pairs.part[at - 1] : 0, first);
        const int64_t to = std::min<int64_t>(pairs.part[at], end);
        if (from < to) pairs.pieces[count++] = {own, from, to};
        ++own;
    }
    return count;
}

void ExpertRunner::run_distributed(const ExpertsArgs& args, const ExpertShape& shape,
                                   const Pairs& pairs) {
    const int64_t experts = shape.experts, degree = shape.degree, most = batch_pairs(shape);
    const auto own = static_cast<size_t>(args.group->member());
    deal(args, degree, pairs);
    const auto ends = place_by_rank(args, degree, pairs);
    const Rows all = rows_at(pairs.all, line(shape.share, Type::f32), Type::f32, shape.share);
    // Batches end as in one process; every rank knows those of the others.
    const auto batch_end = [&](size_t rank, int64_t first) {
        int64_t end = first;
        const int32_t* parts = pairs.part + static_cast<int64_t>(rank) * experts;
        for (int64_t expert = 0; expert < experts; ++expert) {
            if (parts[expert] > first && parts[expert] - first <= most) end = parts[expert];
        }
        return end > first ? end : std::min(first + most, ends[rank]);
    };
    std::array<int64_t, RankGroup::kMaxDegree> firsts{}, counts{};
    for (size_t rank = 1; rank < static_cast<size_t>(degree); ++rank) firsts[rank] = ends[rank - 1];
    for (;;) {
        bool is_done = true;
        for (size_t rank = 0; rank < static_cast<size_t>(degree); ++rank) {
            counts[rank] = batch_end(rank, firsts[rank]) - firsts[rank];
            is_done = is_done && counts[rank] == 0;
        }
        if (is_done) break;
        RankGroup::Shares shares{pairs.out, line(shape.hidden, Type::f32), pairs.all,
                                 line(shape.share, Type::f32), shape.hidden, args.unit,
                                 type_bytes(Type::f32)};
        if (counts[own] > 0) {
            const int64_t first = firsts[own], end = first + counts[own];
            const int64_t count = own_pieces(args, pairs, first, end);
            outputs(args, shape, pairs, count, first, end);
        }
        args.group->all_to_all(shares, counts.data(), firsts.data(), *args.pool);
        for (size_t rank = 0; rank < static_cast<size_t>(degree); ++rank) {
            firsts[rank] += counts[rank];
        }
    }
    const int64_t total = ends[static_cast<size_t>(degree - 1)];
    args.pool->kernels().sum_experts({all, args.y, args.rows, args.top_k, pairs.place,
                                      pairs.weight, 0, total, args.pool});
}

}  // namespace quire
