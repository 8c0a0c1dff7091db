// Bindings for the suffix index (quire/speculative/suffix.py is its reference), one text per slot
// and many slots per call. Shapes and numbers are checked here, so that native/src can trust them:
// what is wrong raises ValueError before anything is read.

#include "quire/suffix_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

namespace nb = nanobind;

namespace {

using quire::SuffixIndex;
using Slots = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Texts = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>, nb::c_contig>;

// The indexes of all slots.
class Indexes {
  public:
    explicit Indexes(size_t num_slots) : of_slot_(num_slots) {}

    SuffixIndex& at(int64_t slot) {
        if (slot < 0 || static_cast<size_t>(slot) >= of_slot_.size()) {
            throw std::invalid_argument("a slot is out of range");
        }
        return of_slot_[static_cast<size_t>(slot)];
    }

  private:
    std::vector<SuffixIndex> of_slot_;
};

// What follows the first `length` tokens of `text`; returns how many ids there are.
int32_t own_continuation(SuffixIndex& index, const int32_t* text, int32_t length, int32_t limit,
                         int32_t* ids) {
    index.learn(text, length);
    const int32_t end = index.longest_match(text, text, length, length);
    if (!end) return 0;
    for (int32_t i = 0; i < limit; ++i) {
        const int32_t from = end + i;  // beyond the text it goes on with itself
        ids[i] = from < length ? text[from] : ids[from - length];
    }
    return limit;
}

void propose(Indexes& indexes, const Texts& tokens, const Slots& slots, const Numbers& lengths,
             const Numbers& limits, const Table& ids, const Counts& counts) {
    const size_t num = slots.shape(0);
    if (lengths.shape(0) != num || limits.shape(0) != num || ids.shape(0) != num ||
        counts.shape(0) != num) {
        throw std::invalid_argument("slots and what belongs to them differ in length");
    }
    for (size_t i = 0; i < num; ++i) {
        SuffixIndex& index = indexes.at(slots(i));
        if (static_cast<size_t>(slots(i)) >= tokens.shape(0) || lengths(i) < 0 ||
            static_cast<size_t>(lengths(i)) > tokens.shape(1) || limits(i) < 0 ||
            static_cast<size_t>(limits(i)) > ids.shape(1)) {
            throw std::invalid_argument("a text or a limit is longer than its row");
        }
        const int32_t* text = tokens.data() + static_cast<size_t>(slots(i)) * tokens.shape(1);
        int32_t* found = ids.data() + i * ids.shape(1);
        counts(i) = own_continuation(index, text, lengths(i), limits(i), found);
    }
}

Ids follow(Indexes& indexes, int64_t slot, const Numbers& text, const Numbers& tail,
           int32_t limit) {
    SuffixIndex& index = indexes.at(slot);
    const auto length = static_cast<int32_t>(text.shape(0));
    const auto tail_length = static_cast<int32_t>(tail.shape(0));
    index.learn(text.data(), length);
    int32_t end = index.longest_match(text.data(), tail.data(), tail_length, length);
    if (tail_length == 1 && length > 0 && text(0) == tail(0)) end = 1;
    const bool found = end > 0 || tail_length == 0;
    const int32_t count = found ? std::max(std::min(limit, length - end), 0) : 0;
    auto ids = std::make_unique<int32_t[]>(static_cast<size_t>(count) + 1);
    std::copy_n(text.data() + end, count, ids.get());
    int32_t* owned = ids.release();
    nb::capsule owner(owned, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    return Ids(owned, {static_cast<size_t>(count)}, owner);
}

}  // namespace

void bind_suffix_index(nb::module_& module) {
    nb::class_<Indexes>(module, "SuffixIndex",
                        "Continuations of texts, one per slot; see quire.speculative.suffix.")
        .def(nb::init<size_t>(), nb::arg("num_slots"))
        .def("forget", [](Indexes& indexes, int64_t slot) { indexes.at(slot).forget(); },
             nb::arg("slot"))
        .def("propose", &propose, nb::arg("tokens"), nb::arg("slots"), nb::arg("lengths"),
             nb::arg("limits"), nb::arg("ids"), nb::arg("counts"))
        .def("follow", &follow, nb::arg("slot"), nb::arg("text"), nb::arg("tail"),
             nb::arg("limit"));
}
