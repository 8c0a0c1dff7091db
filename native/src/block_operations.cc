// Operations on many KV blocks at once: free lists, reference counts, block tables, and blocks made
// findable. Knows no Python; arguments are checked in native/bind. Always holds: the order in which
// blocks are handed out, evicted and made findable is that of the plain twin.

#include "quire/block_operations.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace quire {

namespace {

constexpr int kAhead = 8;  // digests with places in tables that are read meanwhile

}  // namespace

void AgeQueue::push(const int64_t* blocks, int64_t count) {
    if (state[kTail] + count > capacity) compact();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t stamp = state[kNextStamp]++, at = state[kTail]++;
        entries[at] = blocks[i];
        entry_stamps[at] = stamps[blocks[i]] = stamp;
    }
    state[kSize] += count;
}

void AgeQueue::pop(int64_t count, int64_t* out) {
    for (int64_t found = 0; found < count; ++state[kHead]) {
        if (state[kHead] == state[kTail]) {
            throw std::logic_error("a queue of free blocks holds fewer than it counts");
        }
        const int64_t block = entries[state[kHead]];
        if (stamps[block] != entry_stamps[state[kHead]]) continue;
        stamps[block] = 0;
        out[found++] = block;
    }
    state[kSize] -= count;
}

void AgeQueue::compact() {
    int64_t kept = 0;
    for (int64_t at = state[kHead]; at < state[kTail]; ++at) {
        if (stamps[entries[at]] != entry_stamps[at]) continue;
        entries[kept] = entries[at];
        entry_stamps[kept++] = entry_stamps[at];
    }
    state[kHead] = 0;
    state[kTail] = kept;
}

int64_t BlockPool::allocate(int64_t count, int64_t* out) {
    const int64_t top = counts[kStackSize], plain = std::min(count, top);
    for (int64_t i = 0; i < plain; ++i) out[i] = stack[top - 1 - i];
    counts[kStackSize] = top - plain;
    counts[kMinStack] = std::min(counts[kMinStack], counts[kStackSize]);
    counts[kAllocated] += count;
    counts[kEvicted] += count - plain;
    const int64_t num_once = std::min(count - plain, once.size());
    once.pop(num_once, out + plain);
    const int64_t num_again = std::min(count - plain - num_once, again.size());
    again.pop(num_again, out + plain + num_once);
    kept.pop(count - plain - num_once - num_again, out + plain + num_once + num_again);
    for (int64_t i = plain; i < count; ++i) {
        findable[out[i]] = is_protected[out[i]] = is_pinned[out[i]] = 0;
    }
    for (int64_t i = 0; i < count; ++i) references[out[i]] = 1;
    return plain;
}

void BlockPool::share(const int32_t* blocks, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t block = blocks[i];
        if (references[block]++ == 0) queue_of(block).take(block);
    }
}

int64_t BlockPool::release(const int32_t* blocks, int64_t count) {
    std::vector<int64_t> plain, kept;
    plain.reserve(static_cast<size_t>(count));
    kept.reserve(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        const int32_t block = blocks[i];
        if (--references[block] == 0) (findable[block] ? kept : plain).push_back(block);
    }
    push_findable(kept);
    std::reverse_copy(plain.begin(), plain.end(), stack + counts[kStackSize]);
    counts[kStackSize] += static_cast<int64_t>(plain.size());
    return static_cast<int64_t>(plain.size() + kept.size());
}

void BlockPool::push_findable(const std::vector<int64_t>& blocks) {
    std::vector<int64_t> of_once, of_again, of_kept;
    of_once.reserve(blocks.size());
    for (const int64_t block : blocks) {
        (is_pinned[block] ? of_kept : is_protected[block] ? of_again : of_once).push_back(block);
    }
    kept.push(of_kept.data(), static_cast<int64_t>(of_kept.size()));
    once.push(of_once.data(), static_cast<int64_t>(of_once.size()));
    again.push(of_again.data(), static_cast<int64_t>(of_again.size()));
    const int64_t beyond = again.size() - max_protected;
    if (of_again.empty() || beyond <= 0) return;
    std::vector<int64_t> oldest(static_cast<size_t>(beyond));
    again.pop(beyond, oldest.data());
    for (const int64_t block : oldest) is_protected[block] = 0;
    once.push(oldest.data(), beyond);
}

void BlockTable::append(int64_t slot, const int64_t* added, int64_t count) {
    int32_t* row = blocks + slot * num_columns + counts[slot];
    for (int64_t i = 0; i < count; ++i) {
        row[i] = static_cast<int32_t>(added[i]);
        last_holders[added[i]] = holders[slot];
    }
    counts[slot] += static_cast<int32_t>(count);
    capacities[slot] = counts[slot] * static_cast<int32_t>(block_size);
}

void BlockTable::take(int64_t slot, std::vector<int32_t>& out) {
    int32_t* row = blocks + slot * num_columns;
    for (int64_t column = counts[slot] - 1; column >= firsts[slot]; --column) {
        out.push_back(row[column]);
        row[column] = -1;
    }
    firsts[slot] = counts[slot] = capacities[slot] = 0;
}

bool BlockOperations::allocate(int64_t count, std::vector<int64_t>& out) {
    evicted.clear();
    out.resize(static_cast<size_t>(count));
    const int64_t plain = pool.allocate(count, out.data());
    for (int64_t i = plain; i < count; ++i) {
        const int64_t block = out[static_cast<size_t>(i)];
        if (!findable.known[block]) return false;
        findable.known[block] = 0;
        evicted.add({findable.digests[2 * block], findable.digests[2 * block + 1]},
                    static_cast<int32_t>(block));
    }
    const std::vector<Digest>& digests = evicted.digests;
    for (size_t i = 0; i < digests.size(); ++i) {
        if (i + kAhead < digests.size()) {
            findable.table->expect(digests[i + kAhead]);
            findable.ghosts->expect(digests[i + kAhead]);
        }
        findable.table->take(digests[i]);
        findable.ghosts->add(digests[i]);
    }
    return true;
}

void BlockOperations::register_blocks(const int64_t* slots, const int32_t* computed, size_t count,
                                      const int32_t* tokens, int64_t width) {
    inserted.clear();
    std::vector<Digest> digests;
    for (size_t i = 0; i < count; ++i) {
        const int64_t slot = slots[i], first = chains.registered[slot];
        const int64_t last = computed[i] / tables.block_size;
        if (last <= first) continue;
        const std::vector<Digest>& known = chains.known[static_cast<size_t>(slot)];
        if (last <= static_cast<int64_t>(known.size())) {
            insert(slot, first, known.data() + first, last - first, tokens, width);
            continue;
        }
        digests.resize(static_cast<size_t>(last - first));
        const Digest end{chains.ends[2 * slot], chains.ends[2 * slot + 1]};
        hash_chain(tokens + slot * width + first * tables.block_size, last - first,
                   tables.block_size, end, key, digests.data());
        insert(slot, first, digests.data(), last - first, tokens, width);
    }
}

void BlockOperations::insert(int64_t slot, int64_t first, const Digest* digests, int64_t count,
                             const int32_t* tokens, int64_t width) {
    Findable& to = findable;
    const int64_t size = tables.block_size;
    for (int64_t i = 0; i < count && i < kAhead; ++i) {
        to.table->expect(digests[i]);
        to.ghosts->expect(digests[i]);
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t column = first + i;
        const int32_t block = tables.blocks[slot * tables.num_columns + column];
        if (i + kAhead < count) {
            to.table->expect(digests[i + kAhead]);
            to.ghosts->expect(digests[i + kAhead]);
        }
        if (to.known[block] || !to.table->put(digests[i], block)) continue;
        to.known[block] = pool.findable[block] = 1;
        to.digests[2 * block] = digests[i].low;
        to.digests[2 * block + 1] = digests[i].high;
        // What was evicted and is computed again is as good as found.
        if (to.ghosts->take(digests[i]) && !chains.returned[slot]) pool.is_protected[block] = 1;
        to.parents[2 * block] = i ? digests[i - 1].low : chains.ends[2 * slot];
        to.parents[2 * block + 1] = i ? digests[i - 1].high : chains.ends[2 * slot + 1];
        std::memcpy(to.tokens + block * size, tokens + slot * width + column * size,
                    static_cast<size_t>(size) * sizeof(int32_t));
        to.depths[block] = static_cast<int32_t>(column + 1);
        to.owners[block] = chains.owners[slot];
        to.hits[block] = to.ends[block] = 0;
        inserted.add(digests[i], block);
    }
    chains.registered[slot] = static_cast<int32_t>(first + count);
    chains.ends[2 * slot] = digests[count - 1].low;
    chains.ends[2 * slot + 1] = digests[count - 1].high;
}

}  // namespace quire
