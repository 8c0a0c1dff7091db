// Checks of a program: its operations against their buffers and weights when it is built, and a
// step's indices before each run. Kernels trust their arguments. A check that fails names the
// operation and changes nothing.

#include <string>

#include "quire/program.h"

namespace quire {

namespace {

[[noreturn]] void refuse(const char* kind, const char* why) {
    throw std::invalid_argument(std::string(kind) + ": " + why);
}

void check_width(const char* kind, const ViewSpec& one, const ViewSpec& other) {
    if (one.width != other.width) refuse(kind, "views differ in width");
}

void check_ranks(const char* kind, int64_t rank, int64_t degree, int64_t unit, int64_t width) {
    const int64_t units = unit < 1 ? 0 : (width + unit - 1) / unit;
    if (rank < 0 || rank >= degree || units < degree) {
        refuse(kind, "rank, degree and unit do not fit the columns");
    }
}

void check_route(const RouteOp& op, Type x, Type y) {
    const int64_t experts = op.x.width;
    check_width(op.kind, op.x, op.y);
    if (x != Type::f32 || y != Type::f32) refuse(op.kind, "views must be f32");
    if (experts > kMaxExperts) refuse(op.kind, "too many experts");
    if (op.top_k < 1 || op.top_k > experts) refuse(op.kind, "top_k is out of range");
    if (op.bias && (*op.bias)->rows() != experts) refuse(op.kind, "the bias has another length");
    if (op.groups == 0) return;
    if (op.groups < 0 || experts % op.groups != 0 || op.top_groups < 1 ||
        op.top_groups > op.groups || op.top_k > op.top_groups * (experts / op.groups)) {
        refuse(op.kind, "groups do not fit the experts");
    }
}

void check_holders(const ExpertsOp& op) {
    const int64_t experts = op.routing.width, inner = op.down->columns();
    if (static_cast<int64_t>(op.holders.size()) != experts || op.degree < 2) {
        refuse(op.kind, "holders are not the experts', or there is one rank");
    }
    const uint64_t all = op.degree < 64 ? (uint64_t{1} << op.degree) - 1 : ~uint64_t{0};
    int64_t own = 0;
    for (uint64_t holders : op.holders) {
        if (holders == 0 || (holders & ~all) != 0) {
            refuse(op.kind, "an expert is on no rank, or on one that does not exist");
        }
        own += static_cast<int64_t>(holders >> op.rank & 1);
    }
    check_ranks(op.kind, op.rank, op.degree, op.unit, op.x.width);
    const Share share = share_of(op.x.width, op.unit, op.rank, op.degree);
    if (op.gate_up->rows() != own * round_up(2 * inner, kPanel) ||
        op.down->rows() != own * round_up(op.x.width, kPanel) ||
        op.y.width != share.end - share.start) {
        refuse(op.kind, "a weight has not the rank's experts, or y not its columns");
    }
}

void check_experts(const ExpertsOp& op, Type x) {
    const Weight &gate_up = *op.gate_up, &down = *op.down;
    const int64_t experts = op.routing.width;
    for (const Weight* weight : {&gate_up, &down}) {
        if (weight->form() != Form::matrix) refuse(op.kind, "a weight is not a matrix");
        if (!weight->has_ints() && x != weight->type()) {
            refuse(op.kind, "the input's dtype is not the weight's");
        }
    }
    if (op.top_k < 1 || op.top_k > experts) refuse(op.kind, "top_k is out of range");
    if (gate_up.columns() != op.x.width) refuse(op.kind, "views and weights differ in width");
    if (!op.holders.empty()) return check_holders(op);
    const int64_t inner = down.columns();
    check_ranks(op.kind, op.rank, op.degree, op.degree > 1 ? op.unit : inner, inner);
    const Share share = share_of(inner, op.degree > 1 ? op.unit : inner, op.rank, op.degree);
    const auto check = [&](const Weight& weight, int64_t rows) {
        if (weight.rows() != experts * round_up(rows, kPanel)) {
            refuse(op.kind, "a weight has not the experts' rows, filled up to panels");
        }
    };
    check(gate_up, 2 * (share.end - share.start));
    check(down, op.y.width);
    const bool is_whole = op.degree == 1;
    if (op.y.width > op.x.width || (is_whole && op.y.width != op.x.width)) {
        refuse(op.kind, "views and weights differ in width");
    }
}

}  // namespace

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

void Program::check_op(const Operation& operation) const {
    each_view(operation, [&](const ViewSpec& view) {
        const BufferSpec& buffer = buffer_at(view.buffer);
        if (view.offset < 0 || view.width < 1 || view.offset + view.width > buffer.stride) {
            refuse(kind_of(operation), "a view is wider than its buffer");
        }
    });
    const auto type_of = [&](const ViewSpec& view) { return buffer_at(view.buffer).type; };
    const auto check_bias = [](const char* kind, const Weight& weight,
                               const std::optional<WeightRef>& bias) {
        if (bias && (*bias)->rows() != weight.rows()) {
            refuse(kind, "the bias has another length than the weight has rows");
        }
    };
    std::visit(
        Overloaded{
            [&](const EmbedOp& op) {
                if (op.weight->columns() != op.y.width) {
                    refuse(op.kind, "the output is not as wide as the table");
                }
                if (buffer_at(op.y.buffer).rows != RowCount::tokens) {
                    refuse(op.kind, "the output has not a row for each token");
                }
            },
            [&](const FeedOp& op) {
                if (buffer_at(op.y.buffer).rows != RowCount::tokens) {
                    refuse(op.kind, "the output has not a row for each token");
                }
            },
            [&](const NormOp& op) {
                const int64_t run = op.group > 0 ? op.group : op.x.width;
                if (op.x.width % run != 0 || (op.weight && (*op.weight)->rows() != run)) {
                    refuse(op.kind, "weight and group disagree");
                }
                if (op.bias && !op.weight) refuse(op.kind, "a bias and no weight");
                if (op.weight) check_bias(op.kind, **op.weight, op.bias);
                check_width(op.kind, op.x, op.y);
                if (op.delta) check_width(op.kind, op.x, *op.delta);
            },
            [&](const LinearOp& op) {
                const Weight& weight = *op.weight;
                if (weight.form() != Form::matrix) refuse(op.kind, "the weight is not a matrix");
                if (weight.columns() != op.x.width || weight.rows() != op.y.width) {
                    refuse(op.kind, "views and weight differ in width");
                }
                if (!weight.has_ints() && type_of(op.x) != weight.type()) {
                    refuse(op.kind, "the input's dtype is not the weight's");
                }
                check_bias(op.kind, weight, op.bias);
            },
            [&](const RopeOp& op) {
                if (op.rope < 0) refuse(op.kind, "rope is below zero");
                if (op.heads * op.head_dim != op.x.width) {
                    refuse(op.kind, "the view does not hold heads * head_dim columns");
                }
            },
            [&](const ActivationOp& op) {
                check_width(op.kind, op.gate, op.y);
                if (!op.up) return;
                check_width(op.kind, op.gate, *op.up);
                if (type_of(op.gate) != type_of(*op.up)) {
                    refuse(op.kind, "gate and up differ in dtype");
                }
            },
            [&](const AddOp& op) { check_width(op.kind, op.x, op.y); },
            [&](const SoftCapOp& op) {
                if (!(op.cap > 0.0)) refuse(op.kind, "the cap is not above zero");
            },
            [&](const CopyOp& op) { check_width(op.kind, op.x, op.y); },
            [&](const TapOp& op) { check_width(op.kind, op.x, op.y); },
            [&](const GatherRowsOp& op) {
                check_width(op.kind, op.x, op.y);
                if (type_of(op.x) != type_of(op.y)) refuse(op.kind, "views differ in dtype");
            },
            [&](const RouteOp& op) { check_route(op, type_of(op.x), type_of(op.y)); },
            [&](const ExpertsOp& op) {
                check_experts(op, type_of(op.x));
                if (type_of(op.routing) != Type::f32 || type_of(op.y) != Type::f32) {
                    refuse(op.kind, "routing weights and output must be f32");
                }
            },
            [](const AllGatherOp& op) {
                check_ranks(op.kind, op.rank, op.degree, op.unit, op.x.width);
            },
            [](const AllReduceOp& op) {
                check_ranks(op.kind, op.rank, op.degree, op.unit, op.x.width);
            },
            [](const SendOp&) {},
            [](const RecvOp&) {},
            // Their geometry is the cache's, which check_step uses.
            [](const StoreKVOp&) {},
            [](const AttentionOp& op) { check_ranks(op.kind, op.rank, op.degree, 1, op.heads); },
            [](const ScaleOp&) {},
        },
        operation);
}

void Program::check_step(const Operation& operation, const StepInputs& inputs) const {
    each_view(operation, [&](const ViewSpec& view) {
        const int64_t count = count_of(view, inputs), most = buffer_at(view.buffer).max_rows;
        if (count > most) {
            throw std::invalid_argument(std::to_string(count) + " rows; the buffers hold " +
                                        std::to_string(most));
        }
    });
    const auto check_layer = [&](const char* kind, int64_t cache, int64_t layer) {
        if (cache != 0) refuse(kind, "there is one cache");
        if (num_blocks_ == 0) refuse(kind, "the cache has not been allocated");
        if (layer < 0 || layer >= layers_) refuse(kind, "the cache has no such layer");
    };
    const auto check_heads = [&](const char* kind, const ViewSpec& view, int64_t heads) {
        if (view.width != heads * shape_.head_dim) {
            refuse(kind, "a view has not the heads' width");
        }
    };
    const auto check_type = [&](const char* kind, const ViewSpec& view) {
        if (buffer_at(view.buffer).type != shape_.type) {
            refuse(kind, "an input's dtype is not the cache's");
        }
    };
    std::visit(
        Overloaded{
            [&](const EmbedOp& op) {
                check_range(op.ids == IdSource::tokens ? "token_ids" : "rope_positions",
                            inputs.ids(op.ids), inputs.num_tokens, 0, op.weight->rows());
            },
            [&](const FeedOp& op) {
                if (inputs.features == nullptr || inputs.feature_columns != op.y.width) {
                    refuse(op.kind, "the batch's features have not the output's width");
                }
            },
            [&](const RopeOp& op) {
                const auto index = static_cast<size_t>(op.rope);
                const int64_t known = index < ropes_.size() ? ropes_[index].positions : 0;
                check_range("rope_positions", inputs.rope_positions, inputs.num_tokens, 0, known);
                if (known > 0 && 2 * ropes_[index].half > op.head_dim) {
                    refuse(op.kind, "more angles than half a head has columns");
                }
            },
            [&](const StoreKVOp& op) {
                check_layer(op.kind, op.cache, op.layer);
                for (const ViewSpec* view : {&op.k, &op.v}) {
                    check_heads(op.kind, *view, shape_.kv_heads);
                    check_type(op.kind, *view);
                }
            },
            [&](const AttentionOp& op) {
                check_layer(op.kind, op.cache, op.layer);
                if (op.kv_heads != shape_.kv_heads || op.head_dim != shape_.head_dim) {
                    refuse(op.kind, "KV heads are not the cache's");
                }
                if (op.heads % op.kv_heads != 0) refuse(op.kind, "heads is no multiple of kv_heads");
                check_heads(op.kind, op.q, op.heads);
                const Share heads = share_of(op.heads, 1, op.rank, op.degree);
                check_heads(op.kind, op.y, heads.end - heads.start);
                check_type(op.kind, op.q);
                if (op.degree > 1) check_context(op);
            },
            [&](const AllGatherOp& op) {
                check_group(op.kind, op.rank, op.degree);
                group_->check_fits(columns_of(op.x, op.unit, inputs));
            },
            [&](const AllReduceOp& op) {
                check_group(op.kind, op.rank, op.degree);
                const int64_t row_bytes = op.x.width * type_bytes(buffer_at(op.x.buffer).type);
                group_->check_fits({nullptr, 1, 0, op.degree, 1, row_bytes});
            },
            [&](const ExpertsOp& op) {
                if (op.degree == 1) return;
                check_group(op.kind, op.rank, op.degree);
                if (!op.holders.empty()) {
                    const int64_t row_bytes = op.x.width * type_bytes(Type::f32);
                    return group_->check_fits({nullptr, 1, 0, op.degree, 1, row_bytes});
                }
                const int64_t bytes = type_bytes(buffer_at(op.x.buffer).type);
                group_->check_fits({nullptr, 1, 0, op.down->columns(), op.unit, bytes});
            },
            [&](const SendOp& op) {
                if (to_ == nullptr) refuse(op.kind, "there is no link to another stage");
                to_->check_fits(block_of(op.x, inputs).row_bytes);
            },
            [&](const RecvOp& op) {
                if (from_ == nullptr) refuse(op.kind, "there is no link from another stage");
                from_->check_fits(block_of(op.y, inputs).row_bytes);
            },
            [](const auto&) {},
        },
        operation);
}

void Program::check_group(const char* kind, int64_t rank, int64_t degree) const {
    if (group_ == nullptr) refuse(kind, "there are no ranks to exchange with");
    if (group_->member() != rank || group_->members() != degree) {
        refuse(kind, "the program is another rank's, or for other ranks");
    }
}

void Program::check_context(const AttentionOp& op) const {
    if (group_ == nullptr) refuse(op.kind, "there are no ranks to exchange with");
    if (group_->members() % op.degree != 0 || group_->member() % op.degree != op.rank) {
        refuse(op.kind, "the program is another rank's, or for other ranks");
    }
    const auto numbers = op.heads * (op.head_dim + kPartNumbers);
    group_->check_fits({nullptr, 1, 0, group_->members(), 1,
                        numbers * static_cast<int64_t>(sizeof(float))});
}

void Program::check(const Segment& segment, const StepInputs& inputs) const {
    for (const Operation& op : segment.ops) check_step(op, inputs);
    if (segment.uses_samples) {
        check_range("sample_rows", inputs.sample_rows, inputs.num_samples, 0, inputs.num_tokens);
    }
    if (segment.uses_cache) check_cache(inputs);
}

// Checks that slots, positions and block tables lie in the cache.
void Program::check_cache(const StepInputs& inputs) const {
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
        int64_t columns = 0;  // reached by the sequence's positions
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

}  // namespace quire
