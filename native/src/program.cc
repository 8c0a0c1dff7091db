// The interpreter: walks a segment's operations and calls the kernel of each. Decides nothing
// about numbers; checks that indices from outside stay inside their arrays, since kernels trust
// what they are given. Operations that keep to their rows and follow each other are computed row by
// row together: the same kernels on the same rows, so the same bits.

#include "quire/program.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

namespace quire {

namespace {

// What each kind carries, in the order of OpKind.
struct Arity {
    const char* name;
    size_t min_views, max_views, ints, floats, min_weights, max_weights;
};

constexpr Arity kArities[] = {
    {"embed", 1, 1, 1, 0, 1, 1},      {"norm", 2, 3, 2, 1, 0, 2},
    {"linear", 2, 2, 0, 0, 1, 2},     {"rope", 1, 1, 3, 0, 0, 0},
    {"store_kv", 2, 2, 1, 0, 0, 0},   {"attention", 2, 2, 3, 2, 0, 0},
    {"activation", 2, 3, 1, 0, 0, 0}, {"add", 2, 2, 0, 0, 0, 0},
    {"scale", 1, 1, 0, 1, 0, 0},      {"soft_cap", 1, 1, 0, 1, 0, 0},
    {"copy", 2, 2, 0, 0, 0, 0},       {"gather_rows", 2, 2, 0, 0, 0, 0},
};

const Arity& arity_of(OpKind kind) { return kArities[static_cast<size_t>(kind)]; }

bool within(size_t value, size_t low, size_t high) { return low <= value && value <= high; }

// Whether row r of what it writes depends on nothing but row r of what it reads.
bool keeps_to_rows(OpKind kind) {
    return kind != OpKind::linear && kind != OpKind::attention && kind != OpKind::gather_rows;
}

// Rows that go through the operations of a unit together: few enough to stay in the caches, of few
// rows in all some for each thread, and never so little that handing it out costs more.
constexpr int64_t kUnitRows = 16;
constexpr int64_t kUnitElements = 8192;

int64_t rows_at_once(int64_t rows, int64_t width, int num_threads) {
    const int64_t least = std::max<int64_t>(kUnitElements / width, 1);
    return std::max(least, std::min(kUnitRows, rows / (4 * num_threads)));
}

int64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// What an embed looks up.
const int32_t* ids_of(const OpSpec& op, const StepInputs& inputs) {
    return op.ints[0] ? inputs.rope_positions : inputs.token_ids;
}

void check_range(const char* name, const int32_t* values, int64_t count, int64_t low,
                 int64_t end) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < low || values[i] >= end) {
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " +
                                        std::to_string(values[i]) + "; allowed are " +
                                        std::to_string(low) + " to " + std::to_string(end - 1));
        }
    }
}

}  // namespace

const char* name_of(OpKind kind) { return arity_of(kind).name; }

OpKind op_kind_named(const std::string& name) {
    for (size_t i = 0; i < std::size(kArities); ++i) {
        if (name == kArities[i].name) return static_cast<OpKind>(i);
    }
    throw std::invalid_argument("no operation is called \"" + name + "\"");
}

Program::Program(std::shared_ptr<Pool> pool, int64_t arena_bytes, int64_t apart_bytes)
    : pool_(std::move(pool)), alone_(1, pool_->kernels()),
      arena_(arena_bytes), apart_(apart_bytes) {}

void Program::add_buffer(const BufferSpec& buffer) { arena_.add(buffer); }

void Program::add_buffer_apart(const BufferSpec& buffer) { apart_.add(buffer); }

void Program::check_op(const OpSpec& op) const {
    const Arity& arity = arity_of(op.kind);
    const auto refuse = [&](const char* why) {
        throw std::invalid_argument(std::string(arity.name) + ": " + why);
    };
    if (!within(op.views.size(), arity.min_views, arity.max_views) ||
        op.ints.size() != arity.ints || op.floats.size() != arity.floats ||
        !within(op.weights.size(), arity.min_weights, arity.max_weights)) {
        refuse("too many or too few views, numbers or weights");
    }
    for (const ViewSpec& view : op.views) {
        const BufferSpec& buffer = buffer_at(view.buffer);
        if (view.offset < 0 || view.width < 1 || view.offset + view.width > buffer.stride) {
            refuse("a view is wider than its buffer");
        }
    }
    for (const auto& weight : op.weights) {
        if (weight == nullptr) refuse("a weight is missing");
    }
    if (op.kind == OpKind::linear) {
        const Weight& weight = *op.weights[0];
        if (weight.form() != Form::matrix) refuse("the weight is not a matrix");
        if (weight.columns() != op.views[0].width || weight.rows() != op.views[1].width) {
            refuse("views and weight differ in width");
        }
        if (!weight.has_ints() && buffer_at(op.views[0].buffer).type != weight.type()) {
            refuse("the input's dtype is not the weight's");
        }
    }
    if (op.weights.size() > 1 && op.weights[1]->rows() != op.weights[0]->rows()) {
        refuse("the bias has another length than the weight has rows");
    }
    if (op.kind == OpKind::embed) {
        if (op.weights[0]->columns() != op.views[0].width) {
            refuse("the output is not as wide as the table");
        }
        if (buffer_at(op.views[0].buffer).rows != RowCount::tokens) {
            refuse("the output has not a row for each token");
        }
    }
    if (op.kind == OpKind::soft_cap && !(op.floats[0] > 0.0)) refuse("the cap is not above zero");
    if (op.kind == OpKind::norm) {
        const int64_t width = op.views[0].width;
        const int64_t run = op.ints[1] > 0 ? op.ints[1] : width;
        if (width % run != 0 || (!op.weights.empty() && op.weights[0]->rows() != run)) {
            refuse("weight and group disagree");
        }
        for (const ViewSpec& view : op.views) {
            if (view.width != width) refuse("views differ in width");
        }
    }
    if (op.kind == OpKind::add || op.kind == OpKind::activation || op.kind == OpKind::copy ||
        op.kind == OpKind::gather_rows) {
        for (const ViewSpec& view : op.views) {
            if (view.width != op.views[0].width) refuse("views differ in width");
        }
    }
    if (op.kind == OpKind::gather_rows &&
        buffer_at(op.views[0].buffer).type != buffer_at(op.views[1].buffer).type) {
        refuse("views differ in dtype");
    }
    if (op.kind == OpKind::activation) {
        if (op.ints[0] < 0 || op.ints[0] > 3) refuse("unknown form");
        if (op.views.size() > 2 &&
            buffer_at(op.views[0].buffer).type != buffer_at(op.views[2].buffer).type) {
            refuse("gate and up differ in dtype");
        }
    }
    if (op.kind == OpKind::rope && op.ints[1] * op.ints[2] != op.views[0].width) {
        refuse("the view does not hold heads * head_dim columns");
    }
}

void Program::add_segment(std::vector<OpSpec> ops) {
    Segment segment;
    if (apart_.num_buffers() > 0 && apart_.num_buffers() != arena_.num_buffers()) {
        throw std::invalid_argument("the second arena has not the buffers of the first");
    }
    std::vector<bool> seen(arena_.num_buffers(), false);
    for (const Segment& earlier : segments_) {
        for (int64_t buffer : earlier.own_buffers) seen[static_cast<size_t>(buffer)] = true;
    }
    for (const OpSpec& op : ops) {
        check_op(op);
        segment.uses_samples |= op.kind == OpKind::gather_rows;
        segment.uses_cache |= op.kind == OpKind::attention || op.kind == OpKind::store_kv;
        for (const ViewSpec& view : op.views) {
            const auto buffer = static_cast<size_t>(view.buffer);
            if (!seen[buffer]) segment.own_buffers.push_back(view.buffer);
            seen[buffer] = true;
        }
    }
    segment.units = fuse(ops);
    for (size_t i = 0; i < segment.units.size(); ++i) {
        if (ops[segment.units[i].first].kind == OpKind::attention) segment.attentions.push_back(i);
    }
    segment.ops = std::move(ops);
    segments_.push_back(std::move(segment));
}

std::vector<Program::Unit> Program::fuse(const std::vector<OpSpec>& ops) const {
    std::vector<Unit> units;
    // The row count that all views share; none where they differ or the kind leaves its rows.
    const auto rows_of = [&](const OpSpec& op) {
        const RowCount rows = buffer_at(op.views[0].buffer).rows;
        const bool same = std::all_of(op.views.begin(), op.views.end(), [&](const ViewSpec& view) {
            return buffer_at(view.buffer).rows == rows;
        });
        return keeps_to_rows(op.kind) && same ? static_cast<int>(rows) : -1;
    };
    // Buffers reuse memory once nobody reads what was there; rows in turn might still.
    const auto shares_memory = [&](const OpSpec& op, const Unit& unit) {
        for (size_t i = 0; i < unit.count; ++i) {
            for (const ViewSpec& other : ops[unit.first + i].views) {
                for (const ViewSpec& view : op.views) {
                    if (view.buffer == other.buffer) continue;
                    if (arena_.overlap(view.buffer, other.buffer)) return true;
                    if (apart_.num_buffers() == 0) continue;
                    if (apart_.overlap(view.buffer, other.buffer)) return true;
                }
            }
        }
        return false;
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
    if (shape.block_size < 16 || shape.block_size > 128 || shape.block_size % 16 != 0) {
        throw std::invalid_argument("block_size is " + std::to_string(shape.block_size) +
                                    "; allowed are multiples of 16 from 16 to 128");
    }
    if (shape.head_dim < 1 || shape.head_dim > kMaxHeadDim || shape.kv_heads < 1) {
        throw std::invalid_argument(std::to_string(shape.kv_heads) + " kv heads of " +
                                    std::to_string(shape.head_dim) +
                                    "; allowed are at least 1, of 1 to " +
                                    std::to_string(kMaxHeadDim) + " columns");
    }
    cache_ = Memory();
    cache_ = Memory(static_cast<size_t>(kv_block_bytes(shape) * layers * num_blocks));
    shape_ = shape;
    layers_ = layers;
    num_blocks_ = num_blocks;
}

char* Program::layer_cache(int64_t layer) const {
    return cache_.data() + layer * num_blocks_ * kv_block_bytes(shape_);
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

void Program::check_cache_op(const OpSpec& op) const {
    const auto refuse = [&](const char* why) {
        throw std::invalid_argument(std::string(name_of(op.kind)) + ": " + why);
    };
    if (num_blocks_ == 0) refuse("the cache has not been allocated");
    if (op.ints[0] < 0 || op.ints[0] >= layers_) refuse("the cache has no such layer");
    const bool stores = op.kind == OpKind::store_kv;
    const int64_t heads = stores ? shape_.kv_heads : op.ints[1];
    if (heads % shape_.kv_heads != 0) refuse("heads is no multiple of kv_heads");
    for (const ViewSpec& view : op.views) {
        if (view.width != heads * shape_.head_dim) refuse("a view has not the heads' width");
    }
    for (size_t i = 0; i < (stores ? 2 : 1); ++i) {
        if (buffer_at(op.views[i].buffer).type != shape_.type) {
            refuse("an input's dtype is not the cache's");
        }
    }
}

void Program::check(const Segment& segment, const StepInputs& inputs) const {
    for (const OpSpec& op : segment.ops) {
        for (const ViewSpec& view : op.views) {
            const int64_t count = count_of(view, inputs);
            if (count > buffer_at(view.buffer).max_rows) {
                throw std::invalid_argument(std::to_string(count) + " rows; the buffers hold " +
                                            std::to_string(buffer_at(view.buffer).max_rows));
            }
        }
        if (op.kind == OpKind::embed) {
            check_range(op.ints[0] ? "rope_positions" : "token_ids", ids_of(op, inputs),
                        inputs.num_tokens, 0, op.weights[0]->rows());
        }
        if (op.kind == OpKind::rope) {
            const auto index = static_cast<size_t>(op.ints[0]);
            const int64_t known = index < ropes_.size() ? ropes_[index].positions : 0;
            check_range("rope_positions", inputs.rope_positions, inputs.num_tokens, 0, known);
            if (known > 0 && 2 * ropes_[index].half > op.ints[2]) {
                throw std::invalid_argument("rope: more angles than half a head has columns");
            }
        }
        if (op.kind == OpKind::store_kv || op.kind == OpKind::attention) check_cache_op(op);
    }
    if (segment.uses_samples) {
        check_range("sample_rows", inputs.sample_rows, inputs.num_samples, 0, inputs.num_tokens);
    }
    if (!segment.uses_cache) return;
    const int64_t block_size = shape_.block_size;
    check_range("kv_slots", inputs.kv_slots, inputs.num_tokens, -1, num_blocks_ * block_size);
    check_range("positions", inputs.positions, inputs.num_tokens, 0,
                inputs.table_columns * block_size);
    const int32_t* starts = inputs.seq_starts;
    if (starts[0] != 0 || starts[inputs.num_sequences] != inputs.num_tokens) {
        throw std::invalid_argument("seq_starts do not span the token rows");
    }
    for (int64_t s = 0; s < inputs.num_sequences; ++s) {
        if (starts[s] > starts[s + 1]) throw std::invalid_argument("seq_starts go backwards");
        int64_t columns = 0;  // that the sequence's positions reach
        for (int64_t row = starts[s]; row < starts[s + 1]; ++row) {
            const int64_t needed = inputs.positions[row] / block_size + 1;
            columns = needed > columns ? needed : columns;
            if (row > starts[s] && inputs.positions[row] != inputs.positions[row - 1] + 1) {
                throw std::invalid_argument("positions of a sequence are not consecutive");
            }
        }
        check_range("block_tables", inputs.block_tables + s * inputs.table_columns, columns, 0,
                    num_blocks_);
    }
}

void Program::poison(const Segment& segment) {
    for (int64_t index : segment.own_buffers) {
        const BufferSpec& buffer = buffer_at(index);
        std::memset(now_->data(buffer), 0xff, static_cast<size_t>(bytes_of(buffer)));
    }
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
                          name_of(segment.ops[unit.first].kind));
        }
        run_unit(segment, unit, inputs);
        ops_done_.fetch_add(static_cast<int64_t>(unit.count), std::memory_order_relaxed);
        if (!timed_) continue;
        const int64_t now = nanoseconds();
        unit.nanoseconds += now - last;
        last = now;
    }
}

void Program::run_unit(const Segment& segment, const Unit& unit, const StepInputs& inputs) {
    const OpSpec& op = segment.ops[unit.first];
    if (!keeps_to_rows(op.kind)) return run_op(op, inputs);
    const int64_t count = count_of(op.views[0], inputs);
    if (unit.count == 1) return run_rows(op, inputs, 0, count, pool_.get());
    int64_t width = 0;  // of all together
    for (size_t i = 0; i < unit.count; ++i) width += segment.ops[unit.first + i].views[0].width;
    const int64_t grain = rows_at_once(count, width, pool_->num_threads());
    pool_->deal(count, grain, [&](int64_t begin, int64_t end, int) {
        for (; begin < end; begin += grain) {  // all rows where nobody else takes part
            const int64_t some = std::min(grain, end - begin);
            for (size_t i = 0; i < unit.count; ++i) {
                run_rows(segment.ops[unit.first + i], inputs, begin, some, &alone_);
            }
        }
    });
}

void Program::run_op(const OpSpec& op, const StepInputs& inputs) {
    const KernelTable& kernels = pool_->kernels();
    Pool* pool = pool_.get();
    const Rows x = rows(op.views[0]), y = rows(op.views[1]);
    const int64_t count = count_of(op.views[0], inputs);
    const float* bias = op.weights.size() > 1 ? op.weights[1]->vector() : nullptr;
    switch (op.kind) {
        case OpKind::linear:
            if (op.weights[0]->has_ints()) {
                return kernels.linear_ints({x, y, count, op.weights[0]->ints(), bias, pool});
            }
            return kernels.linear({x, y, count, op.weights[0]->matrix(), bias, pool});
        case OpKind::attention:
            return kernels.attention({x, y, count, inputs.num_sequences, inputs.seq_starts,
                                      inputs.positions, inputs.block_tables,
                                      inputs.table_columns, layer_cache(op.ints[0]), shape_,
                                      op.ints[1], static_cast<float>(op.floats[0]), op.ints[2],
                                      static_cast<float>(op.floats[1]), &pieces_read_, pool});
        case OpKind::gather_rows:
            return kernels.gather_rows({x, y, count_of(op.views[1], inputs), inputs.sample_rows,
                                        pool});
        default:
            throw std::invalid_argument(std::string(name_of(op.kind)) + " keeps to its rows");
    }
}

// Rows first .. first + count of an operation that keeps to its rows.
void Program::run_rows(const OpSpec& op, const StepInputs& inputs, int64_t first, int64_t count,
                       Pool* pool) const {
    const KernelTable& kernels = pool->kernels();
    const auto view = [&](size_t i) {
        if (i >= op.views.size()) return Rows{nullptr, 0, Type::f32, 0};
        Rows all = rows(op.views[i]);
        all.data = all.at(first);
        return all;
    };
    const Rows x = view(0), second = view(1), third = view(2);
    const auto vector = [&](size_t i) {
        return i < op.weights.size() ? op.weights[i]->vector() : nullptr;
    };
    const auto real = [&](size_t i) { return static_cast<float>(op.floats[i]); };
    switch (op.kind) {
        case OpKind::embed: {
            const Weight& weight = *op.weights[0];
            const int32_t* ids = ids_of(op, inputs) + first;
            if (weight.has_ints()) return kernels.embed_ints({ids, count, weight.ints(), x, pool});
            return kernels.embed(
                {ids, count, weight.form() == Form::matrix, weight.matrix(), x, pool});
        }
        case OpKind::norm:
            return kernels.norm({x, third, second, count, op.ints[0] != 0, real(0), vector(0),
                                 vector(1), op.ints[1], pool});
        case OpKind::rope: {
            const Rope& rope = ropes_[static_cast<size_t>(op.ints[0])];
            return kernels.rope({x, count, op.ints[1], op.ints[2], rope.half,
                                 inputs.rope_positions + first, rope.cos, rope.sin, pool});
        }
        case OpKind::store_kv:
            return kernels.store_kv({x, second, count, inputs.kv_slots + first,
                                     layer_cache(op.ints[0]), shape_, pool});
        case OpKind::activation:
            return kernels.activation(
                {x, third, second, count, static_cast<Activation>(op.ints[0]), pool});
        case OpKind::add: return kernels.add({x, second, count, pool});
        case OpKind::scale: return kernels.scale({x, count, real(0), pool});
        case OpKind::soft_cap: return kernels.soft_cap({x, count, real(0), pool});
        case OpKind::copy: return kernels.copy({x, second, count, pool});
        default: throw std::invalid_argument(std::string(name_of(op.kind)) + " leaves its rows");
    }
}

}  // namespace quire
