// Rarely used sampling steps: repeats, bans, and filters beyond min_p, top_k and top_p. Bitwise
// equal to quire/sampling/rare.py: sums are of multiples of a unit, so they have no order, and
// probabilities are compared through their logarithms, as bounds on values.

#include "quire/sampling_rare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "quire/recipe.h"

namespace quire {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSmallestShare = 0x1p-126f;
constexpr float kSpreadReach = 2048.0f;
constexpr float kSpreadSteps = 2048.0f;  // a unit
constexpr double kMaxPenalty = 1e6;
constexpr uint32_t kCoinId = 0xffffffffu;
constexpr int kBins = 2048;  // of 1/64 nat each; the last holds everything further away
constexpr float kBinsPerUnit = 64.0f;
constexpr float kLn2 = 0.6931472f;
constexpr float kLog2E = 1.442695f;
constexpr double kSmallestReach = 0x1p-10;

bool holds(Ids ids, int32_t id) { return std::find(ids.begin(), ids.end(), id) != ids.end(); }

// Calls body(next token, length) for each earlier position in the history that matches its end:
// `length` tokens up to there equal the last ones. At most kMaxRepeat, and none across a breaker,
// so this is linear in the history however repetitive it is.
template <class Body>
void each_repeat(Ids history, Ids breakers, const Body& body) {
    const int64_t count = history.count;
    const int32_t* last = history.first + count - 1;
    int64_t longest = 0;
    while (longest < std::min<int64_t>(kMaxRepeat, count) && !holds(breakers, last[-longest])) {
        longest++;
    }
    if (longest == 0) return;
    for (int64_t place = 0; place + 1 < count; place++) {
        const int32_t* here = history.first + place;
        if (*here != *last) continue;
        const int64_t most = std::min(longest, place + 1);
        int64_t length = 1;
        while (length < most && here[-length] == last[-length]) length++;
        body(here[1], static_cast<int32_t>(length));
    }
}

// Calls body(id, mass) for kept tokens; masses are relative to `top`.
template <class Body>
void each_mass(const Filtered& row, const Body& body) {
    double masses[kMassBlock];
    for (int32_t first = 0; first < row.vocabulary; first += kMassBlock) {
        const int32_t count = std::min(kMassBlock, row.vocabulary - first);
        int kept = 0;
        for (int32_t i = 0; i < count; i++) kept |= row.values[first + i] >= row.cut.value ? 1 : 0;
        if (kept == 0) continue;
        row.passes.masses(row.values + first, count, row.top, masses);
        for (int32_t i = 0; i < count; i++) {
            if (row.keeps(first + i)) body(first + i, masses[i]);
        }
    }
}

float minus_log_of(double total) { return recipe::minus_log(static_cast<float>(total)); }

// The average distance of kept values below the largest, weighted by their masses; and the mass.
float expected_below(const Filtered& row, double* total) {
    double sum = 0.0, weighed = 0.0;
    each_mass(row, [&](int32_t id, double mass) {
        if (mass == 0.0) return;
        sum += mass;
        weighed += recipe::mass_multiple(mass * static_cast<double>(row.top - row.values[id]));
    });
    *total = sum;
    return static_cast<float>(weighed / sum);
}

// Keeps tokens of at most `surprise` nats, and always the largest values.
void keep_within(Filtered& row, float surprise) {
    const float reach = surprise + minus_log_of(kept_mass(row));
    row.keep_from(row.top - std::max(reach, 0.0f));
}

struct Distant {
    float distance;
    double mass;
};

int bin_of(float distance) {
    const float bin = distance * kBinsPerUnit;
    return bin < static_cast<float>(kBins - 1) ? static_cast<int>(bin) : kBins - 1;
}

// The smallest distance within which `sum` and the masses reach `needed`.
float distance_reaching(std::vector<Distant>& entries, double sum, double needed) {
    auto low = entries.begin(), high = entries.end();
    while (high - low > 1) {
        const auto middle = low + (high - low) / 2;
        std::nth_element(low, middle, high, [](const Distant& a, const Distant& b) {
            return a.distance < b.distance;
        });
        double part = 0.0;
        for (auto it = low; it != middle; ++it) part += it->mass;
        if (sum + part >= needed) {
            high = middle;
        } else {
            sum += part;
            low = middle;
        }
    }
    return low->distance;
}

}  // namespace

void penalize_repeats(float* values, Ids history, const RareArgs& rare, int32_t row,
                      int32_t* best) {
    const int32_t last_n = rare.dry_last_n[row];
    if (last_n >= 0 && last_n < history.count) {
        history = {history.end() - last_n, last_n};
    }
    if (history.count < 2) return;
    const Ids breakers = row_ids(rare.breaker_starts, rare.breaker_ids, row);
    const int32_t allowed = rare.dry_allowed_length[row];
    float penalties[kMaxRepeat + 1];
    double penalty = rare.dry_multiplier[row];
    for (int length = allowed; length <= kMaxRepeat; length++) {
        penalties[length] = static_cast<float>(std::min(penalty, kMaxPenalty));
        penalty *= static_cast<double>(rare.dry_base[row]);
    }
    std::vector<int32_t> repeated;
    each_repeat(history, breakers, [&](int32_t next, int32_t length) {
        if (length < allowed || length <= best[next] || holds(breakers, next)) return;
        if (best[next] == 0) repeated.push_back(next);
        best[next] = length;
    });
    for (int32_t id : repeated) {
        values[id] -= penalties[best[id]];
        best[id] = 0;
    }
}

void ban(float* values, int32_t vocabulary, Ids history, const RareArgs& rare, int32_t row,
         std::vector<float>& kept) {
    const int32_t* rows = rare.sequence_rows;
    for (int32_t i = rows ? rows[row] : 0; rows != nullptr && i < rows[row + 1]; i++) {
        const Ids ids = row_ids(rare.sequence_starts, rare.sequence_ids, i);
        const int64_t num_before = ids.count - 1;
        if (num_before > history.count) continue;
        if (std::equal(ids.first, ids.first + num_before, history.end() - num_before)) {
            values[ids.first[num_before]] = -kInfinity;
        }
    }
    const int32_t size = rare.ngram_size != nullptr ? rare.ngram_size[row] : 0;
    if (size == 1) {
        for (int32_t id : history) values[id] = -kInfinity;
    } else if (size > 1 && history.count > 1) {
        each_repeat(history, {nullptr, 0}, [&](int32_t next, int32_t length) {
            if (length >= size - 1) values[next] = -kInfinity;
        });
    }
    const Ids allowed = row_ids(rare.allowed_starts, rare.allowed_ids, row);
    if (allowed.count == 0) return;
    kept.clear();
    for (int32_t id : allowed) kept.push_back(values[id]);
    std::fill(values, values + vocabulary, -kInfinity);
    for (int64_t i = 0; i < allowed.count; i++) values[allowed.first[i]] = kept[i];
}

namespace {

// How far below `largest` the values lie that `counts` has, in standard deviations.
template <class Counts>
float spread_of(const float* values, int32_t vocabulary, float largest, float num_sigmas,
                const Counts& counts) {
    int64_t count = 0, sum = 0, squares = 0;
    for (int32_t id = 0; id < vocabulary; id++) {
        if (!(values[id] > -kInfinity) || !counts(id)) continue;
        const float below = std::min(largest - values[id], kSpreadReach);
        const int64_t steps = static_cast<int32_t>(below * kSpreadSteps + 0.5f);
        count++;
        sum += steps;
        squares += steps * steps;
    }
    const double mean = static_cast<double>(sum) / static_cast<double>(count);
    const double variance = static_cast<double>(squares) / static_cast<double>(count) - mean * mean;
    const double sigma = std::sqrt(std::max(variance, 0.0)) / static_cast<double>(kSpreadSteps);
    return static_cast<float>(static_cast<double>(num_sigmas) * sigma);
}

double log_of(double x) { return -static_cast<double>(minus_log_of(x)); }

// exponent * log(number of kept ids), of a vocabulary of num_ids.
double zipf_limit(double exponent, double mu, int32_t num_ids) {
    const double above = exponent - 1.0;
    const double log_ids = log_of(num_ids);
    const double bits = mu * static_cast<double>(kLn2);
    const double reach = std::fabs(above) * log_ids;
    if (reach < kSmallestReach) return bits - log_of(log_ids);
    const double rest = 1.0 - recipe::mass(recipe::exp_below(static_cast<float>(-reach)));
    const double limit = bits + log_of(std::fabs(above)) - log_of(rest);
    return above > 0.0 ? limit : limit - reach;
}

}  // namespace

float sigma_drop(const float* values, int32_t vocabulary, float largest, float num_sigmas) {
    return spread_of(values, vocabulary, largest, num_sigmas, [](int32_t) { return true; });
}

void keep_within_sigmas(Filtered& row, float num_sigmas) {
    const auto kept = [&](int32_t id) { return row.keeps(id); };
    row.keep_from(row.top - spread_of(row.values, row.vocabulary, row.top, num_sigmas, kept));
}

void keep_first(Filtered& row) {
    for (int32_t id = 0; id < row.vocabulary; id++) {
        if (row.values[id] != row.top || !row.keeps(id)) continue;
        row.cut = Cut{row.top, id};
        return;
    }
}

void drop_the_rest(Filtered& row) {
    for (int32_t id = 0; id < row.vocabulary; id++) {
        if (!row.keeps(id)) row.values[id] = -kInfinity;
    }
    row.cut = Cut{-kInfinity, INT32_MAX};
}

int32_t zipf_count(const std::vector<BestToken>& best, float mu, int32_t vocabulary) {
    double rises = 0.0, squares = 0.0;
    for (size_t rank = 1; rank < best.size(); rank++) {
        const double step = log_of(static_cast<float>(rank + 1) / static_cast<float>(rank));
        rises += step * static_cast<double>(best[rank - 1].value - best[rank].value);
        squares += step * step;
    }
    if (squares == 0.0) return 1;
    const double exponent = rises / squares;
    const double limit = zipf_limit(exponent, static_cast<double>(mu), vocabulary);
    int32_t low = 1, high = vocabulary;
    while (low < high) {  // the largest rank with exponent * log(rank) <= limit
        const int32_t middle = (low + high + 1) / 2;
        if (exponent * log_of(middle) <= limit) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

double kept_mass(const Filtered& row) {
    double sum = 0.0;
    each_mass(row, [&](int32_t, double mass) { sum += mass; });
    return sum;
}

void keep_typical(Filtered& row, float share) {
    double total = 0.0;
    const float mean = expected_below(row, &total);
    const auto distance = [&](int32_t id) { return std::fabs((row.top - row.values[id]) - mean); };
    // Only the bin in which the sum reaches the target is searched exactly.
    std::vector<double> sums(kBins, 0.0);
    each_mass(row, [&](int32_t id, double mass) {
        if (mass > 0.0) sums[bin_of(distance(id))] += mass;
    });
    const double needed = static_cast<double>(share) * total;
    double sum = 0.0;
    int bin = 0;
    while (bin + 1 < kBins && (sums[bin] == 0.0 || sum + sums[bin] < needed)) sum += sums[bin++];
    std::vector<Distant> entries;
    each_mass(row, [&](int32_t id, double mass) {
        const float away = distance(id);
        if (mass > 0.0 && bin_of(away) == bin) entries.push_back({away, mass});
    });
    const float reach = distance_reaching(entries, sum, needed);
    float top = -kInfinity;
    for (int32_t id = 0; id < row.vocabulary; id++) {
        float& value = row.values[id];
        const bool kept = row.keeps(id) && std::fabs((row.top - value) - mean) <= reach;
        value = kept ? value : -kInfinity;
        top = std::max(top, value);
    }
    row.top = top;
    row.cut = Cut{-kInfinity, INT32_MAX};
}

void cut_off(Filtered& row, float epsilon, float eta) {
    if (epsilon >= kSmallestShare) keep_within(row, recipe::minus_log(epsilon));
    if (eta >= kSmallestShare) {
        double total = 0.0;
        const float mean = expected_below(row, &total);
        const float entropy = mean - minus_log_of(total);
        const float limit = recipe::minus_log(eta);
        keep_within(row, std::max(limit, limit * 0.5f + entropy));
    }
}

void exclude_top_choices(Filtered& row, float threshold) {
    const float reach = threshold >= kSmallestShare ? recipe::minus_log(threshold) : kInfinity;
    const float floor = row.top - (reach + minus_log_of(kept_mass(row)));
    int64_t num_above = 0;
    int32_t last = -1;  // in order: the smallest value, of equals the highest id
    for (int32_t id = 0; id < row.vocabulary; id++) {
        const float value = row.values[id];
        if (!row.keeps(id) || !(value >= floor) || !(value > -kInfinity)) continue;
        num_above++;
        if (last < 0 || value <= row.values[last]) last = id;
    }
    if (num_above < 2) return;
    const float least = row.values[last];
    for (int32_t id = 0; id < row.vocabulary; id++) {
        const bool is_before = row.values[id] > least || (row.values[id] == least && id < last);
        if (is_before) row.values[id] = -kInfinity;
    }
    row.top = least;
}

void keep_unsurprising(Filtered& row, float mu) { keep_within(row, mu * kLn2); }

float moved_mu(const Filtered& row, int32_t token_id, const RareArgs& rare, int32_t index) {
    const float below = row.top - row.values[token_id];
    const float bits = (below - minus_log_of(kept_mass(row))) * kLog2E;
    const float error = bits - rare.mirostat_tau[index];
    return rare.mirostat_mu[index] - rare.mirostat_eta[index] * error;
}

float coin(NoiseKey key) { return recipe::uniform(key.low, key.high, kCoinId); }

}  // namespace quire
