// The loops of sampling, written so that a compiler vectorizes them: fixed blocks of lanes, no
// calls, selects instead of branches. Each lane keeps its own best; ids rise within a lane, so a
// strict comparison keeps the lowest id, and lanes are merged by (value, lower id).

#include "quire/kernels.h"
#include "quire/recipe.h"
#include "quire/sampling.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr int kLanes = 32;
constexpr float kInfinity = __builtin_inff();

// The best of each lane so far. `add` takes one block: count ids from `first` on.
struct Lanes {
    alignas(64) float best[kLanes];
    alignas(64) int32_t id[kLanes];
    alignas(64) int32_t fine[kLanes];  // 0 once a lane saw NaN or +inf

    Lanes() {
        for (int i = 0; i < kLanes; i++) {
            best[i] = -kInfinity;
            id[i] = -1;
            fine[i] = -1;
        }
    }

    inline __attribute__((always_inline)) void add(const float* block, int32_t first, int count) {
        for (int i = 0; i < count; i++) {
            const int32_t wins = block[i] > best[i] ? -1 : 0;
            fine[i] &= block[i] < kInfinity ? -1 : 0;
            id[i] = wins != 0 ? first + i : id[i];
            best[i] = wins != 0 ? block[i] : best[i];
        }
    }

    BestToken merged(bool* bad) const {
        BestToken found{-kInfinity, -1};
        for (int i = 0; i < kLanes; i++) {
            if (!fine[i]) *bad = true;
            if (id[i] < 0) continue;
            const bool wins = best[i] > found.value || (best[i] == found.value && id[i] < found.id);
            if (found.id < 0 || wins) found = BestToken{best[i], id[i]};
        }
        return found;
    }
};

// Calls step(first, count) for blocks of kLanes ids; the last may be shorter.
template <class Step>
inline __attribute__((always_inline)) void each(int32_t begin, int32_t end, const Step& step) {
    int32_t first = begin;
    for (; first + kLanes <= end; first += kLanes) step(first, kLanes);
    if (first < end) step(first, end - first);
}

BestToken largest(const float* values, int32_t begin, int32_t end, bool* bad) {
    Lanes lanes;
    each(begin, end, [&](int32_t first, int count) __attribute__((always_inline)) {
        lanes.add(values + first, first, count);
    });
    return lanes.merged(bad);
}

inline __attribute__((always_inline)) void divide(const float* values, int count,
                                                  float temperature, float* out) {
    for (int i = 0; i < count; i++) out[i] = values[i] / temperature + 0.0f;
}

BestToken noisiest(const float* values, int32_t begin, int32_t end, float temperature, Cut cut,
                   NoiseKey key, bool* bad) {
    Lanes lanes;
    alignas(64) float block[kLanes], noises[kLanes];
    alignas(64) int32_t fine[kLanes];
    for (int32_t& flag : fine) flag = -1;
    each(begin, end, [&](int32_t first, int count) __attribute__((always_inline)) {
        divide(values + first, count, temperature, block);
        for (int i = 0; i < count; i++) {
            noises[i] = recipe::gumbel(key.low, key.high, static_cast<uint32_t>(first + i));
        }
        for (int i = 0; i < count; i++) {
            const int32_t above = block[i] > cut.value ? -1 : 0;
            const int32_t at = block[i] == cut.value ? -1 : 0;
            const int32_t early = first + i <= cut.last_id ? -1 : 0;
            const float noisy = block[i] + noises[i];
            fine[i] &= block[i] < kInfinity ? -1 : 0;
            noises[i] = (above | (at & early)) != 0 ? noisy : -kInfinity;
        }
        lanes.add(noises, first, count);
    });
    for (int32_t flag : fine) *bad |= flag == 0;
    return lanes.merged(bad);
}

BestToken scaled(const float* values, int32_t begin, int32_t end, float temperature, float* out,
                 bool* bad) {
    Lanes lanes;
    each(begin, end, [&](int32_t first, int count) __attribute__((always_inline)) {
        divide(values + first, count, temperature, out + first);
        lanes.add(out + first, first, count);
    });
    return lanes.merged(bad);
}

void masses(const float* values, int32_t count, float max, double* out) {
    alignas(64) float exps[kMassBlock];
    for (int i = 0; i < count; i++) exps[i] = recipe::exp_below(values[i] - max);
    for (int i = 0; i < count; i++) out[i] = recipe::mass(exps[i]);
}

double mass_sum(const float* values, int32_t begin, int32_t end, float max) {
    alignas(64) double block[kMassBlock];
    alignas(64) double sums[8] = {};
    for (int32_t first = begin; first < end; first += kMassBlock) {
        const int32_t count = end - first < kMassBlock ? end - first : kMassBlock;
        masses(values + first, count, max, block);
        for (int i = count; i < kMassBlock; i++) block[i] = 0.0;
        for (int i = 0; i < kMassBlock; i += 8) {
            for (int j = 0; j < 8; j++) sums[j] += block[i + j];
        }
    }
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

constexpr SamplingPasses passes{largest, noisiest, scaled, masses, mass_sum};

}  // namespace

void choose(const ChooseArgs& args) { choose_tokens(args, passes); }

}  // namespace quire::QUIRE_ISA_NS
