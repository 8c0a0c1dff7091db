// The experts of a layer (experts.h), batch after batch of (row, expert) pairs: gather the rows,
// gate and up, activation, down, and the weighted sum. Products are dealt over the panels of all
// experts of a batch together, so that few rows keep every thread busy, and each thread walks long
// runs of weights; a thread computes its panels with the kernels of dense layers.

#include "quire/experts.h"

#include <algorithm>
#include <cstring>

#include "quire/expert_scratch.h"

namespace quire {

namespace {

// Rows a thread multiplies by its panels at a time, which bounds the memory it packs them in.
constexpr int64_t kRowsAtOnce = 192;
// Below so many products of a panel a second thread costs more than it gives.
constexpr int64_t kLeastWork = 16384;

// Columns of a pair's row: gate and up, and of several ranks all inner columns before them.
int64_t inner_columns(const ExpertShape& shape) {
    return shape.own == shape.inner ? 2 * shape.inner : shape.inner + 2 * shape.own;
}

Rows from_row(Rows rows, int64_t row) {
    rows.data = rows.at(row);
    return rows;
}

Rows from_column(Rows rows, int64_t column, int64_t width) {
    rows.data = static_cast<char*>(rows.data) + column * type_bytes(rows.type);
    rows.width = width;
    return rows;
}

// Hands out parts of an area, each aligned to 64; counts only where the base is null.
class Areas {
  public:
    explicit Areas(char* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        char* at = base_ == nullptr ? nullptr : base_ + bytes_;
        bytes_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
        return reinterpret_cast<T*>(at);
    }
    int64_t bytes() const { return bytes_; }

  private:
    char* base_;
    int64_t bytes_ = 0;
};

}  // namespace

int64_t expert_thread_bytes(const ExpertShape& shape) {
    // A packed row takes most as integers: 136 bytes for 64 columns (int_rows.h).
    const int64_t columns = std::max(shape.hidden, shape.inner);
    return (kRowsAtOnce + 32) * (round_up(columns, 64) / 64 * 136 + 64);
}

int64_t shared_expert_bytes(const ExpertShape& shape) {
    const int64_t pairs = shape.rows * shape.top_k, batch = batch_pairs(shape);
    Areas areas(nullptr);
    for (int i = 0; i < 4; ++i) areas.take<int32_t>(pairs);
    areas.take<int32_t>(shape.experts + 1);
    areas.take<int64_t>(3 * shape.experts);
    areas.take<char>(batch * line(shape.hidden, shape.type));
    areas.take<char>(batch * line(inner_columns(shape), shape.type));
    areas.take<char>(batch * line(shape.hidden, Type::f32));
    if (shape.degree > 0) {
        for (int i = 0; i < 2; ++i) areas.take<int32_t>(shape.degree * shape.experts);
        areas.take<char>(pairs * line(shape.share, Type::f32));
    }
    return areas.bytes();
}

ExpertRunner::Pairs ExpertRunner::place(const ExpertShape& shape) const {
    const int64_t pairs = shape.rows * shape.top_k, batch = batch_pairs(shape);
    Areas areas(memory_.data());
    Pairs placed{};
    placed.row = areas.take<int32_t>(pairs);
    placed.place = areas.take<int32_t>(pairs);
    placed.weight = areas.take<float>(pairs);
    placed.expert = areas.take<int32_t>(pairs);
    placed.start = areas.take<int32_t>(shape.experts + 1);
    placed.pieces = areas.take<Piece>(shape.experts);
    placed.gathered = areas.take<char>(batch * line(shape.hidden, shape.type));
    placed.inner = areas.take<char>(batch * line(inner_columns(shape), shape.type));
    placed.out = areas.take<char>(batch * line(shape.hidden, Type::f32));
    if (shape.degree > 0) {
        placed.part = areas.take<int32_t>(shape.degree * shape.experts);
        placed.next = areas.take<int32_t>(shape.degree * shape.experts);
        placed.all = areas.take<char>(pairs * line(shape.share, Type::f32));
    }
    return placed;
}

void ExpertRunner::reserve(const ExpertShape& shape, Pool& pool) {
    const auto bytes = static_cast<std::size_t>(shared_expert_bytes(shape));
    if (memory_.bytes() < bytes) memory_ = Memory(bytes);
    while (static_cast<int>(alone_.size()) < pool.num_threads()) {
        alone_.push_back(std::make_unique<Pool>(1, pool.kernels()));
    }
    for (auto& alone : alone_) alone->shared(expert_thread_bytes(shape));
}

void ExpertRunner::poison() {
    if (memory_.bytes() > 0) std::memset(memory_.data(), 0xff, memory_.bytes());
}

// Lists each row's experts with their weights, and counts each expert's rows in start[expert + 1].
void ExpertRunner::choose(const ExpertsArgs& args, const Pairs& pairs) const {
    const int64_t experts = args.routing.width;
    std::fill_n(pairs.start, experts + 1, 0);
    for (int64_t row = 0; row < args.rows; ++row) {
        const auto* routing = static_cast<const float*>(args.routing.at(row));
        int64_t chosen = row * args.top_k;
        const int64_t end = chosen + args.top_k;
        for (int64_t expert = 0; expert < experts && chosen < end; ++expert) {
            if (routing[expert] == 0.0f) continue;
            pairs.expert[chosen] = static_cast<int32_t>(expert);
            pairs.weight[chosen] = routing[expert];
            ++pairs.start[expert + 1];
            ++chosen;
        }
        for (; chosen < end; ++chosen) pairs.expert[chosen] = -1;
    }
    if (args.load == nullptr) return;
    for (int64_t expert = 0; expert < experts; ++expert) {
        args.load[expert] += pairs.start[expert + 1];
    }
}

// Places the pairs in the order of the experts; returns how many there are.
int64_t ExpertRunner::sort(const ExpertsArgs& args, const Pairs& pairs) const {
    const int64_t experts = args.routing.width;
    for (int64_t expert = 0; expert < experts; ++expert) {
        pairs.start[expert + 1] += pairs.start[expert];
    }
    const int64_t total = pairs.start[experts];
    for (int64_t i = 0; i < args.rows * args.top_k; ++i) {
        const int32_t expert = pairs.expert[i];
        pairs.place[i] = expert < 0 ? -1 : pairs.start[expert]++;
        if (expert >= 0) pairs.row[pairs.place[i]] = static_cast<int32_t>(i / args.top_k);
    }
    // Each start has moved to its expert's end, which is the next one's start.
    for (int64_t expert = experts; expert > 0; --expert) {
        pairs.start[expert] = pairs.start[expert - 1];
    }
    pairs.start[0] = 0;
    return total;
}

void ExpertRunner::run(const ExpertsArgs& args) {
    const bool is_distributed = args.holders != nullptr;
    const int64_t inner = args.down.columns(), share = args.share.end - args.share.start;
    const ExpertShape shape{args.rows, args.routing.width, args.top_k, args.x.width, inner,
                            is_distributed ? inner : share, args.x.type,
                            is_distributed ? args.group->members() : 0,
                            is_distributed ? share : 0};
    if (args.rows == 0) return;
    const Pairs pairs = place(shape);
    choose(args, pairs);
    if (is_distributed) return run_distributed(args, shape, pairs);
    const int64_t total = sort(args, pairs), most = batch_pairs(shape);
    if (total == 0) return run_batch(args, shape, pairs, 0, 0);
    for (int64_t first = 0; first < total;) {
        // Whole experts where they fit: the weights of one that is cut are read twice.
        int64_t end = first;
        for (int64_t expert = 0; expert < shape.experts; ++expert) {
            const int64_t of_expert = pairs.start[expert + 1];
            if (of_expert > first && of_expert - first <= most) end = of_expert;
        }
        if (end == first) end = first + most;
        run_batch(args, shape, pairs, first, end);
        first = end;
    }
}

// Pairs first .. end. The first batch clears y.
void ExpertRunner::run_batch(const ExpertsArgs& args, const ExpertShape& shape,
                             const Pairs& pairs, int64_t first, int64_t end) {
    int64_t count = 0;
    for (int64_t expert = 0; expert < shape.experts; ++expert) {
        const int64_t from = std::max<int64_t>(pairs.start[expert], first);
        const int64_t to = std::min<int64_t>(pairs.start[expert + 1], end);
        if (from < to) pairs.pieces[count++] = {expert, from, to};
    }
    const Rows out = outputs(args, shape, pairs, count, first, end);
    args.pool->kernels().sum_experts({out, args.y, args.rows, args.top_k, pairs.place,
                                      pairs.weight, first, end, args.pool});
}

// What the experts give for pairs first .. end, which are the first `count` pieces.
Rows ExpertRunner::outputs(const ExpertsArgs& args, const ExpertShape& shape, const Pairs& pairs,
                           int64_t count, int64_t first, int64_t end) {
    const KernelTable& kernels = args.pool->kernels();
    experts_read_ += count;
    const Rows gathered = rows_at(pairs.gathered, line(shape.hidden, shape.type), shape.type,
                                  shape.hidden);
    const int64_t columns = inner_columns(shape), own = shape.own;
    const int64_t own_first = own == shape.inner ? 0 : args.share.start;
    const Rows all = rows_at(pairs.inner, line(columns, shape.type), shape.type, columns);
    const Rows inner = from_column(all, 0, shape.inner);
    const Rows halves = from_column(all, columns - 2 * own, 2 * own);
    const Rows gate = from_column(halves, 0, own), up = from_column(halves, own, own);
    const int64_t width = shape.degree > 0 ? shape.hidden : args.y.width;
    const Rows out = rows_at(pairs.out, line(shape.hidden, Type::f32), Type::f32, width);
    kernels.gather_rows({args.x, gathered, end - first, pairs.row + first, args.pool});
    products(args, args.gate_up, 2 * own, gathered, halves, pairs.pieces, count, first);
    kernels.activation({gate, up, from_column(inner, own_first, own), end - first, args.form,
                        args.pool});
    if (args.group != nullptr && shape.degree == 0) {
        const int64_t bytes = type_bytes(shape.type);
        args.group->all_gather({static_cast<char*>(inner.data), end - first, inner.stride * bytes,
                                shape.inner, args.unit, bytes},
                               *args.pool);
    }
    products(args, args.down, width, inner, out, pairs.pieces, count, first);
    return out;
}

// y = x @ W.T, expert by expert, n outputs each; row 0 of x and y is pair `first`.
void ExpertRunner::products(const ExpertsArgs& args, const Weight& weight, int64_t n,
                            const Rows& x, const Rows& y, const Piece* pieces, int64_t count,
                            int64_t first) {
    const KernelTable& kernels = args.pool->kernels();
    const int64_t k = weight.columns(), panels = (n + kPanel - 1) / kPanel, items = panels * count;
    const int64_t bytes = weight.has_ints() ? int_panel_bytes(k, weight.ints().scheme)
                                            : panel_bytes(k, weight.type());
    if (items == 0) return;
    const int64_t pairs = pieces[count - 1].end - pieces[0].first;
    const int64_t panel_work = k * kPanel * std::max<int64_t>(pairs / count, 1);
    const int64_t share = items / (8 * args.pool->num_threads());
    const int64_t grain = std::max({std::min(share, panels), kLeastWork / panel_work, int64_t{1}});
    args.pool->deal(items, grain, [&](int64_t begin, int64_t end, int thread) {
        Pool* alone = alone_[static_cast<size_t>(thread)].get();
        while (begin < end) {
            const Piece& piece = pieces[begin / panels];
            const int64_t panel = begin % panels, some = std::min(end - begin, panels - panel);
            const int64_t column = panel * kPanel;
            const int64_t outputs = std::min(some * kPanel, n - column);
            const char* data = weight.data() + (piece.expert * panels + panel) * bytes;
            for (int64_t row = piece.first; row < piece.end; row += kRowsAtOnce) {
                const int64_t rows = std::min(piece.end - row, kRowsAtOnce);
                const Rows in = from_row(x, row - first);
                const Rows to = from_column(from_row(y, row - first), column, outputs);
                if (weight.has_ints()) {
                    const PackedInts part{data, outputs, k, weight.ints().scheme};
                    kernels.linear_ints({in, to, rows, part, nullptr, alone});
                } else {
                    const PackedMatrix part{data, outputs, k, weight.type()};
                    kernels.linear({in, to, rows, part, nullptr, alone});
                }
            }
            begin += some;
        }
    });
}

}  // namespace quire
