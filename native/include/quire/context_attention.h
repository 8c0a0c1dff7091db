// Attention over a cache of which several ranks have the pieces of 256 positions by turns (context
// parallelism): each rank attends to its own pieces, the ranks exchange the parts (all_to_all: a
// rank receives those of its own heads), and each merges its heads in the order of positions.
// Rounds of some tokens and pieces bound the memory.
// Knows no instruction set: kernels come from the pool's table. Always holds: memory is taken by
// reserve() only, never during run(); all ranks make the same rounds, which the batch alone
// determines.
#pragma once

#include <cstdint>

#include "quire/kernels.h"
#include "quire/memory.h"
#include "quire/rank_group.h"

namespace quire {

// Sizes of an operation. heads: of which parts are computed; own_heads: of these, merged here.
struct ContextShape {
    int64_t tokens, heads, own_heads, head_dim, degree;
};

// rank: of `degree` ranks with consecutive places in the group, which have the same heads. heads:
// those that the rank merges; y of `attention` has their columns.
struct ContextArgs {
    AttentionArgs attention;
    int64_t rank, degree;
    Share heads;
    RankGroup& group;
};

class ContextRunner {
  public:
    // Bytes of scratch memory.
    static int64_t bytes(const ContextShape& shape);
    // Takes what attention of this shape needs. Throws std::bad_alloc.
    void reserve(const ContextShape& shape);
    // Fills the scratch memory with NaN (for tests).
    void poison();
    void run(const ContextArgs& args);

  private:
    // Tokens begin .. begin + count and pieces first .. stop.
    struct Round {
        int64_t begin, count, num_runs, first, stop;
    };
    struct Places;
    Places place(const ContextShape& shape) const;
    void run_round(const ContextArgs& args, const ContextShape& shape, const Places& places,
                   const Round& round);

    Memory memory_;
};

}  // namespace quire
