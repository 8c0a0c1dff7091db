// score: log-probabilities of raw logits for known tokens: a target and its rank, the best
// alternatives, and listed ids. Plain loops over fixed blocks of lanes, which the compiler
// vectorizes. Rows are distributed to threads whole. Largest values, counts and sums of masses are
// exact in any order, so a row has one result.

#include "quire/sampling_score.h"

#include "quire/kernels.h"
#include "quire/recipe.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kBlock = 32;
constexpr int kMasses = 256;
constexpr int kSums = 8;
constexpr float kInfinity = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");

// Returns the largest value, or NaN if there is NaN or +inf, or nothing above -inf.
float largest(const float* values, int32_t count) {
    alignas(64) float best[kBlock];
    alignas(64) int32_t fine[kBlock];
    for (int i = 0; i < kBlock; i++) {
        best[i] = -kInfinity;
        fine[i] = -1;
    }
    const auto add = [&](const float* block, int lanes) __attribute__((always_inline)) {
        for (int i = 0; i < lanes; i++) {
            fine[i] &= block[i] < kInfinity ? -1 : 0;
            best[i] = block[i] > best[i] ? block[i] : best[i];
        }
    };
    int32_t first = 0;
    for (; first + kBlock <= count; first += kBlock) add(values + first, kBlock);
    add(values + first, count - first);
    float found = -kInfinity;
    for (int i = 0; i < kBlock; i++) {
        if (fine[i] == 0) return kNaN;
        found = best[i] > found ? best[i] : found;
    }
    return found > -kInfinity ? found : kNaN;
}

// Returns the sum of exp(value - top), each rounded to a mass. One loop per numeric type, so that
// all of them are vectorized.
double mass_sum(const float* values, int32_t count, float top) {
    alignas(64) float exps[kMasses];
    alignas(64) double masses[kMasses];
    alignas(64) double sums[kSums] = {};
    for (int32_t first = 0; first < count; first += kMasses) {
        const int32_t some = count - first < kMasses ? count - first : kMasses;
        for (int i = 0; i < some; i++) exps[i] = recipe::exp_below(values[first + i] - top);
        for (int i = 0; i < some; i++) masses[i] = recipe::mass(exps[i]);
        for (int i = some; i < kMasses; i++) masses[i] = 0.0;
        for (int i = 0; i < kMasses; i += kSums) {
            for (int j = 0; j < kSums; j++) sums[j] += masses[i + j];
        }
    }
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

// How many of count values are above `least`, or at least that.
template <bool kOrEqual>
int32_t count_above(const float* values, int32_t count, float least) {
    int32_t found = 0;
    for (int32_t i = 0; i < count; i++) {
        found += (kOrEqual ? values[i] >= least : values[i] > least) ? 1 : 0;
    }
    return found;
}

// The `wanted` largest values above -inf, best first, ties by id; returns how many there are.
int32_t best(const float* values, int32_t count, int32_t wanted, int32_t* ids) {
    if (wanted == 0) return 0;
    int32_t num_found = 0;
    float least = -kInfinity;  // ids rise: an equal value comes too late
    for (int32_t first = 0; first < count; first += kBlock) {
        const int32_t end = first + kBlock < count ? first + kBlock : count;
        int32_t any = 0;
        for (int32_t id = first; id < end; id++) any |= values[id] > least ? -1 : 0;
        if (any == 0) continue;
        for (int32_t id = first; id < end; id++) {
            if (!(values[id] > least)) continue;
            int32_t place = num_found < wanted ? num_found++ : wanted - 1;
            for (; place > 0 && values[ids[place - 1]] < values[id]; place--) {
                ids[place] = ids[place - 1];
            }
            ids[place] = id;
            if (num_found == wanted) least = values[ids[wanted - 1]];
        }
    }
    return num_found;
}

void score_row(const ScoreArgs& args, int64_t row) {
    const float* values = args.logits + row * args.stride;
    int32_t* top_ids = args.top_ids + row * args.width;
    float* top_logprobs = args.top_logprobs + row * args.width;
    const float top = largest(values, args.vocabulary);
    const bool failed = !(top == top);
    const float minus_log_total =
        failed ? kNaN
               : recipe::minus_log(static_cast<float>(mass_sum(values, args.vocabulary, top)));
    const auto logprob = [&](int32_t id) { return (values[id] - top) + minus_log_total; };

    const int32_t target = args.targets[row];
    args.logprobs[row] = failed || target < 0 ? kNaN : logprob(target);
    args.ranks[row] = failed ? -1 : 0;
    if (!failed && target >= 0) {
        const int32_t behind = target + 1;
        args.ranks[row] =
            1 + count_above<true>(values, target, values[target]) +
            count_above<false>(values + behind, args.vocabulary - behind, values[target]);
    }
    int32_t ids[kMaxScoreTop];
    const int32_t num_best =
        failed ? 0 : best(values, args.vocabulary, args.num_top[row], ids);
    for (int32_t i = 0; i < args.width; i++) {
        top_ids[i] = i < num_best ? ids[i] : -1;
        top_logprobs[i] = i < num_best ? logprob(ids[i]) : kNaN;
    }
    for (int32_t i = args.listed_starts[row]; i < args.listed_starts[row + 1]; i++) {
        args.listed_logprobs[i] = failed ? kNaN : logprob(args.listed_ids[i]);
    }
}

}  // namespace

void score(const ScoreArgs& args) {
    args.pool->deal(args.rows, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; row++) score_row(args, row);
    });
}

}  // namespace quire::QUIRE_ISA_NS
