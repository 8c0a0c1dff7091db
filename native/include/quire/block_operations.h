// Operations on many KV blocks at once: allocate, share, release, and make findable. The state lies
// in arrays that Python owns (quire/cache/pool.py, table.py, prefix_index.py, lineage.py and
// chain.py). The plain twin in quire/cache/block_operations.py leaves the same state bit for bit.
// Callers ensure that slots, columns and blocks are within the arrays, that the slots of one call
// are distinct, that shared blocks are referenced or findable, and released ones referenced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quire/digest_table.h"
#include "quire/ghosts.h"
#include "quire/hash.h"

namespace quire {

// Free blocks by age; see quire/cache/age_queue.py.
struct AgeQueue {
    enum { kHead, kTail, kNextStamp, kSize };
    int64_t *entries, *entry_stamps, *stamps;
    int64_t* state;
    int64_t capacity;

    int64_t size() const { return state[kSize]; }
    void push(const int64_t* blocks, int64_t count);
    // Write the `count` oldest blocks, at most size(), to `out`. Throws std::logic_error where the
    // entries hold fewer: then the state is inconsistent.
    void pop(int64_t count, int64_t* out);
    void take(int64_t block) { stamps[block] = 0, --state[kSize]; }

  private:
    void compact();
};

// Free lists and reference counts; see quire/cache/pool.py.
struct BlockPool {
    enum { kStackSize, kMinStack, kAllocated, kEvicted };
    int32_t* references;
    uint8_t *findable, *is_protected, *is_pinned;
    int64_t *stack, *counts;
    AgeQueue once, again, kept;
    int64_t num_blocks, max_protected;

    int64_t num_findable() const { return once.size() + again.size() + kept.size(); }
    int64_t num_free() const { return counts[kStackSize] + num_findable(); }
    // Write `count` blocks, at most num_free(), to `out`; return where those begin that were
    // findable until now.
    int64_t allocate(int64_t count, int64_t* out);
    void share(const int32_t* blocks, int64_t count);
    // Take a reference from each of `blocks`; return how many became free.
    int64_t release(const int32_t* blocks, int64_t count);

  private:
    AgeQueue& queue_of(int64_t block) {
        return is_pinned[block] ? kept : is_protected[block] ? again : once;
    }
    void push_findable(const std::vector<int64_t>& blocks);
};

// Which blocks hold a slot's tokens; see quire/cache/table.py.
struct BlockTable {
    int32_t *blocks, *firsts, *counts, *capacities;
    int64_t *holders, *last_holders;
    int64_t num_slots, num_columns, block_size;

    void append(int64_t slot, const int64_t* added, int64_t count);
    // Empty `slot`; append its blocks to `out`, last column first.
    void take(int64_t slot, std::vector<int32_t>& out);
};

// Where the chain of each slot has got to; see quire/cache/chain.py.
struct SlotChains {
    int32_t* registered;
    uint64_t *ends, *seeds;
    int32_t* owners;
    uint8_t* returned;
    std::vector<std::vector<Digest>> known;  // digested while the request waited
};

// What each findable block stands for; see quire/cache/lineage.py and prefix_index.py.
struct Findable {
    DigestTable* table;
    uint64_t* digests;
    uint8_t* known;
    Ghosts* ghosts;
    uint64_t* parents;
    int32_t *tokens, *depths, *owners;
    int64_t* hits;
    uint8_t* ends;
};

// Blocks with their digests, of the last call that evicted or inserted some.
struct Changed {
    std::vector<Digest> digests;
    std::vector<int32_t> blocks;

    void clear() { digests.clear(), blocks.clear(); }
    void add(Digest digest, int32_t block) { digests.push_back(digest), blocks.push_back(block); }
};

struct BlockOperations {
    BlockPool pool;
    BlockTable tables;
    SlotChains chains;
    Findable findable;
    uint8_t key[16];
    Changed evicted, inserted;

    // Allocate `count` blocks, at most pool.num_free(). False where the prefix index lacks a block
    // that was findable: then the state is inconsistent.
    bool allocate(int64_t count, std::vector<int64_t>& out);
    // Make the full blocks of `slots` findable up to computed[i] tokens. tokens: [slots, width].
    void register_blocks(const int64_t* slots, const int32_t* computed, size_t count,
                         const int32_t* tokens, int64_t width);

  private:
    void insert(int64_t slot, int64_t first, const Digest* digests, int64_t count,
                const int32_t* tokens, int64_t width);
};

}  // namespace quire
