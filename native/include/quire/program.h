// A program in the interpreter: buffers at fixed offsets of one arena, and segments of operations
// (operations.h). Built once from quire/program by quire/execute/native.py. A step's counts scale
// the offsets; no offset depends on the content of a batch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "quire/arena.h"
#include "quire/context_attention.h"
#include "quire/experts.h"
#include "quire/kernels.h"
#include "quire/operations.h"
#include "quire/rank_group.h"
#include "quire/rank_link.h"
#include "quire/weight.h"

namespace quire {

// The inputs of one run; arrays as in quire/program/batch.py.
struct StepInputs {
    int64_t num_tokens = 0, num_samples = 0, num_sequences = 0, table_columns = 0;
    const int32_t* token_ids = nullptr;
    const int32_t* positions = nullptr;
    const int32_t* rope_positions = nullptr;
    const int32_t* kv_slots = nullptr;
    const int32_t* seq_starts = nullptr;
    const int32_t* block_tables = nullptr;
    const int32_t* sample_rows = nullptr;
    const float* features = nullptr;  // [num_tokens, feature_columns]
    int64_t feature_columns = 0;
    bool keeps_taps = false;  // TapOp is computed

    // Ids that an embedding looks up.
    const int32_t* ids(IdSource source) const {
        return source == IdSource::tokens ? token_ids : rope_positions;
    }
};

// Throws std::invalid_argument unless all values are at least `low` and below `end`.
void check_range(const char* name, const int32_t* values, int64_t count, int64_t low, int64_t end);


// The run was aborted between two operations.
struct Aborted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Program {
  public:
    // apart_bytes: size of a second arena, for run_layers; 0 for none.
    Program(std::shared_ptr<Pool> pool, int64_t arena_bytes, int64_t apart_bytes = 0);

    // A unit of computation: an operation, or several consecutive ones (see fuse()).
    struct Unit {
        size_t first, count;  // operations of the segment
        int64_t nanoseconds;  // of all its runs while times were recorded
    };

    // Sets all buffers of the arena, and of the second one if there is one, in the same order; then
    // the segments.
    void add_buffer(const BufferSpec& buffer);
    void add_buffer_apart(const BufferSpec& buffer);
    void add_segment(std::vector<Operation> ops);
    // Sets the angles [positions, half] of rope `index`; the caller keeps them alive.
    void set_rope(int64_t index, const float* cos, const float* sin, int64_t positions,
                  int64_t half);
    // Allocates the KV pool, zero-filled. Throws std::bad_alloc.
    void allocate_cache(const CacheShape& shape, int64_t layers, int64_t num_blocks);
    // Keeps the KV pool that was just allocated in `memory`, zero-filled, of which the caller keeps
    // `bytes` alive: cache_bytes() and 64 readable ones at least. Throws std::invalid_argument.
    void place_cache(char* memory, int64_t bytes);
    // Uses the first `layers` layers of another program's KV pool, which lives as long as either.
    // Neither may store where the other reads or stores meanwhile. Throws std::invalid_argument.
    void share_cache(const Program& other, int64_t layers);
    // Copies whole blocks over all layers, in order.
    void copy_blocks(const int32_t* from, const int32_t* to, int64_t count);

    // Runs a segment. Throws std::invalid_argument if an input is out of range (nothing is computed
    // then), Aborted if abort() was called.
    void run(int64_t segment, const StepInputs& inputs);
    // Runs layers first .. end - 1 of a segment in the second arena, where the results of earlier
    // layers stay until layer 0 runs there again. A layer reaches from its attention to the next
    // one's; what precedes the first belongs to it. Throws as run() does.
    void run_layers(int64_t segment, const StepInputs& inputs, int64_t first, int64_t end);
    int64_t num_layers(int64_t segment) const {
        return static_cast<int64_t>(segment_at(segment).attentions.size());
    }
    // Thread-safe. Stops the run in progress, if any, and never a later one.
    void abort() { aborted_.store(runs_.load()); }
    int64_t ops_done() const { return ops_done_.load(); }
    // Returns the pieces of the cache that attention has read: 256 positions of a KV head each,
    // however many rows were computed with them.
    int64_t pieces_read() const { return pieces_read_; }
    // Reads of an expert's weights so far, see ExpertRunner.
    int64_t experts_read() const { return experts_.experts_read(); }
    // For each operation with several experts, the rows that chose each so far; on every rank the
    // same.
    const std::vector<std::vector<int64_t>>& expert_loads() const { return expert_loads_; }

    // Starts recording the time of each unit, from zero; or stops.
    void set_timed(bool timed);
    const std::vector<Unit>& units(int64_t segment) const { return segment_at(segment).units; }

    // The ranks that operations exchange columns with. Without it such a segment cannot be run.
    void set_group(std::shared_ptr<RankGroup> group) { group_ = std::move(group); }
    // Where rows of the stage before come from, and where those for the next one go; null for none.
    void set_links(std::shared_ptr<RankLink> from, std::shared_ptr<RankLink> to) {
        from_ = std::move(from), to_ = std::move(to);
    }

    // Fills the buffers that a segment writes first with NaN before each of its runs.
    void set_poison(bool poison) { poison_ = poison; }

    Rows rows(const ViewSpec& view) const;
    int64_t max_rows(int64_t buffer) const { return buffer_at(buffer).max_rows; }
    Pool& pool() const { return *pool_; }
    int64_t cache_bytes() const { return static_cast<int64_t>(cache_->bytes()); }
    char* cache_data() const { return cache_->data(); }

  private:
    struct Rope {
        const float* cos = nullptr;
        const float* sin = nullptr;
        int64_t positions = 0, half = 0;
    };
    struct Segment {
        std::vector<Operation> ops;
        std::vector<Unit> units;  // all operations, in order
        std::vector<size_t> attentions;  // units
        std::vector<int64_t> own_buffers;  // written first here
        // By unit, the weights that a stream reads; empty where no unit has any.
        std::vector<std::vector<const Weight*>> streamed;
        bool uses_cache = false, uses_samples = false;
    };

    const BufferSpec& buffer_at(int64_t index) const { return now_->at(index); }
    const Segment& segment_at(int64_t index) const;
    void reserve_experts(Operation& op);
    void reserve_context(const Operation& op);
    int64_t* load_of(int64_t load) { return expert_loads_[static_cast<size_t>(load)].data(); }
    std::vector<Unit> fuse(const std::vector<Operation>& ops) const;
    int64_t count_of(const ViewSpec& view, const StepInputs& inputs) const;
    RankGroup::Columns columns_of(const ViewSpec& view, int64_t unit,
                                  const StepInputs& inputs) const;
    RankLink::Block block_of(const ViewSpec& view, const StepInputs& inputs) const;
    void check_group(const char* kind, int64_t rank, int64_t degree) const;
    void check_context(const AttentionOp& op) const;
    // Defined in program_check.cc; each throws std::invalid_argument.
    void check_op(const Operation& op) const;  // when the program is built
    void check(const Segment& segment, const StepInputs& inputs) const;  // before each run
    void check_step(const Operation& op, const StepInputs& inputs) const;
    void check_cache(const StepInputs& inputs) const;
    void find_streamed(Segment& segment) const;
    void run_units(Segment& segment, size_t first, size_t end, const StepInputs& inputs);
    void run_unit(const Segment& segment, const Unit& unit, const StepInputs& inputs);
    void run_op(const Operation& op, const StepInputs& inputs);
    void run_rows(const Operation& op, const StepInputs& inputs, int64_t first, int64_t count,
                  Pool* pool) const;
    void poison(const Segment& segment);
    char* layer_cache(int64_t layer) const;

    std::shared_ptr<Pool> pool_;
    // without workers: its caller does everything, and any number of callers may run at once
    Pool alone_;
    Arena arena_, apart_;
    const Arena* now_ = &arena_;  // the arena that operations use
    ExpertRunner experts_;
    ContextRunner context_;
    std::vector<std::vector<int64_t>> expert_loads_;
    std::shared_ptr<Memory> cache_ = std::make_shared<Memory>();
    std::shared_ptr<RankGroup> group_;
    std::shared_ptr<RankLink> from_, to_;
    std::vector<Segment> segments_;
    std::vector<Rope> ropes_;
    CacheShape shape_{};
    int64_t layers_ = 0, num_blocks_ = 0, pieces_read_ = 0;
    bool poison_ = false, timed_ = false;
    // Twice the number of completed runs, plus one during a run: an abort between runs stops none.
    std::atomic<int64_t> runs_{0}, aborted_{-1};
    std::atomic<int64_t> ops_done_{0};
};

}  // namespace quire
