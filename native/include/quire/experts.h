// Experts of a layer: rows are grouped by the expert they chose, each group goes through the
// product kernels that dense layers use, and a row's outputs are summed in the order of the
// experts' ids.
// Knows no instruction set: kernels come from the pool's table. Always holds: memory is taken by
// reserve() only, never during run(); a row's bits do not depend on which rows share an expert, nor
// on the rank that computes it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "quire/kernels.h"
#include "quire/memory.h"
#include "quire/rank_group.h"
#include "quire/weight.h"

namespace quire {

// Sizes of a layer. rows: of the largest step. own: inner columns that this rank computes, all of
// them in one process. degree: ranks that whole experts are distributed over, 0 for none; share:
// columns of the result that each of them sums.
struct ExpertShape {
    int64_t rows, experts, top_k, hidden, inner, own;
    Type type;  // of x
    int64_t degree = 0, share = 0;
};

// Bytes of scratch memory that all threads share, and of a thread's own.
int64_t shared_expert_bytes(const ExpertShape& shape);
int64_t expert_thread_bytes(const ExpertShape& shape);

// Weights [experts, rows, columns] are packed expert by expert, each filled up to whole panels:
// gate_up has 2 * inner rows an expert, down as many as y has columns. Each of several ranks has
// the rows of its inner columns, `share`, and of its columns of y; inner columns are exchanged. Or
// (holders) it has some experts whole, and sums its columns of all experts' outputs.
struct ExpertsArgs {
    Rows x, routing, y;  // routing [rows, experts] and y are f32
    int64_t rows;
    const Weight& gate_up;
    const Weight& down;
    Activation form;
    int64_t top_k;
    Share share;   // of inner columns, or (holders) of y's
    int64_t unit;  // of the shares
    RankGroup* group;         // null in one process
    const uint64_t* holders;  // [experts] bit r: rank r has the expert; null: not distributed
    int64_t* load;            // [experts] the rows that chose each are added; or null
    Pool* pool;
};

class ExpertRunner {
  public:
    // Takes what layers of this shape need, for all threads of the pool. Throws std::bad_alloc.
    void reserve(const ExpertShape& shape, Pool& pool);
    // Fills the scratch memory with NaN (for tests).
    void poison();
    void run(const ExpertsArgs& args);
    // Reads of an expert's weights so far; for many rows at once it is one.
    int64_t experts_read() const { return experts_read_; }

  private:
    // Rows of one expert: pairs first .. end of all. expert: its place in the weights.
    struct Piece {
        int64_t expert, first, end;
    };
    // Pairs (row, expert) in the order of the experts, and by row in the order of ids; those of
    // distributed experts by rank first.
    struct Pairs {
        int32_t* row;     // [pairs] the row of each
        int32_t* place;   // [rows, top_k] where a row's j-th expert is among the pairs; or -1
        float* weight;    // [rows, top_k] its routing weight
        int32_t* expert;  // [rows, top_k] its id
        int32_t* start;   // [experts + 1] where an expert's pairs begin
        Piece* pieces;    // [experts] of the batch in progress
        char* gathered;   // rows of x, one a pair of the batch
        char* inner;      // gate and up
        char* out;        // down's output in f32
        // Of distributed experts:
        int32_t* part;    // [degree, experts] the pairs of an expert that a rank computes
        int32_t* next;    // [degree, experts] where they begin; while pairs are placed, the next
        char* all;        // [all pairs, share] this rank's columns of all ranks' outputs
    };
    Pairs place(const ExpertShape& shape) const;
    void choose(const ExpertsArgs& args, const Pairs& pairs) const;
    int64_t sort(const ExpertsArgs& args, const Pairs& pairs) const;
    void run_batch(const ExpertsArgs& args, const ExpertShape& shape, const Pairs& pairs,
                   int64_t first, int64_t end);
    Rows outputs(const ExpertsArgs& args, const ExpertShape& shape, const Pairs& pairs,
                 int64_t count, int64_t first, int64_t end);
    void products(const ExpertsArgs& args, const Weight& weight, int64_t n, const Rows& x,
                  const Rows& y, const Piece* pieces, int64_t count, int64_t first);
    // expert_parallel.cc
    void deal(const ExpertsArgs& args, int64_t degree, const Pairs& pairs) const;
    std::array<int64_t, RankGroup::kMaxDegree> place_by_rank(const ExpertsArgs& args,
                                                             int64_t degree,
                                                             const Pairs& pairs) const;
    int64_t own_pieces(const ExpertsArgs& args, const Pairs& pairs, int64_t first,
                       int64_t end) const;
    void run_distributed(const ExpertsArgs& args, const ExpertShape& shape, const Pairs& pairs);

    Memory memory_;
    std::vector<std::unique_ptr<Pool>> alone_;  // one a thread, which computes by itself
    int64_t experts_read_ = 0;
};

}  // namespace quire
