// Binds operations on many KV blocks at once and the digests of evicted blocks (their plain twins:
// quire/cache/block_operations.py and ghosts.py). The state lies in arrays of Python objects, which
// are kept alive here. Slots, columns, blocks, counts and references are checked here, so that
// native/src can trust them; nothing is changed by a call that is refused.

#include "quire/block_operations.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace nb = nanobind;

namespace {

using quire::BlockTable;
using quire::Changed;
using quire::Digest;
template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = Vector<int64_t>;
using Int32s = Vector<int32_t>;
using Digests = nb::ndarray<const uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Seed = nb::ndarray<const uint64_t, nb::shape<2>, nb::c_contig, nb::device::cpu>;
using TokenRows = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
nb::object array_of(const T* values, size_t count) {
    auto owned = std::make_unique<T[]>(std::max<size_t>(count, 1));
    std::copy_n(values, count, owned.get());
    T* data = owned.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {count}, owner));
}

nb::object digests_of(const std::vector<Digest>& digests) {
    auto owned = std::make_unique<uint64_t[]>(2 * digests.size() + 1);
    if (!digests.empty()) std::memcpy(owned.get(), digests.data(), 16 * digests.size());
    uint64_t* data = owned.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
    return nb::cast(
        nb::ndarray<nb::numpy, uint64_t, nb::shape<-1, 2>>(data, {digests.size(), 2}, owner));
}

// Adds the time until its destruction to `total_ns`, unless that is null.
class Timer {
  public:
    explicit Timer(int64_t* total_ns) : total_ns_(total_ns) {
        if (total_ns_) began_ = Clock::now();
    }
    ~Timer() {
        if (!total_ns_) return;
        const auto took = Clock::now() - began_;
        *total_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

  private:
    using Clock = std::chrono::steady_clock;
    int64_t* total_ns_;
    Clock::time_point began_;
};

class Operations : private quire::BlockOperations {
  public:
    int64_t allocation_ns_total = 0;

    Operations(nb::object pool, nb::object tables, nb::object chains, nb::object index,
               nb::object ghosts, nb::object lineage, nb::bytes hash_key, bool timed)
        : pool_(pool), timed_ns_(timed ? &allocation_ns_total : nullptr) {
        if (hash_key.size() != 16) throw std::invalid_argument("the hash key must have 16 bytes");
        std::memcpy(key, hash_key.c_str(), 16);
        bind_pool(pool);
        bind_tables(tables);
        this->chains.registered = data<int32_t>(chains, "registered");
        this->chains.ends = data<uint64_t>(chains, "ends");
        this->chains.seeds = data<uint64_t>(chains, "seeds");
        this->chains.owners = data<int32_t>(chains, "owners");
        this->chains.returned = data<bool>(chains, "returned");
        this->chains.known.resize(static_cast<size_t>(this->tables.num_slots));
        seen_.resize(static_cast<size_t>(this->tables.num_slots));
        findable.digests = data<uint64_t>(index, "digests");
        findable.known = data<bool>(index, "known");
        findable.table = nb::cast<quire::DigestTable*>(keep(index.attr("table")));
        findable.ghosts = nb::cast<quire::Ghosts*>(keep(ghosts));
        findable.parents = data<uint64_t>(lineage, "parents");
        findable.tokens = data<int32_t>(lineage, "tokens");
        findable.depths = data<int32_t>(lineage, "depths");
        findable.owners = data<int32_t>(lineage, "owners");
        findable.hits = data<int64_t>(lineage, "hits");
        findable.ends = data<bool>(lineage, "ends");
    }

    nb::object take(int64_t count) {
        const Timer timer(timed_ns_);
        if (count < 0) throw std::out_of_range("the number of blocks is negative");
        allocate_blocks(count);
        return blocks_as_int32();
    }

    nb::tuple allocate(const Slots& slots, const Int32s& added) {
        const Timer timer(timed_ns_);
        same_length(slots.size(), added.size());
        check_slots(slots);
        int64_t total = 0;
        for (size_t i = 0; i < slots.size(); ++i) {
            check_room(slots(i), added(i));
            total += added(i);
        }
        allocate_blocks(total);
        rows_.clear(), columns_.clear();
        for (size_t i = 0, at = 0; i < slots.size(); at += static_cast<size_t>(added(i++))) {
            list_columns(slots(i), tables.counts[slots(i)], added(i));
            tables.append(slots(i), taken_.data() + at, added(i));
        }
        return entries_(blocks_as_int32());
    }

    void extend(const Slots& slots, const Int32s& num_tokens) {
        const Timer timer(timed_ns_);
        same_length(slots.size(), num_tokens.size());
        check_slots(slots);
        int64_t total = 0;
        for (size_t i = 0; i < slots.size(); ++i) {
            const int64_t short_of = lacking(slots(i), num_tokens(i));
            check_room(slots(i), short_of);
            total += short_of;
        }
        evicted.clear();
        if (!total) return;
        allocate_blocks(total);
        for (size_t i = 0, at = 0; i < slots.size(); ++i) {
            const int64_t added = lacking(slots(i), num_tokens(i));
            tables.append(slots(i), taken_.data() + at, added);
            at += static_cast<size_t>(added);
        }
    }

    nb::tuple entries(const Slots& slots) {
        rows_.clear(), columns_.clear(), blocks_.clear();
        for (size_t i = 0; i < slots.size(); ++i) {
            const int64_t slot = slots(i);
            check_slot(slot);
            const int64_t first = tables.firsts[slot], count = tables.counts[slot] - first;
            list_columns(slot, first, count);
            const int32_t* row = tables.blocks + slot * tables.num_columns + first;
            blocks_.insert(blocks_.end(), row, row + count);
        }
        return entries_(array_of(blocks_.data(), blocks_.size()));
    }

    int64_t blocks_lacking(const Slots& slots, const Int32s& num_tokens) const {
        same_length(slots.size(), num_tokens.size());
        int64_t total = 0;
        for (size_t i = 0; i < slots.size(); ++i) {
            check_slot(slots(i));
            total += lacking(slots(i), num_tokens(i));
        }
        return total;
    }

    int64_t num_free() const { return pool.num_free(); }
    int64_t num_never_used() const { return pool.counts[quire::BlockPool::kMinStack]; }
    int64_t num_allocated() const { return pool.counts[quire::BlockPool::kAllocated]; }
    int64_t num_free_findable() const { return pool.num_findable(); }

    int64_t num_unreferenced(const Int32s& blocks) const {
        check_blocks(blocks);
        return std::count_if(blocks.data(), blocks.data() + blocks.size(),
                             [&](int32_t block) { return pool.references[block] == 0; });
    }

    void share(const Int32s& blocks) {
        check_shareable(blocks);
        pool.share(blocks.data(), static_cast<int64_t>(blocks.size()));
    }

    int64_t release(const Int32s& blocks) {
        check_releasable(blocks);
        return pool.release(blocks.data(), static_cast<int64_t>(blocks.size()));
    }

    int64_t free(const Slots& slots) {
        empty(slots);
        return pool.release(blocks_.data(), static_cast<int64_t>(blocks_.size()));
    }

    nb::object clear(const Slots& slots) {
        empty(slots);
        return array_of(blocks_.data(), blocks_.size());
    }

    void attach(int64_t slot, const Digests& digests, const Int32s& blocks, const Seed& seed,
                int32_t owner, bool returned) {
        const int64_t count = static_cast<int64_t>(blocks.size());
        check_room(slot, count);
        check_shareable(blocks);
        if (digests.shape(0) < blocks.size()) throw std::invalid_argument("a block has no digest");
        const Digest* first = reinterpret_cast<const Digest*>(digests.data());
        chains.known[static_cast<size_t>(slot)].assign(first, first + digests.shape(0));
        chains.registered[slot] = static_cast<int32_t>(count);
        chains.owners[slot] = owner;
        chains.returned[slot] = returned;
        for (int word = 0; word < 2; ++word) {
            chains.seeds[2 * slot + word] = seed(word);
            chains.ends[2 * slot + word] = count ? digests(count - 1, word) : seed(word);
        }
        pool.share(blocks.data(), count);
        taken_.assign(blocks.data(), blocks.data() + count);
        tables.append(slot, taken_.data(), count);
    }

    int64_t register_blocks(const Slots& slots, const Int32s& computed, const TokenRows& tokens) {
        same_length(slots.size(), computed.size());
        check_slots(slots);
        const int64_t size = tables.block_size, width = static_cast<int64_t>(tokens.shape(1));
        for (size_t i = 0; i < slots.size(); ++i) {
            const int64_t slot = slots(i), last = computed(i) / size;
            const int64_t first = chains.registered[slot];
            if (last <= first) continue;
            if (first < tables.firsts[slot] || last > tables.counts[slot] ||
                slot >= static_cast<int64_t>(tokens.shape(0)) || last * size > width) {
                throw std::out_of_range("a slot has no such blocks or tokens");
            }
        }
        quire::BlockOperations::register_blocks(slots.data(), computed.data(), slots.size(),
                                                tokens.data(), width);
        return static_cast<int64_t>(inserted.blocks.size());
    }

    nb::tuple last_evicted() const { return changed(evicted); }
    nb::tuple last_inserted() const { return changed(inserted); }

  private:
    nb::object pool_;
    int64_t* timed_ns_;
    std::vector<nb::object> kept_;
    std::vector<uint64_t> seen_;  // by slot: the last call that checked it
    uint64_t num_checks_ = 0;
    std::vector<int64_t> taken_;
    std::vector<int32_t> rows_, columns_, blocks_;

    nb::object keep(nb::object object) { return kept_.emplace_back(object); }

    // The first element of array `name` of `owner`; bool arrays as bytes.
    template <class T, class Stored = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>>
    Stored* data(const nb::object& owner, const char* name) {
        nb::object array = owner.attr(name);
        if constexpr (std::is_same_v<T, bool>) array = array.attr("view")("uint8");
        keep(array);
        return nb::cast<nb::ndarray<Stored, nb::c_contig, nb::device::cpu>>(array, false).data();
    }

    quire::AgeQueue queue(const nb::object& owner) {
        quire::AgeQueue queue;
        queue.entries = data<int64_t>(owner, "entries");
        queue.entry_stamps = data<int64_t>(owner, "entry_stamps");
        queue.stamps = data<int64_t>(owner, "stamps");
        queue.state = data<int64_t>(owner, "state");
        queue.capacity = static_cast<int64_t>(nb::len(nb::object(owner.attr("entries"))));
        return queue;
    }

    void bind_pool(const nb::object& owner) {
        pool.references = data<int32_t>(owner, "references");
        pool.findable = data<bool>(owner, "findable");
        pool.is_protected = data<bool>(owner, "protected");
        pool.is_pinned = data<bool>(owner, "pinned");
        pool.stack = data<int64_t>(owner, "stack");
        pool.counts = data<int64_t>(owner, "counts");
        pool.once = queue(owner.attr("once"));
        pool.again = queue(owner.attr("again"));
        pool.kept = queue(owner.attr("kept"));
        pool.num_blocks = nb::cast<int64_t>(owner.attr("num_blocks"));
        pool.max_protected = nb::cast<int64_t>(owner.attr("max_protected"));
    }

    void bind_tables(const nb::object& owner) {
        tables.blocks = data<int32_t>(owner, "blocks");
        tables.firsts = data<int32_t>(owner, "firsts");
        tables.counts = data<int32_t>(owner, "counts");
        tables.capacities = data<int32_t>(owner, "capacities");
        tables.holders = data<int64_t>(owner, "holders");
        tables.last_holders = data<int64_t>(owner, "holders_by_block");
        tables.block_size = nb::cast<int64_t>(owner.attr("block_size"));
        const nb::object shape = owner.attr("blocks").attr("shape");
        tables.num_slots = nb::cast<int64_t>(shape[0]);
        tables.num_columns = nb::cast<int64_t>(shape[1]);
    }

    static void same_length(size_t one, size_t other) {
        if (one != other) throw std::invalid_argument("the arguments differ in length");
    }

    // Empty `slots`; their blocks are in blocks_ then.
    void empty(const Slots& slots) {
        check_slots(slots);
        blocks_.clear();
        for (size_t i = 0; i < slots.size(); ++i) {
            tables.take(slots(i), blocks_);
            chains.registered[slots(i)] = 0;
            chains.known[static_cast<size_t>(slots(i))].clear();
        }
    }

    void check_slot(int64_t slot) const {
        if (slot < 0 || slot >= tables.num_slots) throw std::out_of_range("no such slot");
    }

    void check_slots(const Slots& slots) {
        ++num_checks_;
        for (size_t i = 0; i < slots.size(); ++i) {
            check_slot(slots(i));
            uint64_t& seen = seen_[static_cast<size_t>(slots(i))];
            if (seen == num_checks_) throw std::invalid_argument("a slot is given twice");
            seen = num_checks_;
        }
    }

    void check_room(int64_t slot, int64_t added) const {
        check_slot(slot);
        if (added < 0 || tables.counts[slot] + added > tables.num_columns) {
            throw std::out_of_range("a slot would have more blocks than its table has columns");
        }
    }

    void check_blocks(const Int32s& blocks) const {
        for (size_t i = 0; i < blocks.size(); ++i) {
            if (blocks(i) < 0 || blocks(i) >= pool.num_blocks) {
                throw std::out_of_range("no such block");
            }
        }
    }

    void check_shareable(const Int32s& blocks) const {
        check_blocks(blocks);
        for (size_t i = 0; i < blocks.size(); ++i) {
            if (pool.references[blocks(i)] == 0 && !pool.findable[blocks(i)]) {
                throw std::invalid_argument("a free block without content cannot be shared");
            }
        }
    }

    // A block may be given more than once, up to its number of references.
    void check_releasable(const Int32s& blocks) const {
        check_blocks(blocks);
        size_t taken = 0;
        while (taken < blocks.size() && pool.references[blocks(taken)] > 0) {
            --pool.references[blocks(taken++)];
        }
        for (size_t i = 0; i < taken; ++i) ++pool.references[blocks(i)];
        if (taken < blocks.size()) throw std::invalid_argument("a free block was released");
    }

    int64_t lacking(int64_t slot, int64_t num_tokens) const {
        const int64_t over = num_tokens - tables.capacities[slot], size = tables.block_size;
        return over > 0 ? (over + size - 1) / size : 0;
    }

    void allocate_blocks(int64_t count) {
        if (count > pool.num_free()) pool_.attr("refuse")(count);  // raises CapacityError
        if (!quire::BlockOperations::allocate(count, taken_)) {
            throw std::runtime_error("a block was evicted that the prefix index has no key of");
        }
    }

    nb::object blocks_as_int32() {
        blocks_.assign(taken_.begin(), taken_.end());
        return array_of(blocks_.data(), blocks_.size());
    }

    void list_columns(int64_t slot, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            rows_.push_back(static_cast<int32_t>(slot));
            columns_.push_back(static_cast<int32_t>(first + i));
        }
    }

    nb::tuple entries_(nb::object blocks) const {
        return nb::make_tuple(array_of(rows_.data(), rows_.size()),
                              array_of(columns_.data(), columns_.size()), blocks);
    }

    static nb::tuple changed(const Changed& changed) {
        return nb::make_tuple(digests_of(changed.digests),
                              array_of(changed.blocks.data(), changed.blocks.size()));
    }
};

nb::object take_ghosts(quire::Ghosts& ghosts, const Digests& digests) {
    auto taken = std::make_unique<bool[]>(digests.shape(0) + 1);
    for (size_t i = 0; i < digests.shape(0); ++i) {
        taken[i] = ghosts.take({digests(i, 0), digests(i, 1)});
    }
    return array_of(taken.get(), digests.shape(0));
}

void add_ghosts(quire::Ghosts& ghosts, const Digests& digests) {
    for (size_t i = 0; i < digests.shape(0); ++i) ghosts.add({digests(i, 0), digests(i, 1)});
}

bool has_ghost(const quire::Ghosts& ghosts, const Vector<uint64_t>& digest) {
    if (digest.size() != 2) throw std::invalid_argument("a digest has two words");
    return ghosts.has({digest(0), digest(1)});
}

}  // namespace

void bind_block_operations(nb::module_& module) {
    nb::class_<quire::Ghosts>(module, "Ghosts", "See quire.cache.ghosts.PlainGhosts.")
        .def("__init__",
             [](quire::Ghosts* self, int64_t limit) {
                 if (limit < 1) throw std::invalid_argument("limit must be at least 1");
                 new (self) quire::Ghosts(static_cast<size_t>(limit));
             },
             nb::arg("limit"))
        .def("__len__", &quire::Ghosts::size)
        .def("__contains__", &has_ghost, nb::arg("digest"))
        .def_prop_ro("limit", &quire::Ghosts::limit)
        .def("add", &add_ghosts, nb::arg("digests"))
        .def("take", &take_ghosts, nb::arg("digests"))
        .def("clear", &quire::Ghosts::clear);
    nb::class_<Operations>(module, "BlockOperations",
                           "See quire.cache.block_operations.BlockOperations.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::bytes, bool>(),
             nb::arg("pool"), nb::arg("tables"), nb::arg("chains"), nb::arg("index"),
             nb::arg("ghosts"), nb::arg("lineage"), nb::arg("key"),
             nb::arg("timed") = false)
        .def_prop_ro("num_free", &Operations::num_free)
        .def_prop_ro("num_free_findable", &Operations::num_free_findable)
        .def_prop_ro("num_never_used", &Operations::num_never_used)
        .def_prop_ro("allocated_blocks_total", &Operations::num_allocated)
        .def_ro("allocation_ns_total", &Operations::allocation_ns_total)
        .def("take", &Operations::take, nb::arg("count"))
        .def("allocate", &Operations::allocate, nb::arg("slots"), nb::arg("added"))
        .def("extend", &Operations::extend, nb::arg("slots"), nb::arg("num_tokens"))
        .def("entries", &Operations::entries, nb::arg("slots"))
        .def("blocks_lacking", &Operations::blocks_lacking, nb::arg("slots"),
             nb::arg("num_tokens"))
        .def("num_unreferenced", &Operations::num_unreferenced, nb::arg("blocks"))
        .def("share", &Operations::share, nb::arg("blocks"))
        .def("release", &Operations::release, nb::arg("blocks"))
        .def("free", &Operations::free, nb::arg("slots"))
        .def("clear", &Operations::clear, nb::arg("slots"))
        .def("attach", &Operations::attach, nb::arg("slot"), nb::arg("digests"),
             nb::arg("blocks"), nb::arg("seed"), nb::arg("owner"), nb::arg("returned"))
        .def("register", &Operations::register_blocks, nb::arg("slots"), nb::arg("computed"),
             nb::arg("tokens"))
        .def("last_evicted", &Operations::last_evicted)
        .def("last_inserted", &Operations::last_inserted);
}
