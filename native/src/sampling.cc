// Sampling, row by row: edits, filters, noise, log-probabilities. Many rows are distributed to the
// threads whole; few rows are each split over all threads. Neither changes a result: every
// reduction here is exact (largest with ties to the lower id, counts, sums of masses), so its order
// does not matter.
//
// The rare steps (typical_p, DRY and so on) are in sampling_rare.cc; a row with them runs them on
// one thread. top_k and top_p select without sorting. Values are counted in bins by their distance
// from the largest, the bin with the boundary is found by its running sum, and only that bin's
// tokens are compared one by one. Either filter ends as a Cut: one value and one id.

#include "quire/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "quire/recipe.h"

namespace quire {

namespace {

constexpr int32_t kChunk = 16384;  // tokens per piece of work of a split row
constexpr int kBins = 2048;        // of 1/64 each; the last holds everything further away
constexpr float kBinsPerUnit = 64.0f;
constexpr float kSmallestTemperature = 0x1p-40f;
constexpr float kSmallestMinP = 0x1p-126f;
constexpr int32_t kWhole = -2;  // as penalty_last_n
// Steps of an order, as quire/sampling/ordered.py has them.
enum Step : int32_t {
    kTemperature = 1,
    kTopNSigma,
    kMinP,
    kTopK,
    kTypicalP,
    kTopP,
    kEpsilon,
    kEta,
    kXtc,
};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kLastId = std::numeric_limits<int32_t>::max();

struct Candidate {
    float value;
    int32_t id;
    double weight;
};

bool before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

bool keeps(Cut cut, float value, int32_t id) {
    return value > cut.value || (value == cut.value && id <= cut.last_id);
}

int bin_of(float largest, float value) {
    const float distance = (largest - value) * kBinsPerUnit;
    return distance < static_cast<float>(kBins - 1) ? static_cast<int>(distance) : kBins - 1;
}

// The first candidate, in order, at which `sum` plus the weights so far reaches `needed`.
Cut boundary(std::vector<Candidate>& candidates, double sum, double needed) {
    auto low = candidates.begin(), high = candidates.end();
    while (high - low > 1) {
        const auto middle = low + (high - low) / 2;
        std::nth_element(low, middle, high, before);
        double part = 0.0;
        for (auto it = low; it != middle; ++it) part += it->weight;
        if (sum + part >= needed) {
            high = middle;
        } else {
            sum += part;
            low = middle;
        }
    }
    return {low->value, low->id};
}

// Buffers that a thread keeps between rows.
struct Scratch {
    std::vector<float> values;    // [V] the row after edits and temperature
    std::vector<int32_t> counts;  // [V] all zero between uses
    std::vector<float> allowed;   // values of the allowed ids
};

class Row {
  public:
    // pool: null if the row is not split.
    Row(const ChooseArgs& args, const SamplingPasses& passes, int32_t row, Pool* pool,
        Scratch& scratch)
        : args_(args), passes_(passes), row_(row), pool_(pool), scratch_(scratch),
          raw_(args.logits + row * args.stride), key_(noise_key(args.seeds[row], args.streams[row],
                                                                args.positions[row])),
          num_chunks_(1) {
        if (pool != nullptr) num_chunks_ = (args.vocabulary + kChunk - 1) / kChunk;
    }

    void choose() {
        if (args_.mus != nullptr) args_.mus[row_] = 0.0f;
        if (args_.num_candidates != nullptr) clear_candidates();
        const bool is_beam = args_.num_candidates != nullptr && args_.num_candidates[row_] > 0;
        const int32_t token_id = is_beam ? candidates() : token();
        args_.token_ids[row_] = token_id;
        if (args_.num_logprobs == nullptr) return;
        args_.logprobs[row_] = kNaN;
        for (int32_t i = 0; i < args_.num_top; i++) {
            args_.top_ids[row_ * static_cast<int64_t>(args_.num_top) + i] = -1;
            args_.top_logprobs[row_ * static_cast<int64_t>(args_.num_top) + i] = kNaN;
        }
        if (token_id >= 0 && args_.num_logprobs[row_] >= 0) write_logprobs(token_id);
    }

  private:
    // The row's value of a parameter, `off` where no row uses it.
    template <class Value>
    Value value(const Value* values, Value off) const {
        return values != nullptr ? values[row_] : off;
    }

    // The row's ids, none where no row has some.
    Ids ids(const int32_t* starts, const int32_t* all) const {
        return row_ids(starts, all, row_);
    }

    // Calls body(chunk, begin, end) for the row's chunks, on all threads where it is split.
    template <class Body>
    void each_chunk(const Body& body) {
        if (pool_ == nullptr) return body(0, 0, args_.vocabulary);
        pool_->deal(num_chunks_, 1, [&](int64_t first, int64_t last, int) {
            for (int64_t chunk = first; chunk < last; chunk++) {
                const int32_t begin = static_cast<int32_t>(chunk) * kChunk;
                body(chunk, begin, std::min(begin + kChunk, args_.vocabulary));
            }
        });
    }

    // The best over chunks of pass(begin, end, bad); id -1 if a value is NaN or +inf.
    template <class Pass>
    BestToken best_of_chunks(const Pass& pass) {
        std::vector<BestToken> found(num_chunks_);
        std::vector<char> bad(num_chunks_, 0);
        each_chunk([&](int64_t chunk, int32_t begin, int32_t end) {
            bool is_bad = false;
            found[chunk] = pass(begin, end, &is_bad);
            bad[chunk] = is_bad;
        });
        BestToken best{-kInfinity, -1};
        for (int64_t chunk = 0; chunk < num_chunks_; chunk++) {
            if (bad[chunk]) return {kNaN, -1};
            if (found[chunk].id < 0) continue;
            if (best.id < 0 || found[chunk].value > best.value) best = found[chunk];
        }
        return best;
    }

    BestToken largest(const float* values) {
        return best_of_chunks([&](int32_t begin, int32_t end, bool* bad) {
            return passes_.largest(values, begin, end, bad);
        });
    }

    BestToken noisiest(const float* values, float temperature, Cut cut) {
        return best_of_chunks([&](int32_t begin, int32_t end, bool* bad) {
            return passes_.noisiest(values, begin, end, temperature, cut, key_, bad);
        });
    }

    int32_t token() {
        const float* values = raw_;
        if (has_edits()) {
            if (largest(raw_).id < 0) return -1;
            scratch_.values.resize(args_.vocabulary);
            std::memcpy(scratch_.values.data(), raw_, sizeof(float) * args_.vocabulary);
            values = edited();
        }
        if (args_.rare != nullptr && value(args_.rare->order, int64_t{0}) != 0) {
            return ordered(values);
        }
        const float temperature = args_.temperature[row_];
        if (temperature < kSmallestTemperature) return largest(values).id;
        const bool filtered = value(args_.top_k, 0) > 0 || value(args_.top_p, 1.0f) < 1.0f ||
                              value(args_.min_p, 0.0f) >= kSmallestMinP || has_rare_filters();
        if (!filtered) return noisiest(values, temperature, {-kInfinity, kLastId}).id;

        float drop = kInfinity;
        const RareArgs* rare = args_.rare;
        const float num_sigmas = rare != nullptr ? value(rare->top_n_sigma, 0.0f) : 0.0f;
        if (num_sigmas > 0.0f) {
            const BestToken top = largest(values);
            if (top.id < 0) return -1;
            drop = sigma_drop(values, args_.vocabulary, top.value, num_sigmas);
        }
        scratch_.values.resize(args_.vocabulary);
        float* scaled = scratch_.values.data();  // perhaps `values` itself
        const BestToken top = best_of_chunks([&](int32_t begin, int32_t end, bool* bad) {
            return passes_.scale(values, begin, end, temperature, scaled, bad);
        });
        if (top.id < 0) return -1;
        Filtered row{scaled, args_.vocabulary, top.value, {-kInfinity, kLastId}, passes_};
        if (rare != nullptr && value(rare->mirostat, 0) > 0) return steered(row);
        row.keep_from(top.value - drop / temperature);
        filter(row);
        return noisiest(scaled, 1.0f, row.cut).id;
    }

    // Applies mirostat; sets the row's mu.
    int32_t steered(Filtered& row) {
        const float mu = args_.rare->mirostat_mu[row_];
        if (args_.rare->mirostat[row_] == 1) {
            const int32_t count = zipf_count(highest(row.values, kZipfIds), mu, row.vocabulary);
            row.cut = with_top_k(row, count);
        } else {
            keep_unsurprising(row, mu);
        }
        const int32_t token_id = noisiest(row.values, 1.0f, row.cut).id;
        if (token_id >= 0) args_.mus[row_] = moved_mu(row, token_id, *args_.rare, row_);
        return token_id;
    }

    // The temperature and the filters in the row's own order (quire/sampling/ordered.py).
    int32_t ordered(const float* values) {
        scratch_.values.resize(args_.vocabulary);
        float* divided = scratch_.values.data();  // perhaps `values` itself
        Filtered row{divided, args_.vocabulary, 0.0f, {-kInfinity, kLastId}, passes_};
        if (!divide(row, values, 1.0f)) return -1;
        const float temperature = args_.temperature[row_];
        for (uint64_t steps = args_.rare->order[row_]; steps != 0; steps >>= 4) {
            const auto step = static_cast<Step>(steps & 15u);
            if (step != kTemperature) {
                apply(row, step);
            } else if (temperature < kSmallestTemperature) {
                keep_first(row);
            } else {
                drop_the_rest(row);
                if (!divide(row, row.values, temperature)) return -1;
            }
        }
        return noisiest(row.values, 1.0f, row.cut).id;
    }

    // Sets a row's values to `values` divided by a temperature; false if the row fails.
    bool divide(Filtered& row, const float* values, float temperature) {
        const BestToken top = best_of_chunks([&](int32_t begin, int32_t end, bool* bad) {
            return passes_.scale(values, begin, end, temperature, row.values, bad);
        });
        row.top = top.value;
        return top.id >= 0;
    }

    // Applies one filter of an order.
    void apply(Filtered& row, Step step) {
        const RareArgs& rare = *args_.rare;
        const float min_p = value(args_.min_p, 0.0f);
        switch (step) {
            case kMinP:
                if (min_p >= kSmallestMinP) row.keep_from(row.top - recipe::minus_log(min_p));
                return;
            case kTopK: row.cut = with_top_k(row, value(args_.top_k, 0)); return;
            case kTopP: row.cut = with_top_p(row.values, row.top, row.cut); return;
            default: break;
        }
        if (rare.typical_p == nullptr) return;
        switch (step) {
            case kTopNSigma:
                if (rare.top_n_sigma[row_] > 0.0f) keep_within_sigmas(row, rare.top_n_sigma[row_]);
                return;
            case kTypicalP:
                if (rare.typical_p[row_] < 1.0f) keep_typical(row, rare.typical_p[row_]);
                return;
            case kEpsilon: return cut_off(row, rare.epsilon_cutoff[row_], 0.0f);
            case kEta: return cut_off(row, 0.0f, rare.eta_cutoff[row_]);
            case kXtc:
                if (has_xtc()) exclude_top_choices(row, rare.xtc_threshold[row_]);
                return;
            default: return;
        }
    }

    bool has_rare_filters() const {
        const RareArgs* rare = args_.rare;
        if (rare == nullptr) return false;
        if (value(rare->mirostat, 0) > 0) return true;
        return rare->typical_p != nullptr &&
               (rare->typical_p[row_] < 1.0f || rare->top_n_sigma[row_] > 0.0f ||
                rare->epsilon_cutoff[row_] > 0.0f || rare->eta_cutoff[row_] > 0.0f || has_xtc());
    }

    bool has_xtc() const { return coin(key_) < args_.rare->xtc_probability[row_]; }

    bool has_rare_edits() const {
        const RareArgs* rare = args_.rare;
        return rare != nullptr &&
               (value(rare->dry_multiplier, 0.0f) > 0.0f || value(rare->ngram_size, 0) > 0 ||
                ids(rare->sequence_rows, rare->sequence_starts).count > 0 ||
                ids(rare->allowed_starts, rare->allowed_ids).count > 0);
    }

    const uint32_t* mask() const {
        if (args_.mask_rows == nullptr || args_.mask_rows[row_] < 0) return nullptr;
        const int64_t words = (args_.vocabulary + 31) / 32;
        return args_.masks + args_.mask_rows[row_] * words;
    }

    bool has_edits() const {
        return mask() != nullptr || ids(args_.bias_starts, args_.bias_ids).count > 0 ||
               ids(args_.banned_starts, args_.banned_ids).count > 0 ||
               value(args_.repetition_penalty, 1.0f) != 1.0f ||
               value(args_.frequency_penalty, 0.0f) != 0.0f ||
               value(args_.presence_penalty, 0.0f) != 0.0f || has_rare_edits();
    }

    void clear_candidates() {
        const int64_t first = row_ * static_cast<int64_t>(args_.max_candidates);
        for (int64_t at = first; at < first + args_.max_candidates; at++) {
            args_.candidate_ids[at] = -1;
            args_.candidate_scores[at] = args_.candidate_logprobs[at] = kNaN;
        }
    }

    // Step 6: the candidates of a beam. Returns the best one, 0 if there is none, -1 if the row
    // fails.
    int32_t candidates() {
        const BestToken top = largest(raw_);
        if (top.id < 0 || top.value == -kInfinity) return -1;
        const float minus_log_total = minus_log_mass(top.value);
        scratch_.values.resize(args_.vocabulary);
        float* logprobs = scratch_.values.data();
        each_chunk([&](int64_t, int32_t begin, int32_t end) {
            for (int32_t id = begin; id < end; id++) {
                logprobs[id] = (raw_[id] - top.value) + minus_log_total;
            }
        });
        const std::vector<BestToken> best = highest(edited(), args_.num_candidates[row_]);
        int64_t at = row_ * static_cast<int64_t>(args_.max_candidates);
        for (const BestToken& one : best) {
            args_.candidate_ids[at] = one.id;
            args_.candidate_scores[at] = one.value;
            args_.candidate_logprobs[at++] = (raw_[one.id] - top.value) + minus_log_total;
        }
        return best.empty() ? 0 : best.front().id;
    }

    // Steps 2 to 4 on scratch_.values: bias, penalties, bans.
    const float* edited() {
        scratch_.counts.resize(args_.vocabulary, 0);
        float* values = scratch_.values.data();
        int32_t* counts = scratch_.counts.data();
        const Ids biased = ids(args_.bias_starts, args_.bias_ids);
        for (int64_t i = 0; i < biased.count; i++) {
            values[biased.first[i]] += args_.bias_values[args_.bias_starts[row_] + i];
        }
        const Ids history = ids(args_.history_starts, args_.history);
        const int32_t* counted = history.begin();
        const int32_t* end = history.end();
        const int32_t* output =
            counted + std::min<int64_t>(value(args_.num_prompt_tokens, 0), history.count);
        const int32_t last_n = value(args_.penalty_last_n, kWhole);
        if (last_n >= 0 && last_n < history.count) counted = end - last_n;
        if (last_n != kWhole) output = counted;
        const float repetition = value(args_.repetition_penalty, 1.0f);
        if (repetition != 1.0f) {
            each_distinct(counted, end, counts, [&](int32_t id, int32_t) {
                values[id] = values[id] > 0 ? values[id] / repetition : values[id] * repetition;
            });
        }
        const float frequency = value(args_.frequency_penalty, 0.0f);
        const float presence = value(args_.presence_penalty, 0.0f);
        if (frequency != 0.0f || presence != 0.0f) {
            each_distinct(output, end, counts, [&](int32_t id, int32_t count) {
                values[id] -= frequency * static_cast<float>(count) + presence;
            });
        }
        if (args_.rare != nullptr && value(args_.rare->dry_multiplier, 0.0f) > 0.0f) {
            penalize_repeats(values, history, *args_.rare, row_, counts);
        }
        for (int32_t id : ids(args_.banned_starts, args_.banned_ids)) values[id] = -kInfinity;
        if (args_.rare != nullptr) {
            ban(values, args_.vocabulary, history, *args_.rare, row_, scratch_.allowed);
        }
        if (const uint32_t* allowed = mask()) ban_unmasked(values, allowed);
        return values;
    }

    // Sets what the mask does not allow to -inf.
    void ban_unmasked(float* values, const uint32_t* allowed) const {
        for (int32_t first = 0; first < args_.vocabulary; first += 32) {
            const uint32_t word = allowed[first / 32];
            if (word == UINT32_MAX) continue;
            const int32_t count = std::min(32, args_.vocabulary - first);
            for (int32_t i = 0; i < count; i++) {
                if ((word >> i & 1u) == 0) values[first + i] = -kInfinity;
            }
        }
    }

    template <class Body>
    static void each_distinct(const int32_t* begin, const int32_t* end, int32_t* counts,
                              const Body& body) {
        for (const int32_t* id = begin; id != end; id++) counts[*id]++;
        for (const int32_t* id = begin; id != end; id++) {
            if (counts[*id] > 0) body(*id, counts[*id]);
            counts[*id] = 0;
        }
    }

    // The filters from min_p to XTC.
    void filter(Filtered& row) {
        const RareArgs* rare = args_.rare;
        const bool is_rare = rare != nullptr && rare->typical_p != nullptr;
        const float min_p = value(args_.min_p, 0.0f);
        if (min_p >= kSmallestMinP) row.keep_from(row.top - recipe::minus_log(min_p));
        row.cut = with_top_k(row, value(args_.top_k, 0));
        if (is_rare && rare->typical_p[row_] < 1.0f) keep_typical(row, rare->typical_p[row_]);
        row.cut = with_top_p(row.values, row.top, row.cut);
        if (!is_rare) return;
        cut_off(row, rare->epsilon_cutoff[row_], rare->eta_cutoff[row_]);
        if (has_xtc()) exclude_top_choices(row, rare->xtc_threshold[row_]);
    }

    Cut with_top_k(const Filtered& row, int32_t top_k) {
        Cut cut = row.cut;
        if (top_k > 0) {
            const std::vector<double> counts = bins(row.values, row.top, cut, false);
            double kept = 0.0;
            for (double count : counts) kept += count;
            if (kept > top_k) cut = narrowed(row.values, row.top, cut, counts, top_k, false);
        }
        return cut;
    }

    Cut with_top_p(const float* values, float top, Cut cut) {
        const float top_p = value(args_.top_p, 1.0f);
        if (top_p < 1.0f) {
            const std::vector<double> sums = bins(values, top, cut, true);
            double total = 0.0;
            for (double sum : sums) total += sum;
            const double needed = static_cast<double>(top_p) * total;
            cut = narrowed(values, top, cut, sums, needed, true);
        }
        return cut;
    }

    // Calls body(id, weight) for the tokens of begin..end that the cut keeps; weights are masses,
    // or ones.
    template <class Body>
    void each_kept(const float* values, int32_t begin, int32_t end, float top, Cut cut,
                   bool by_mass, const Body& body) const {
        double weights[kMassBlock];
        std::fill(weights, weights + kMassBlock, 1.0);
        for (int32_t first = begin; first < end; first += kMassBlock) {
            const int32_t count = std::min(kMassBlock, end - first);
            int kept = 0;
            for (int32_t i = 0; i < count; i++) kept |= values[first + i] >= cut.value ? 1 : 0;
            if (kept == 0) continue;
            if (by_mass) passes_.masses(values + first, count, top, weights);
            for (int32_t i = 0; i < count; i++) {
                if (keeps(cut, values[first + i], first + i)) body(first + i, weights[i]);
            }
        }
    }

    // The weight in each bin of the tokens that the cut keeps.
    std::vector<double> bins(const float* values, float top, Cut cut, bool by_mass) {
        std::vector<std::vector<double>> parts(num_chunks_);
        each_chunk([&](int64_t chunk, int32_t begin, int32_t end) {
            std::vector<double> sums(kBins, 0.0);
            each_kept(values, begin, end, top, cut, by_mass, [&](int32_t id, double weight) {
                sums[bin_of(top, values[id])] += weight;
            });
            parts[chunk] = std::move(sums);
        });
        for (int64_t chunk = 1; chunk < num_chunks_; chunk++) {
            for (int bin = 0; bin < kBins; bin++) parts[0][bin] += parts[chunk][bin];
        }
        return parts[0];
    }

    // The cut at which the kept weight first reaches `needed`.
    Cut narrowed(const float* values, float top, Cut cut, const std::vector<double>& sums,
                 double needed, bool by_mass) {
        double sum = 0.0;
        int bin = 0;
        while (bin + 1 < kBins && sum + sums[bin] < needed) sum += sums[bin++];
        std::vector<std::vector<Candidate>> parts(num_chunks_);
        each_chunk([&](int64_t chunk, int32_t begin, int32_t end) {
            std::vector<Candidate> found;
            each_kept(values, begin, end, top, cut, by_mass, [&](int32_t id, double weight) {
                if (bin_of(top, values[id]) == bin) found.push_back({values[id], id, weight});
            });
            parts[chunk] = std::move(found);
        });
        std::vector<Candidate> all = std::move(parts[0]);
        for (int64_t chunk = 1; chunk < num_chunks_; chunk++) {
            all.insert(all.end(), parts[chunk].begin(), parts[chunk].end());
        }
        return boundary(all, sum, needed);
    }

    // Log-probabilities of the raw logits: the sampled token's and the best ones'.
    void write_logprobs(int32_t token_id) {
        const float top = largest(raw_).value;
        const float minus_log_total = minus_log_mass(top);
        args_.logprobs[row_] = (raw_[token_id] - top) + minus_log_total;
        const int32_t wanted = std::min(args_.num_logprobs[row_], args_.num_top);
        int64_t at = row_ * static_cast<int64_t>(args_.num_top);
        for (const BestToken& one : highest(raw_, wanted)) {
            args_.top_ids[at] = one.id;
            args_.top_logprobs[at++] = (one.value - top) + minus_log_total;
        }
    }

    // Minus the logarithm of the row's mass: a log-probability is logit - top plus this.
    float minus_log_mass(float top) {
        std::vector<double> sums(num_chunks_, 0.0);
        each_chunk([&](int64_t chunk, int32_t begin, int32_t end) {
            sums[chunk] = passes_.mass_sum(raw_, begin, end, top);
        });
        double total = 0.0;
        for (double sum : sums) total += sum;
        return recipe::minus_log(static_cast<float>(total));
    }

    // The `wanted` largest values above -inf, best first, ties by id.
    std::vector<BestToken> highest(const float* values, int32_t wanted) {
        std::vector<std::vector<BestToken>> parts(num_chunks_);
        each_chunk([&](int64_t chunk, int32_t begin, int32_t end) {
            parts[chunk] = highest_of(values, begin, end, wanted);
        });
        std::vector<BestToken> all = std::move(parts[0]);
        for (int64_t chunk = 1; chunk < num_chunks_; chunk++) {
            all.insert(all.end(), parts[chunk].begin(), parts[chunk].end());
        }
        std::stable_sort(all.begin(), all.end(), [](const BestToken& a, const BestToken& b) {
            return a.value > b.value;
        });
        if (static_cast<int32_t>(all.size()) > wanted) all.resize(wanted);
        return all;
    }

    static std::vector<BestToken> highest_of(const float* values, int32_t begin, int32_t end,
                                             int32_t wanted) {
        std::vector<BestToken> found;
        if (wanted == 0) return found;
        float least = -kInfinity;  // ids rise: an equal value comes too late
        for (int32_t id = begin; id < end; id++) {
            if (!(values[id] > least)) continue;
            if (static_cast<int32_t>(found.size()) == wanted) found.pop_back();
            const auto place = std::find_if(found.begin(), found.end(), [&](const BestToken& a) {
                return a.value < values[id];
            });
            found.insert(place, {values[id], id});
            if (static_cast<int32_t>(found.size()) == wanted) least = found.back().value;
        }
        return found;
    }

    const ChooseArgs& args_;
    const SamplingPasses& passes_;
    const int32_t row_;
    Pool* const pool_;
    Scratch& scratch_;
    const float* const raw_;
    const NoiseKey key_;
    int64_t num_chunks_;
};

}  // namespace

NoiseKey noise_key(int64_t seed, int32_t stream, int32_t position) {
    const auto finalize = [](uint64_t x) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    };
    const uint64_t place = static_cast<uint64_t>(static_cast<uint32_t>(stream)) << 32 |
                           static_cast<uint32_t>(position);
    const uint64_t key =
        finalize(finalize(static_cast<uint64_t>(seed) + 0x9e3779b97f4a7c15u) ^ place);
    return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

void choose_tokens(const ChooseArgs& args, const SamplingPasses& passes) {
    const int num_threads = args.pool->num_threads();
    const bool split = args.rows < 4 * num_threads && args.vocabulary >= 2 * kChunk;
    std::vector<Scratch> scratch(split ? 1 : num_threads);
    if (split) {
        for (int32_t row = 0; row < args.rows; row++) {
            Row(args, passes, row, args.pool, scratch[0]).choose();
        }
        return;
    }
    args.pool->deal(args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t row = begin; row < end; row++) {
            Row(args, passes, static_cast<int32_t>(row), nullptr, scratch[thread]).choose();
        }
    });
}

}  // namespace quire
