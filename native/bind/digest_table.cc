// Bindings for the digest table (quire/cache/digest_table.py is its reference), with many digests
// per call. Shapes and numbers are checked here, so that native/src can trust them. Slots are
// prefetched some digests ahead, since a large table is not in the caches.

#include "quire/digest_table.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace {

using quire::Digest;
using quire::DigestTable;
using Digests = nb::ndarray<const uint64_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Vector = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;

constexpr size_t kAhead = 8;  // digests prefetched ahead

Digest digest_at(const Digests& digests, size_t i) {
    return {digests.data()[2 * i], digests.data()[2 * i + 1]};
}

// Calls each(i, digest) in order until it returns false.
template <class Each>
void walk(const DigestTable& table, const Digests& digests, Each each) {
    const size_t count = digests.shape(0);
    for (size_t i = 0; i < count && i < kAhead; ++i) table.expect(digest_at(digests, i));
    for (size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) table.expect(digest_at(digests, i + kAhead));
        if (!each(i, digest_at(digests, i))) return;
    }
}

template <class T>
Vector<T> owned_array(std::unique_ptr<T[]> values, size_t count) {
    T* owned = values.release();
    nb::capsule owner(owned, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Vector<T>(owned, {count}, owner);
}

void check(const Digests& digests, const Numbers& numbers) {
    if (digests.shape(0) != numbers.shape(0)) {
        throw std::invalid_argument("digests and numbers differ in length");
    }
}

Vector<int32_t> find(const DigestTable& table, const Digests& digests) {
    auto found = std::make_unique<int32_t[]>(digests.shape(0));
    walk(table, digests, [&](size_t i, Digest digest) {
        found[i] = table.find(digest);
        return true;
    });
    return owned_array(std::move(found), digests.shape(0));
}

Vector<int32_t> longest_run(const DigestTable& table, const Digests& digests) {
    auto found = std::make_unique<int32_t[]>(digests.shape(0));
    size_t length = 0;
    walk(table, digests, [&](size_t i, Digest digest) {
        found[i] = table.find(digest);
        if (found[i] == DigestTable::kNone) return false;
        ++length;
        return true;
    });
    return owned_array(std::move(found), length);
}

nb::list longest_runs(const DigestTable& table, const nb::list& chains) {
    nb::list runs;
    nb::object none;  // most chains are not known: they share one empty array
    for (nb::handle chain : chains) {
        const Digests digests = nb::cast<Digests>(chain);
        if (digests.shape(0) && table.find(digest_at(digests, 0)) != DigestTable::kNone) {
            runs.append(longest_run(table, digests));
            continue;
        }
        if (!none.is_valid()) none = nb::cast(owned_array(std::make_unique<int32_t[]>(1), 0));
        runs.append(none);
    }
    return runs;
}

Vector<int64_t> put(DigestTable& table, const Digests& digests, const Numbers& numbers) {
    check(digests, numbers);
    for (size_t i = 0; i < numbers.shape(0); ++i) {
        if (numbers(i) < 0) throw std::invalid_argument("a number is negative");
    }
    auto fresh = std::make_unique<int64_t[]>(digests.shape(0));
    size_t count = 0;
    walk(table, digests, [&](size_t i, Digest digest) {
        if (table.put(digest, numbers(i))) fresh[count++] = static_cast<int64_t>(i);
        return true;
    });
    return owned_array(std::move(fresh), count);
}

Vector<int32_t> take(DigestTable& table, const Digests& digests) {
    auto taken = std::make_unique<int32_t[]>(digests.shape(0));
    walk(table, digests, [&](size_t i, Digest digest) {
        taken[i] = table.take(digest);
        return true;
    });
    return owned_array(std::move(taken), digests.shape(0));
}

int64_t take_pairs(DigestTable& table, const Digests& digests, const Numbers& numbers) {
    check(digests, numbers);
    int64_t taken = 0;
    walk(table, digests, [&](size_t i, Digest digest) {
        const int32_t number = table.find(digest);
        if (number == DigestTable::kNone || number != numbers(i)) return true;
        table.take(digest);
        ++taken;
        return true;
    });
    return taken;
}

}  // namespace

void bind_digest_table(nb::module_& module) {
    nb::class_<DigestTable>(module, "DigestTable",
                            "From digests to numbers; see quire.cache.digest_table.Table.")
        .def(nb::init<>())
        .def("__len__", &DigestTable::size)
        .def("find", &find, nb::arg("digests"))
        .def("longest_run", &longest_run, nb::arg("digests"))
        .def("longest_runs", &longest_runs, nb::arg("chains"))
        .def("put", &put, nb::arg("digests"), nb::arg("numbers"))
        .def("take", &take, nb::arg("digests"))
        .def("take_pairs", &take_pairs, nb::arg("digests"), nb::arg("numbers"))
        .def("clear", &DigestTable::clear);
}
