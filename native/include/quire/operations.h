// The operations of a program: the C++ side of quire/program/ops.py, which has their contract. Each
// struct lists its fields once, by name, in `fields`; the binding decodes operations by these names
// and exports them as a table, which quire/execute/native_ops.py compares with its own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <variant>
#include <vector>

#include "quire/kernels.h"
#include "quire/weight.h"

namespace quire {

// `width` columns of a buffer from column `offset`.
struct ViewSpec {
    int64_t buffer, offset, width;
};
using WeightRef = std::shared_ptr<const Weight>;

enum class IdSource { tokens, positions };
enum class NormForm { rms, layer };

// The names of an enumeration's values, in order.
template <class Enum>
struct Names;
template <>
struct Names<IdSource> {
    static constexpr const char* all[] = {"tokens", "positions"};
};
template <>
struct Names<NormForm> {
    static constexpr const char* all[] = {"rms", "layer"};
};
template <>
struct Names<Activation> {
    static constexpr const char* all[] = {"silu", "gelu", "gelu_tanh", "relu"};
};

template <>
struct Names<RouterScore> {
    static constexpr const char* all[] = {"softmax", "sigmoid"};
};
template <>
struct Names<RoutingForm> {
    static constexpr const char* all[] = {"scores", "normalized"};
};

// is_row_wise: the operation may run a few rows at a time, fused with its neighbours
// (Program::fuse). False where all rows are computed in one call, such as a product.

struct EmbedOp {
    static constexpr const char* kind = "embed";
    static constexpr bool is_row_wise = true;
    ViewSpec y;
    WeightRef weight;
    IdSource ids;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("y", op.y), visit("weight", op.weight), visit("ids", op.ids);
    }
};

struct FeedOp {
    static constexpr const char* kind = "feed";
    static constexpr bool is_row_wise = true;
    ViewSpec y;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("y", op.y);
    }
};

struct NormOp {
    static constexpr const char* kind = "norm";
    static constexpr bool is_row_wise = true;
    ViewSpec x;
    std::optional<ViewSpec> delta;
    ViewSpec y;
    NormForm form;
    double eps;
    int64_t group;
    std::optional<WeightRef> weight, bias;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("delta", op.delta), visit("y", op.y), visit("form", op.form);
        visit("eps", op.eps), visit("group", op.group);
        visit("weight", op.weight), visit("bias", op.bias);
    }
};

struct LinearOp {
    static constexpr const char* kind = "linear";
    static constexpr bool is_row_wise = false;
    ViewSpec x, y;
    WeightRef weight;
    std::optional<WeightRef> bias;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("y", op.y), visit("weight", op.weight), visit("bias", op.bias);
    }
};

struct RopeOp {
    static constexpr const char* kind = "rope";
    static constexpr bool is_row_wise = true;
    ViewSpec x;
    int64_t rope, heads, head_dim;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("rope", op.rope);
        visit("heads", op.heads), visit("head_dim", op.head_dim);
    }
};

struct StoreKVOp {
    static constexpr const char* kind = "store_kv";
    static constexpr bool is_row_wise = true;
    ViewSpec k, v;
    int64_t layer, cache;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("k", op.k), visit("v", op.v), visit("layer", op.layer), visit("cache", op.cache);
    }
};

struct AttentionOp {
    static constexpr const char* kind = "attention";
    static constexpr bool is_row_wise = false;
    ViewSpec q, y;
    int64_t layer, heads, kv_heads, head_dim;
    double scale;
    int64_t window;
    double soft_cap;
    int64_t cache;
    int64_t rank, degree;  // of several, the ranks that have pieces of the cache by turns
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("q", op.q), visit("y", op.y), visit("layer", op.layer), visit("heads", op.heads);
        visit("kv_heads", op.kv_heads), visit("head_dim", op.head_dim), visit("scale", op.scale);
        visit("window", op.window), visit("soft_cap", op.soft_cap);
        visit("cache", op.cache), visit("rank", op.rank), visit("degree", op.degree);
    }
};

struct ActivationOp {
    static constexpr const char* kind = "activation";
    static constexpr bool is_row_wise = true;
    ViewSpec gate;
    std::optional<ViewSpec> up;
    ViewSpec y;
    Activation form;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("gate", op.gate), visit("up", op.up), visit("y", op.y), visit("form", op.form);
    }
};

struct AddOp {
    static constexpr const char* kind = "add";
    static constexpr bool is_row_wise = true;
    ViewSpec x, y;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("y", op.y);
    }
};

struct ScaleOp {
    static constexpr const char* kind = "scale";
    static constexpr bool is_row_wise = true;
    ViewSpec x;
    double factor;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("factor", op.factor);
    }
};

struct SoftCapOp {
    static constexpr const char* kind = "soft_cap";
    static constexpr bool is_row_wise = true;
    ViewSpec x;
    double cap;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("cap", op.cap);
    }
};

struct CopyOp {
    static constexpr const char* kind = "copy";
    static constexpr bool is_row_wise = true;
    ViewSpec x, y;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("y", op.y);
    }
};

// A copy that only steps make which keep taps (StepInputs).
struct TapOp : CopyOp {
    static constexpr const char* kind = "tap";
};

struct GatherRowsOp {
    static constexpr const char* kind = "gather_rows";
    static constexpr bool is_row_wise = false;
    ViewSpec x, y;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("y", op.y);
    }
};

struct RouteOp {
    static constexpr const char* kind = "route";
    static constexpr bool is_row_wise = true;
    ViewSpec x, y;
    RouterScore score;
    RoutingForm form;
    int64_t top_k;
    std::optional<WeightRef> bias;
    int64_t groups, top_groups;
    double scale;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("y", op.y), visit("score", op.score), visit("form", op.form);
        visit("top_k", op.top_k), visit("bias", op.bias), visit("groups", op.groups);
        visit("top_groups", op.top_groups), visit("scale", op.scale);
    }
};

struct ExpertsOp {
    static constexpr const char* kind = "experts";
    static constexpr bool is_row_wise = false;
    ViewSpec x, routing, y;
    WeightRef gate_up, down;
    Activation form;
    int64_t top_k;
    int64_t rank, degree, unit;
    std::vector<uint64_t> holders;  // bit r of an expert's: rank r has it; empty: split by columns
    int64_t load = -1;              // where its expert loads are counted (Program)
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("routing", op.routing), visit("y", op.y);
        visit("gate_up", op.gate_up), visit("down", op.down), visit("form", op.form);
        visit("top_k", op.top_k);
        visit("rank", op.rank), visit("degree", op.degree), visit("unit", op.unit);
        visit("holders", op.holders);
    }
};

// Columns of a view, of which each rank has its own: quire/program/comm_ops.py.
struct ColumnExchange {
    static constexpr bool is_row_wise = false;
    ViewSpec x;
    int64_t rank, degree, unit;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("rank", op.rank), visit("degree", op.degree);
        visit("unit", op.unit);
    }
};

struct AllGatherOp : ColumnExchange {
    static constexpr const char* kind = "all_gather";
};

struct AllReduceOp : ColumnExchange {
    static constexpr const char* kind = "all_reduce";
};

// Rows to the next stage of a pipeline, and from the one before: quire/program/stage_ops.py.
struct SendOp {
    static constexpr const char* kind = "send";
    static constexpr bool is_row_wise = false;
    ViewSpec x;
    int64_t stage;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("x", op.x), visit("stage", op.stage);
    }
};

struct RecvOp {
    static constexpr const char* kind = "recv";
    static constexpr bool is_row_wise = false;
    ViewSpec y;
    int64_t stage;
    template <class Self, class Visit>
    static void fields(Self& op, Visit&& visit) {
        visit("y", op.y), visit("stage", op.stage);
    }
};

using Operation = std::variant<EmbedOp, FeedOp, NormOp, LinearOp, RopeOp, StoreKVOp, AttentionOp,
                               ActivationOp, AddOp, ScaleOp, SoftCapOp, CopyOp, TapOp,
                               GatherRowsOp, RouteOp, ExpertsOp, AllGatherOp, AllReduceOp, SendOp,
                               RecvOp>;

// Calls visit(name, field) for each field of an operation.
template <class Visit>
void each_field(const Operation& operation, Visit&& visit) {
    std::visit([&](const auto& op) { std::decay_t<decltype(op)>::fields(op, visit); }, operation);
}

// Calls visit(view) for each view of an operation.
template <class Visit>
void each_view(const Operation& operation, Visit&& visit) {
    each_field(operation, [&](const char*, const auto& field) {
        using Field = std::decay_t<decltype(field)>;
        if constexpr (std::is_same_v<Field, ViewSpec>) visit(field);
        if constexpr (std::is_same_v<Field, std::optional<ViewSpec>>) {
            if (field) visit(*field);
        }
    });
}

inline const char* kind_of(const Operation& operation) {
    return std::visit([](const auto& op) { return op.kind; }, operation);
}

inline bool is_row_wise(const Operation& operation) {
    return std::visit([](const auto& op) { return op.is_row_wise; }, operation);
}

// Overloads for std::visit.
template <class... Functions>
struct Overloaded : Functions... {
    using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace quire
