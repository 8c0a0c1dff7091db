// The interpreter: iterates over a segment's operations and calls the kernel of each.
// program_check.cc checks its inputs. Consecutive row-wise operations are computed together, a few
// rows at a time: the same kernels on the same rows, so the same bits.

#include "quire/program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iterator>
#include <utility>

#include "quire/weight_stream.h"

namespace quire {

namespace {

// The first view; all views of a row-wise operation have equal row counts.
const ViewSpec& first_view(const Operation& op) {
    const ViewSpec* first = nullptr;
    each_view(op, [&](const ViewSpec& view) {
        if (first == nullptr) first = &view;
    });
    return *first;
}

const float* vector_of(const std::optional<WeightRef>& weight) {
    return weight ? (*weight)->vector() : nullptr;
}

// Rows that pass through the operations of a unit together: few enough to stay in the caches, with
// several chunks per thread, and never so few that distribution costs more than the work.
constexpr int64_t kUnitRows = 16;
constexpr int64_t kUnitElements = 8192;

int64_t rows_at_once(int64_t rows, int64_t width, int num_threads) {
    const int64_t least = std::max<int64_t>(kUnitElements / width, 1);
    return std::max(least, std::min(kUnitRows, rows / (4 * num_threads)));
}

// Keeps the weights of a unit in memory while it is computed. Throws Aborted where one cannot be
// read.
class Streamed {
  public:
    Streamed(const std::vector<const Weight*>& weights, const std::function<bool()>& is_stopped)
        : weights_(weights) {
        for (; count_ < weights_.size(); ++count_) {
            const Weight& weight = *weights_[count_];
            const std::string why = weight.stream()->acquire(weight.range(), is_stopped);
            if (why.empty()) continue;
            release();
            throw Aborted(why);
        }
    }
    ~Streamed() { release(); }
    Streamed(const Streamed&) = delete;
    Streamed& operator=(const Streamed&) = delete;

  private:
    void release() {
        for (size_t i = 0; i < count_; ++i) weights_[i]->stream()->release(weights_[i]->range());
    }

    const std::vector<const Weight*>& weights_;
    size_t count_ = 0;
};

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

Program::Program(std::shared_ptr<Pool> pool, int64_t arena_bytes, int64_t apart_bytes)
    : pool_(std::move(pool)), alone_(1, pool_->kernels()),
      arena_(arena_bytes), apart_(apart_bytes) {}

void Program::add_buffer(const BufferSpec& buffer) { arena_.add(buffer); }

void Program::add_buffer_apart(const BufferSpec& buffer) { apart_.add(buffer); }

void Program::add_segment(std::vector<Operation> ops) {
    Segment segment;
    if (apart_.num_buffers() > 0 && apart_.num_buffers() != arena_.num_buffers()) {
        throw std::invalid_argument("the second arena has not the buffers of the first");
    }
    std::vector<bool> seen(arena_.num_buffers(), false);
    for (const Segment& earlier : segments_) {
        for (int64_t buffer : earlier.own_buffers) seen[static_cast<size_t>(buffer)] = true;
    }
    for (Operation& op : ops) {
        check_op(op);
        reserve_experts(op);
        reserve_context(op);
        segment.uses_samples |= std::holds_alternative<GatherRowsOp>(op);
        segment.uses_cache |= std::holds_alternative<AttentionOp>(op) ||
                              std::holds_alternative<StoreKVOp>(op);
        each_view(op, [&](const ViewSpec& view) {
            const auto buffer = static_cast<size_t>(view.buffer);
            if (!seen[buffer]) segment.own_buffers.push_back(view.buffer);
            seen[buffer] = true;
        });
    }
    segment.units = fuse(ops);
    for (size_t i = 0; i < segment.units.size(); ++i) {
        if (std::holds_alternative<AttentionOp>(ops[segment.units[i].first])) {
            segment.attentions.push_back(i);
        }
    }
    segment.ops = std::move(ops);
    find_streamed(segment);
    segments_.push_back(std::move(segment));
}

void Program::find_streamed(Segment& segment) const {
    std::vector<std::vector<const Weight*>> streamed(segment.units.size());
    bool any = false;
    for (size_t i = 0; i < segment.units.size(); ++i) {
        const Unit& unit = segment.units[i];
        const auto add = [&](const Weight& weight) {
            if (weight.stream() == nullptr) return;
            streamed[i].push_back(&weight);
            any = true;
        };
        for (size_t op = unit.first; op < unit.first + unit.count; ++op) {
            each_field(segment.ops[op], [&](const char*, const auto& field) {
                using Field = std::decay_t<decltype(field)>;
                if constexpr (std::is_same_v<Field, WeightRef>) add(*field);
                if constexpr (std::is_same_v<Field, std::optional<WeightRef>>) {
                    if (field) add(**field);
                }
            });
        }
    }
    if (any) segment.streamed = std::move(streamed);
}

namespace {

// The inner columns that a rank computes.
Share inner_share(const ExpertsOp& op) {
    const int64_t inner = op.down->columns();
    if (op.degree == 1 || !op.holders.empty()) return {0, inner};
    return share_of(inner, op.unit, op.rank, op.degree);
}

// The heads of which a rank has the columns.
Share own_heads(const AttentionOp& op) { return share_of(op.heads, 1, op.rank, op.degree); }

}  // namespace

// Takes the scratch memory of an operation with experts, for the largest step of either arena.
void Program::reserve_experts(Operation& operation) {
    auto* op = std::get_if<ExpertsOp>(&operation);
    if (op == nullptr) return;
    if (op->routing.width > 1) {
        op->load = static_cast<int64_t>(expert_loads_.size());
        expert_loads_.emplace_back(static_cast<size_t>(op->routing.width), 0);
    }
    int64_t rows = arena_.at(op->x.buffer).max_rows;
    if (apart_.num_buffers() > 0) rows = std::max(rows, apart_.at(op->x.buffer).max_rows);
    const int64_t inner = op->down->columns();
    const Share share = inner_share(*op);
    const bool is_distributed = !op->holders.empty();
    experts_.reserve({rows, op->routing.width, op->top_k, op->x.width, inner,
                      share.end - share.start, arena_.at(op->x.buffer).type,
                      is_distributed ? op->degree : 0, is_distributed ? op->y.width : 0},
                     *pool_);
}

// Takes the scratch memory of attention over several ranks' pieces, for the largest step of either
// arena.
void Program::reserve_context(const Operation& operation) {
    const auto* op = std::get_if<AttentionOp>(&operation);
    if (op == nullptr || op->degree == 1) return;
    int64_t rows = arena_.at(op->q.buffer).max_rows;
    if (apart_.num_buffers() > 0) rows = std::max(rows, apart_.at(op->q.buffer).max_rows);
    const Share heads = own_heads(*op);
    context_.reserve({rows, op->heads, heads.end - heads.start, op->head_dim, op->degree});
}

std::vector<Program::Unit> Program::fuse(const std::vector<Operation>& ops) const {
    std::vector<Unit> units;
    // The row count that all views share; -1 if they differ or the operation is not row-wise.
    const auto rows_of = [&](const Operation& op) {
        const RowCount rows = buffer_at(first_view(op).buffer).rows;
        bool same = true;
        each_view(op, [&](const ViewSpec& view) {
            same &= buffer_at(view.buffer).rows == rows;
        });
        return is_row_wise(op) && same ? static_cast<int>(rows) : -1;
    };
    const auto overlap = [&](int64_t one, int64_t other) {
        return one != other && (arena_.overlap(one, other) ||
                                (apart_.num_buffers() > 0 && apart_.overlap(one, other)));
    };
    // Buffers reuse memory after their last reader; row by row, a later row may still be read.
    const auto shares_memory = [&](const Operation& op, const Unit& unit) {
        bool shared = false;
        for (size_t i = 0; i < unit.count; ++i) {
            each_view(ops[unit.first + i], [&](const ViewSpec& other) {
                each_view(op, [&](const ViewSpec& view) {
                    shared |= overlap(view.buffer, other.buffer);
                });
            });
        }
        return shared;
    };
    int before = -1;
    for (size_t i = 0; i < ops.size(); ++i) {
        const int rows = rows_of(ops[i]);
        if (rows >= 0 && rows == before && !shares_memory(ops[i], units.back())) {
            ++units.back().count;
        } else {
            units.push_back({i, 1, 0});
        }
        before = rows;
    }
    return units;
}

void Program::set_rope(int64_t index, const float* cos, const float* sin, int64_t positions,
                       int64_t half) {
    if (index < 0 || index > 255) throw std::invalid_argument("rope index out of range");
    if (static_cast<size_t>(index) >= ropes_.size()) ropes_.resize(static_cast<size_t>(index) + 1);
    ropes_[static_cast<size_t>(index)] = {cos, sin, positions, half};
}

void Program::allocate_cache(const CacheShape& shape, int64_t layers, int64_t num_blocks) {
    const bool is_small = shape.block_size == 4 || shape.block_size == 8;
    if (!is_small &&
        (shape.block_size < 16 || shape.block_size > 128 || shape.block_size % 16 != 0)) {
        throw std::invalid_argument("block_size is " + std::to_string(shape.block_size) +
                                    "; allowed are 4, 8, and multiples of 16 from 16 to 128");
    }
    if (shape.head_dim < 1 || shape.head_dim > kMaxHeadDim || shape.kv_heads < 1) {
        throw std::invalid_argument(std::to_string(shape.kv_heads) + " kv heads of " +
                                    std::to_string(shape.head_dim) +
                                    "; allowed are at least 1, of 1 to " +
                                    std::to_string(kMaxHeadDim) + " columns");
    }
    cache_ = std::make_shared<Memory>();
    cache_ = std::make_shared<Memory>(
        static_cast<size_t>(kv_block_bytes(shape) * layers * num_blocks));
    shape_ = shape;
    layers_ = layers;
    num_blocks_ = num_blocks;
}

void Program::place_cache(char* memory, int64_t bytes) {
    if (bytes < cache_bytes() + 64) {
        throw std::invalid_argument("a cache of " + std::to_string(cache_bytes()) +
                                    " bytes, and 64 after it, in " + std::to_string(bytes));
    }
    cache_ = std::make_shared<Memory>(
        Memory::borrowed(memory, static_cast<size_t>(cache_bytes())));
}

void Program::share_cache(const Program& other, int64_t layers) {
    if (layers < 1 || layers > other.layers_) {
        throw std::invalid_argument(std::to_string(layers) + " layers of a cache of " +
                                    std::to_string(other.layers_));
    }
    cache_ = other.cache_;
    shape_ = other.shape_;
    layers_ = layers;
    num_blocks_ = other.num_blocks_;
}

char* Program::layer_cache(int64_t layer) const {
    return cache_->data() + layer * num_blocks_ * kv_block_bytes(shape_);
}

void Program::copy_blocks(const int32_t* from, const int32_t* to, int64_t count) {
    check_range("copy_from", from, count, 0, num_blocks_);
    check_range("copy_to", to, count, 0, num_blocks_);
    const int64_t bytes = kv_block_bytes(shape_);
    pool_->deal(layers_, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t layer = begin; layer < end; ++layer) {
            char* base = layer_cache(layer);
            for (int64_t i = 0; i < count; ++i) {
                if (from[i] == to[i]) continue;
                std::memcpy(base + to[i] * bytes, base + from[i] * bytes,
                            static_cast<size_t>(bytes));
            }
        }
    });
}

Rows Program::rows(const ViewSpec& view) const {
    const BufferSpec& buffer = buffer_at(view.buffer);
    char* data = now_->data(buffer) + view.offset * type_bytes(buffer.type);
    return {data, buffer.stride, buffer.type, view.width};
}

int64_t Program::count_of(const ViewSpec& view, const StepInputs& inputs) const {
    switch (buffer_at(view.buffer).rows) {
        case RowCount::tokens: return inputs.num_tokens;
        case RowCount::samples: return inputs.num_samples;
        case RowCount::sequences: break;
    }
    return inputs.num_sequences;
}

RankGroup::Columns Program::columns_of(const ViewSpec& view, int64_t unit,
                                       const StepInputs& inputs) const {
    const Rows x = rows(view);
    const int64_t bytes = type_bytes(x.type);
    return {static_cast<char*>(x.data), count_of(view, inputs), x.stride * bytes, x.width, unit,
            bytes};
}

RankLink::Block Program::block_of(const ViewSpec& view, const StepInputs& inputs) const {
    const Rows all = rows(view);
    const int64_t bytes = type_bytes(all.type);
    return {static_cast<char*>(all.data), count_of(view, inputs), all.stride * bytes,
            all.width * bytes};
}

void Program::poison(const Segment& segment) {
    for (int64_t index : segment.own_buffers) {
        const BufferSpec& buffer = buffer_at(index);
        std::memset(now_->data(buffer), 0xff, static_cast<size_t>(bytes_of(buffer)));
    }
    experts_.poison();
    context_.poison();
}

const Program::Segment& Program::segment_at(int64_t index) const {
    if (index < 0 || index >= static_cast<int64_t>(segments_.size())) {
        throw std::invalid_argument("no segment " + std::to_string(index));
    }
    return segments_[static_cast<size_t>(index)];
}

void Program::set_timed(bool timed) {
    timed_ = timed;
    if (!timed) return;
    for (Segment& segment : segments_) {
        for (Unit& unit : segment.units) unit.nanoseconds = 0;
    }
}

void Program::run(int64_t segment_index, const StepInputs& inputs) {
    check(segment_at(segment_index), inputs);
    Segment& segment = segments_[static_cast<size_t>(segment_index)];
    if (poison_) poison(segment);
    run_units(segment, 0, segment.units.size(), inputs);
}

void Program::run_layers(int64_t segment_index, const StepInputs& inputs, int64_t first,
                         int64_t end) {
    const int64_t layers = num_layers(segment_index);
    const bool has_apart = apart_.num_buffers() > 0;
    if (!has_apart || first < 0 || first >= end || end > layers) {
        throw std::invalid_argument("layers " + std::to_string(first) + " to " +
                                    std::to_string(end) + " of " + std::to_string(layers) +
                                    (has_apart ? "" : "; there is no second arena"));
    }
    struct Apart {
        Program& program;
        explicit Apart(Program& of) : program(of) { program.now_ = &program.apart_; }
        ~Apart() { program.now_ = &program.arena_; }
    } const apart{*this};
    Segment& segment = segments_[static_cast<size_t>(segment_index)];
    check(segment, inputs);
    if (poison_ && first == 0) poison(segment);
    const auto unit_of = [&](int64_t layer) {
        return layer < layers ? segment.attentions[static_cast<size_t>(layer)]
                              : segment.units.size();
    };
    run_units(segment, first == 0 ? 0 : unit_of(first), unit_of(end), inputs);
}

void Program::run_units(Segment& segment, size_t first, size_t end, const StepInputs& inputs) {
    struct Numbered {
        std::atomic<int64_t>& runs;
        const int64_t number = runs.fetch_add(1) + 1;
        ~Numbered() { runs.fetch_add(1); }
    } const run{runs_};
    int64_t last = timed_ ? nanoseconds() : 0;
    for (size_t i = first; i < end; ++i) {
        Unit& unit = segment.units[i];
        if (aborted_.load(std::memory_order_relaxed) == run.number) {
            throw Aborted(std::string("the step was told to stop before ") +
                          kind_of(segment.ops[unit.first]));
        }
        if (segment.streamed.empty()) {
            run_unit(segment, unit, inputs);
        } else {
            const Streamed weights(segment.streamed[i], [&] {
                return aborted_.load(std::memory_order_relaxed) == run.number;
            });
            run_unit(segment, unit, inputs);
        }
        ops_done_.fetch_add(static_cast<int64_t>(unit.count), std::memory_order_relaxed);
        if (group_ != nullptr) group_->note_progress(static_cast<int64_t>(unit.count));
        if (!timed_) continue;
        const int64_t now = nanoseconds();
        unit.nanoseconds += now - last;
        last = now;
    }
}

void Program::run_unit(const Segment& segment, const Unit& unit, const StepInputs& inputs) {
    const Operation& op = segment.ops[unit.first];
    if (!is_row_wise(op)) return run_op(op, inputs);
    const int64_t count = count_of(first_view(op), inputs);
    // A unit is dealt as if it had no taps where they are not computed.
    const auto is_computed = [&](const Operation& one) {
        return inputs.keeps_taps || !std::holds_alternative<TapOp>(one);
    };
    int64_t width = 0;  // of all together
    size_t num = 0, last = 0;
    for (size_t i = unit.first; i < unit.first + unit.count; ++i) {
        if (!is_computed(segment.ops[i])) continue;
        width += first_view(segment.ops[i]).width;
        ++num;
        last = i;
    }
    if (num == 0) return;
    if (num == 1) return run_rows(segment.ops[last], inputs, 0, count, pool_.get());
    const int64_t grain = rows_at_once(count, width, pool_->num_threads());
    pool_->deal(count, grain, [&](int64_t begin, int64_t end, int) {
        for (; begin < end; begin += grain) {  // all rows if one thread computes alone
            const int64_t some = std::min(grain, end - begin);
            for (size_t i = unit.first; i <= last; ++i) {
                const Operation& one = segment.ops[i];
                if (is_computed(one)) run_rows(one, inputs, begin, some, &alone_);
            }
        }
    });
}

// An operation that is not row-wise.
void Program::run_op(const Operation& operation, const StepInputs& inputs) {
    const KernelTable& kernels = pool_->kernels();
    Pool* pool = pool_.get();
    std::visit(
        Overloaded{
            [&](const LinearOp& op) {
                const Rows x = rows(op.x), y = rows(op.y);
                const int64_t count = count_of(op.x, inputs);
                const float* bias = vector_of(op.bias);
                if (op.weight->has_ints()) {
                    kernels.linear_ints({x, y, count, op.weight->ints(), bias, pool});
                } else {
                    kernels.linear({x, y, count, op.weight->matrix(), bias, pool});
                }
            },
            [&](const AttentionOp& op) {
                const AttentionArgs args{rows(op.q), rows(op.y), count_of(op.q, inputs),
                                         inputs.num_sequences, inputs.seq_starts,
                                         inputs.positions, inputs.block_tables,
                                         inputs.table_columns, layer_cache(op.layer), shape_,
                                         op.heads, static_cast<float>(op.scale), op.window,
                                         static_cast<float>(op.soft_cap), &pieces_read_, pool};
                if (op.degree == 1) return kernels.attention(args);
                context_.run({args, op.rank, op.degree, own_heads(op), *group_});
            },
            [&](const GatherRowsOp& op) {
                kernels.gather_rows({rows(op.x), rows(op.y), count_of(op.y, inputs),
                                     inputs.sample_rows, pool});
            },
            [&](const ExpertsOp& op) {
                const bool is_distributed = !op.holders.empty();
                const Share share = is_distributed
                                        ? share_of(op.x.width, op.unit, op.rank, op.degree)
                                        : inner_share(op);
                int64_t* load = op.load < 0 ? nullptr : load_of(op.load);
                experts_.run({rows(op.x), rows(op.routing), rows(op.y), count_of(op.x, inputs),
                              *op.gate_up, *op.down, op.form, op.top_k,
                              share, op.unit, op.degree > 1 ? group_.get() : nullptr,
                              is_distributed ? op.holders.data() : nullptr, load, pool});
            },
            [&](const AllGatherOp& op) {
                group_->all_gather(columns_of(op.x, op.unit, inputs), *pool);
            },
            [&](const AllReduceOp& op) {
                group_->all_reduce(columns_of(op.x, op.unit, inputs), buffer_at(op.x.buffer).type,
                                   *pool);
            },
            [&](const SendOp& op) { to_->send(block_of(op.x, inputs), *pool); },
            [&](const RecvOp& op) { from_->receive(block_of(op.y, inputs), *pool); },
            [](const auto& op) {
                throw std::invalid_argument(std::string(op.kind) + " is row-wise");
            },
        },
        operation);
}

// Rows first .. first + count of a row-wise operation.
void Program::run_rows(const Operation& operation, const StepInputs& inputs, int64_t first,
                       int64_t count, Pool* pool) const {
    const KernelTable& kernels = pool->kernels();
    const auto at = [&](const ViewSpec& view) {
        Rows all = rows(view);
        all.data = all.at(first);
        return all;
    };
    const auto maybe = [&](const std::optional<ViewSpec>& view) {
        return view ? at(*view) : Rows{nullptr, 0, Type::f32, 0};
    };
    std::visit(
        Overloaded{
            [&](const EmbedOp& op) {
                const Weight& weight = *op.weight;
                const int32_t* ids = inputs.ids(op.ids) + first;
                if (weight.has_ints()) {
                    kernels.embed_ints({ids, count, weight.ints(), at(op.y), pool});
                } else {
                    kernels.embed({ids, count, weight.form() == Form::matrix, weight.matrix(),
                                   at(op.y), pool});
                }
            },
            [&](const FeedOp& op) {
                const int64_t columns = inputs.feature_columns;
                // The kernel reads its source only.
                auto* data = const_cast<float*>(inputs.features + first * columns);
                kernels.copy({Rows{data, columns, Type::f32, columns}, at(op.y), count, pool});
            },
            [&](const NormOp& op) {
                kernels.norm({at(op.x), maybe(op.delta), at(op.y), count,
                              op.form == NormForm::layer, static_cast<float>(op.eps),
                              vector_of(op.weight), vector_of(op.bias), op.group, pool});
            },
            [&](const RopeOp& op) {
                const Rope& rope = ropes_[static_cast<size_t>(op.rope)];
                kernels.rope({at(op.x), count, op.heads, op.head_dim, rope.half,
                              inputs.rope_positions + first, rope.cos, rope.sin, pool});
            },
            [&](const StoreKVOp& op) {
                kernels.store_kv({at(op.k), at(op.v), count, inputs.kv_slots + first,
                                  layer_cache(op.layer), shape_, pool});
            },
            [&](const ActivationOp& op) {
                kernels.activation({at(op.gate), maybe(op.up), at(op.y), count, op.form, pool});
            },
            [&](const AddOp& op) { kernels.add({at(op.x), at(op.y), count, pool}); },
            [&](const ScaleOp& op) {
                kernels.scale({at(op.x), count, static_cast<float>(op.factor), pool});
            },
            [&](const SoftCapOp& op) {
                kernels.soft_cap({at(op.x), count, static_cast<float>(op.cap), pool});
            },
            [&](const CopyOp& op) { kernels.copy({at(op.x), at(op.y), count, pool}); },
            [&](const TapOp& op) { kernels.copy({at(op.x), at(op.y), count, pool}); },
            [&](const RouteOp& op) {
                kernels.route({at(op.x), at(op.y), count, op.score, op.form, op.top_k,
                               vector_of(op.bias), op.groups, op.top_groups,
                               static_cast<float>(op.scale), pool});
            },
            [](const auto& op) {
                throw std::invalid_argument(std::string(op.kind) + " is not row-wise");
            },
        },
        operation);
}

}  // namespace quire
