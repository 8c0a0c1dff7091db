// Drafts: plain loops over the rows of a step. As array operations each would take microseconds for
// a dozen of them, which is a large part of the step of a small model. Arguments were checked in
// native/bind/drafts.cc; the twins in Python say what each loop means.

#include "quire/drafts.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace quire {

namespace {

// As in quire/speculative/plain_counts.py.
constexpr double kMinConfidence = 0.2, kMaxConfidence = 1.0;
constexpr double kMinPriorTrials = 2.0, kMaxPriorTrials = 16.0;
constexpr double kMaxTrials = 64.0;
constexpr double kFade = 0.99;
constexpr double kMinTrials = 4.0, kEndedWeight = 0.1;
constexpr double kFewTrials = 0.5;
constexpr double kUnlikely = 0.005;
constexpr int kMaxRounds = 8;
constexpr size_t kLongMatches = 2;  // a kind of drafts
constexpr double kSmallestMs = 1e-9;

// The upper end of Wilson's interval.
double upper_bound(double tried, double accepted, double prior, double prior_trials,
                   double confidence) {
    const double num = tried + prior_trials;
    const double mean = std::clamp((accepted + prior_trials * prior) / num, 0.0, 1.0);
    const double square = confidence * confidence;
    const double spread =
        confidence * std::sqrt(mean * (1.0 - mean) / num + square / (4.0 * num * num));
    return std::min((mean + square / (2.0 * num) + spread) / (1.0 + square / num), 1.0);
}

// The next drafts of a row that are taken together, each worth `value` at the present rate.
struct DraftBlock {
    double value;
    size_t row;
    int32_t num_drafts;
};

// Blocks with falling values above 0. The first has as many drafts as spread what the row costs
// best: `once`, and `each` for a draft.
void add_blocks(size_t row, const double* chances, int32_t limit, double each, double once,
                std::vector<DraftBlock>& blocks) {
    double total = -once, value = 0.0;
    int32_t num_first = 0;
    for (int32_t at = 0; at < limit; ++at) {
        total += chances[at] - each;
        if (total / (at + 1) >= value) value = total / (at + 1), num_first = at + 1;
    }
    if (!num_first || value <= 0.0) return;
    blocks.push_back({value, row, num_first});
    for (int32_t at = num_first; at < limit && chances[at] > each; ++at) {
        blocks.push_back({chances[at] - each, row, 1});
    }
}

// What so many drafts add to a step.
double added_ms(const DraftPrice& price, size_t num_drafts) {
    const size_t last = price.num_added - 1;
    if (num_drafts <= last) return price.added_ms[num_drafts];
    const double each = price.added_ms[last] - price.added_ms[last - 1];
    return price.added_ms[last] + static_cast<double>(num_drafts - last) * each;
}

}  // namespace

void put_drafts(const DraftedRows& rows, const TokenRows& table) {
    const int32_t* ids = rows.ids;
    for (size_t i = 0; i < rows.num; ++i) {
        if (!rows.counts[i]) continue;
        const auto slot = static_cast<size_t>(rows.slots[i]);
        std::copy_n(ids, rows.counts[i], table.tokens + slot * table.width + rows.firsts[i]);
        const int32_t end = rows.firsts[i] + rows.counts[i];
        table.lengths[slot] = std::max(table.lengths[slot], end);
        ids += rows.counts[i];
    }
}

void take_back_drafts(const DraftedRows& rows, const bool* stays, const TokenRows& table) {
    for (size_t i = 0; i < rows.num; ++i) {
        if (!rows.counts[i] || !stays[i]) continue;
        const auto slot = static_cast<size_t>(rows.slots[i]);
        std::fill_n(table.tokens + slot * table.width + rows.firsts[i], rows.counts[i], 0);
        table.lengths[slot] = rows.firsts[i];
    }
}

void drop_after_mismatch(const DraftedRows& rows, const int32_t* sample_counts,
                         int32_t* token_ids) {
    const int32_t* ids = rows.ids;
    int32_t* end = token_ids;
    for (size_t i = 0; i < rows.num; ++i) {
        end += sample_counts[i];
        int32_t* token = end - 1 - rows.counts[i];  // of the position before the first draft
        for (int32_t at = 0; at < rows.counts[i]; ++at, ++token) {
            if (*token != ids[at]) {
                std::fill(token + 1, end, -1);
                break;
            }
        }
        ids += rows.counts[i];
    }
}

void count_accepted(size_t num, const int32_t* counts, const int32_t* ids,
                    const int32_t* token_counts, const int32_t* token_ids, int32_t* accepted) {
    for (size_t i = 0; i < num; ++i) {
        const int32_t most = std::min(counts[i], token_counts[i]);
        int32_t good = 0;
        while (good < most && token_ids[good] == ids[good]) ++good;
        accepted[i] = good;
        ids += counts[i];
        token_ids += token_counts[i];
    }
}

size_t leading_tokens(size_t num, const int32_t* sample_counts, const int32_t* token_ids,
                      const bool* failed, int32_t* counts, int64_t* kept) {
    size_t num_kept = 0;
    int64_t first = 0;
    for (size_t i = 0; i < num; ++i) {
        int32_t count = 0;
        while (!failed[i] && count < sample_counts[i] && token_ids[first + count] >= 0) {
            kept[num_kept++] = first + count++;
        }
        counts[i] = count;
        first += sample_counts[i];
    }
    return num_kept;
}

double draft_lengths(size_t num, size_t width, const double* chances, const int32_t* limits,
                     const double* draft_ms, const DraftPrice& price, int32_t* lengths) {
    const double step_ms = std::max(price.step_ms, kSmallestMs);
    const double plain_rate = price.step_tokens / step_ms;
    double rate = plain_rate;
    std::fill_n(lengths, num, 0);
    std::vector<int32_t> found(num);
    std::vector<DraftBlock> blocks;
    for (int round = 0; round < kMaxRounds; ++round) {
        const double unit = price.margin * rate;
        blocks.clear();
        for (size_t i = 0; i < num; ++i) {
            add_blocks(i, chances + i * width, limits[i], unit * draft_ms[i], unit * price.row_ms,
                       blocks);
        }
        std::stable_sort(blocks.begin(), blocks.end(), [](const auto& one, const auto& other) {
            return one.value > other.value;
        });
        double gain = 0.0, best = 0.0;
        size_t num_drafts = 0, num_best = 0;
        for (size_t at = 0; at < blocks.size(); ++at) {
            gain += blocks[at].value * blocks[at].num_drafts;
            num_drafts += static_cast<size_t>(blocks[at].num_drafts);
            const double worth = gain - unit * (price.once_ms + added_ms(price, num_drafts));
            if (worth > best) best = worth, num_best = at + 1;
        }
        if (!num_best) break;
        std::fill(found.begin(), found.end(), 0);
        num_drafts = 0;
        for (size_t at = 0; at < num_best; ++at) {
            found[blocks[at].row] += blocks[at].num_drafts;
            num_drafts += static_cast<size_t>(blocks[at].num_drafts);
        }
        double tokens = price.step_tokens, extra_ms = price.once_ms + added_ms(price, num_drafts);
        bool settled = true;
        for (size_t i = 0; i < num; ++i) {
            double expected = 0.0;
            for (int32_t at = 0; at < found[i]; ++at) expected += chances[i * width + at];
            tokens += expected;
            extra_ms += found[i] * draft_ms[i] + (found[i] > 0) * price.row_ms;
            settled &= found[i] == lengths[i];
        }
        const double new_rate = tokens / (step_ms + price.margin * extra_ms);
        if (new_rate <= rate) break;
        std::copy(found.begin(), found.end(), lengths);
        rate = new_rate;
        if (settled) break;
    }
    return plain_rate > 0.0 ? rate / plain_rate : 1.0;
}

DraftCounts::DraftCounts(size_t num_slots, size_t max_drafts)
    : max_drafts_(max_drafts),
      tried_(num_slots * max_drafts),
      accepted_(num_slots * max_drafts),
      series_(num_slots),
      kinds_(num_slots),
      changed_(num_slots) {
    for (size_t kind = 0; kind < kNumKinds; ++kind) {
        all_tried_[kind].assign(max_drafts, 0.0);
        all_accepted_[kind].assign(max_drafts, 0.0);
    }
}

void DraftCounts::learn_correlation(size_t slot) {
    const size_t kind = kinds_[slot];
    const double tried = tried_[slot * max_drafts_];
    if (tried < kMinTrials) return;
    const double mean = (all_accepted_[kind][0] + 1.0) / (all_tried_[kind][0] + 1.0);
    const double variance = std::max(mean * (1.0 - mean), 0.01);
    const double error = accepted_[slot * max_drafts_] - tried * mean;
    const double found = (error * error / (tried * variance) - 1.0) / (tried - 1.0);
    correlation_[kind] += kEndedWeight * (std::min(found, 1.0) - correlation_[kind]);
}

void DraftCounts::begin(size_t slot, size_t kind) {
    if (max_drafts_) learn_correlation(slot);
    kinds_[slot] = static_cast<uint8_t>(kind);
    series_[slot] = changed_[slot] = 0;
    std::fill_n(tried_.data() + slot * max_drafts_, max_drafts_, 0.0);
    std::fill_n(accepted_.data() + slot * max_drafts_, max_drafts_, 0.0);
}

void DraftCounts::fade_all(size_t num, const int64_t* slots, int32_t num_steps) {
    bool has[kNumKinds] = {};
    for (size_t i = 0; i < num; ++i) has[kinds_[static_cast<size_t>(slots[i])]] = true;
    const double fade = std::pow(kFade, num_steps);
    for (size_t kind = 0; kind < kNumKinds; ++kind) {
        if (!has[kind]) continue;
        for (double& tried : all_tried_[kind]) tried *= fade;
        for (double& accepted : all_accepted_[kind]) accepted *= fade;
    }
}

void DraftCounts::chances(size_t slot, int32_t num_steps, double* found) {
    double* tried = tried_.data() + slot * max_drafts_;
    double* accepted = accepted_.data() + slot * max_drafts_;
    const size_t kind = kinds_[slot];
    const std::vector<double>&all_tried = all_tried_[kind], &all_accepted = all_accepted_[kind];
    const double weight = prior_trials(slot);
    const double differ = (kMaxPriorTrials - weight) / (kMaxPriorTrials - kMinPriorTrials);
    const double more = changed_[slot] ? 0.0 : (kMaxConfidence - kMinConfidence) * differ;
    size_t depth = kind == kLongMatches ? max_drafts_ : 0;
    for (const double num : all_tried) depth += num > kFewTrials;
    const double fade = std::pow(kFade, num_steps);
    double chance = 1.0, prior = 1.0;
    for (size_t at = 0; at < max_drafts_; ++at) {
        tried[at] *= fade;
        accepted[at] *= fade;
        prior = (all_accepted[at] + prior) / (all_tried[at] + 1.0);
        chance *= upper_bound(tried[at], accepted[at], prior, weight, kMinConfidence + more);
        found[at] = at < 2 * depth + 1 ? chance : 0.0;
    }
}

double DraftCounts::prior_trials(size_t slot) const {
    if (changed_[slot]) return kMinPriorTrials;
    const double least = 1.0 / (kMaxPriorTrials + 1.0);
    return std::max(1.0 / std::max(correlation_[kinds_[slot]], least) - 1.0, kMinPriorTrials);
}

void DraftCounts::notice_change(size_t slot, bool is_accepted) {
    const int64_t outcome = is_accepted ? 1 : -1;
    int64_t& series = series_[slot];
    series = series * outcome > 0 ? series + outcome : outcome;
    double* tried = tried_.data() + slot * max_drafts_;
    double* accepted = accepted_.data() + slot * max_drafts_;
    const size_t kind = kinds_[slot];
    const double rate = (all_accepted_[kind][0] + 1.0) / (all_tried_[kind][0] + 1.0);
    const double weight = prior_trials(slot);
    const double equal = series > 0 ? *accepted + weight * rate
                                    : *tried - *accepted + weight * (1.0 - rate);
    const auto length = static_cast<double>(std::abs(series));
    if (std::pow((equal + 1.0) / (*tried + weight + 1.0), length) >= kUnlikely) return;
    changed_[slot] = 1;
    std::fill_n(tried, max_drafts_, 0.0);
    std::fill_n(accepted, max_drafts_, 0.0);
    *tried = length;
    *accepted = static_cast<double>(std::max<int64_t>(series, 0));
}

void DraftCounts::verified(size_t num, const int64_t* slots, const int32_t* drafted,
                           const int32_t* accepted) {
    constexpr double kKeep = 1.0 - 1.0 / kMaxTrials;
    const auto most = static_cast<int32_t>(max_drafts_);
    for (size_t i = 0; i < num; ++i) {
        const auto slot = static_cast<size_t>(slots[i]);
        const int32_t num_tried = std::min({accepted[i] + 1, drafted[i], most});
        if (num_tried > 0) notice_change(slot, accepted[i] > 0);
        double* own_tried = tried_.data() + slot * max_drafts_;
        double* own_accepted = accepted_.data() + slot * max_drafts_;
        for (int32_t at = 0; at < num_tried; ++at) {
            own_tried[at] = own_tried[at] * kKeep + 1.0;
            own_accepted[at] = own_accepted[at] * kKeep + (at < accepted[i]);
        }
    }
    for (size_t kind = 0; kind < kNumKinds; ++kind) {  // all of a step count as one
        for (size_t at = 0; at < max_drafts_; ++at) {
            double num_tried = 0.0, num_accepted = 0.0;
            for (size_t i = 0; i < num; ++i) {
                if (kinds_[static_cast<size_t>(slots[i])] != kind) continue;
                num_tried += static_cast<int32_t>(at) < std::min(accepted[i] + 1, drafted[i]);
                num_accepted += static_cast<int32_t>(at) < accepted[i];
            }
            if (num_tried == 0.0) break;  // nor at any later position
            const double kept = std::pow(kKeep, num_tried);
            all_tried_[kind][at] = all_tried_[kind][at] * kept + num_tried;
            all_accepted_[kind][at] = all_accepted_[kind][at] * kept + num_accepted;
        }
    }
}

}  // namespace quire
