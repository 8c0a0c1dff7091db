// route and sum_experts: the row-wise kernels of a mixture of experts. A row's choice depends on
// its own logits only: sums go over the experts in order, one number at a time, and a tie goes to
// the lower id. exp is a fixed polynomial of ours (vec.h).

#include "quire/rows.h"

namespace quire::QUIRE_ISA_NS {

namespace {

constexpr float kLowest = -__builtin_inff();
constexpr float kSmallestSum = 1e-20f;  // keeps a sum of scores above 0, and changes no other

// One row's experts.
struct Choice {
    float scores[kMaxExperts];
    float ranked[kMaxExperts];  // what they are chosen by; never NaN
    bool chosen[kMaxExperts];
};

float sum_in_order(const float* values, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

void score(const RouteArgs& args, const float* x, float* scores) {
    const int64_t experts = args.x.width;
    if (args.score == RouterScore::sigmoid) {
        return for_columns(experts, [&](int64_t c, int n) {
            const Vec e = exp(sub(zero(), load_some(x + c, n)));
            store_some(scores + c, div(set1(1.0f), add(set1(1.0f), e)), n);
        });
    }
    float largest = x[0];
    for (int64_t i = 1; i < experts; ++i) largest = x[i] > largest ? x[i] : largest;
    for_columns(experts, [&](int64_t c, int n) {
        store_some(scores + c, exp(sub(load_some(x + c, n), set1(largest))), n);
    });
    const Vec sum = set1(sum_in_order(scores, experts));
    for_columns(experts, [&](int64_t c, int n) {
        store_some(scores + c, div(load_some(scores + c, n), sum), n);
    });
}

// Marks the `count` largest of values (none is NaN); a tie goes to the lower place.
void mark_largest(const float* values, int64_t size, int64_t count, bool* marked) {
    for (int64_t i = 0; i < size; ++i) marked[i] = false;
    for (; count > 0; --count) {
        int64_t best = -1;
        for (int64_t i = 0; i < size; ++i) {
            if (!marked[i] && (best < 0 || values[i] > values[best])) best = i;
        }
        marked[best] = true;
    }
}

// The two largest of a group added up.
float best_of(const float* ranked, int64_t size) {
    float first = kLowest, second = kLowest;
    for (int64_t i = 0; i < size; ++i) {
        if (ranked[i] > first) {
            second = first;
            first = ranked[i];
        } else if (ranked[i] > second) {
            second = ranked[i];
        }
    }
    return size > 1 ? first + second : first;
}

void keep_best_groups(const RouteArgs& args, Choice& choice) {
    const int64_t size = args.x.width / args.groups;
    float best[kMaxExperts];
    bool kept[kMaxExperts];
    for (int64_t g = 0; g < args.groups; ++g) {
        const float of_group = best_of(choice.ranked + g * size, size);
        best[g] = of_group == of_group ? of_group : kLowest;
    }
    mark_largest(best, args.groups, args.top_groups, kept);
    for (int64_t i = 0; i < args.x.width; ++i) {
        if (!kept[i / size]) choice.ranked[i] = kLowest;
    }
}

void route_row(const RouteArgs& args, const float* x, float* y) {
    Choice choice;
    const int64_t experts = args.x.width;
    score(args, x, choice.scores);
    for (int64_t i = 0; i < experts; ++i) {
        const float ranked = choice.scores[i] + (args.bias == nullptr ? 0.0f : args.bias[i]);
        choice.ranked[i] = ranked == ranked ? ranked : kLowest;
    }
    if (args.groups > 0) keep_best_groups(args, choice);
    mark_largest(choice.ranked, experts, args.top_k, choice.chosen);
    float sum = 0.0f;
    for (int64_t i = 0; i < experts; ++i) {
        if (choice.chosen[i]) sum += choice.scores[i];
    }
    const float divisor = args.form == RoutingForm::normalized ? sum + kSmallestSum : 1.0f;
    for (int64_t i = 0; i < experts; ++i) {
        y[i] = choice.chosen[i] ? choice.scores[i] / divisor * args.scale : 0.0f;
    }
}

}  // namespace

void route(const RouteArgs& args) {
    const int64_t work = args.x.width * (args.top_k + 8);
    args.pool->deal(args.rows, rows_per_chunk(work), [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) {
            route_row(args, static_cast<const float*>(args.x.at(row)),
                      static_cast<float*>(args.y.at(row)));
        }
    });
}

void sum_experts(const SumExpertsArgs& args) {
    const int64_t width = args.y.width;
    const auto row_sum = [&](int64_t row) {
        auto* y = static_cast<float*>(args.y.at(row));
        if (args.first == 0) {
            for_columns(width, [&](int64_t c, int n) { store_some(y + c, zero(), n); });
        }
        for (int64_t i = row * args.top_k; i < (row + 1) * args.top_k; ++i) {
            if (args.places[i] < args.first || args.places[i] >= args.end) continue;
            const auto* part = static_cast<const float*>(args.parts.at(args.places[i] - args.first));
            const Vec weight = set1(args.weights[i]);
            for_columns(width, [&](int64_t c, int n) {
                const Vec weighted = mul(load_some(part + c, n), weight);
                store_some(y + c, add(load_some(y + c, n), weighted), n);
            });
        }
    };
    args.pool->deal(args.rows, rows_per_chunk(width * args.top_k),
                    [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) row_sum(row);
    });
}

}  // namespace quire::QUIRE_ISA_NS
