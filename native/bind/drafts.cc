// Bindings for drafts (quire/runner/plain_drafts.py and quire/speculative/plain_counts.py are their
// references). Shapes and numbers are checked here, so that native/src can trust them: what is
// wrong raises ValueError before anything is written.

#include "quire/drafts.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>

namespace nb = nanobind;

namespace {

using quire::DraftCounts;
using quire::DraftedRows;
using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Written = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Chances = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Known = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// Numbers that count parts of something that is `total` long.
void check_counts(const Numbers& counts, size_t total, const char* what) {
    int64_t sum = 0;
    bool all_counts = true;
    for (size_t i = 0; i < counts.shape(0); ++i) {
        sum += counts(i);
        all_counts &= counts(i) >= 0;
    }
    require(all_counts && sum == static_cast<int64_t>(total), what);
}

DraftedRows checked_rows(const Numbers& slots, const Numbers& firsts, const Numbers& counts,
                         const Numbers& ids, const Table& tokens, const Written& lengths) {
    const size_t num = slots.shape(0);
    require(firsts.shape(0) == num && counts.shape(0) == num && lengths.shape(0) == tokens.shape(0),
            "rows and what belongs to them differ in length");
    check_counts(counts, ids.shape(0), "counts of drafts do not add up to the drafts");
    for (size_t i = 0; i < num; ++i) {
        const bool in_table = slots(i) >= 0 && static_cast<size_t>(slots(i)) < tokens.shape(0);
        const int64_t end = static_cast<int64_t>(firsts(i)) + counts(i);
        require(in_table && firsts(i) >= 0 && end <= static_cast<int64_t>(tokens.shape(1)),
                "drafts lie outside the table of tokens");
    }
    return {num, slots.data(), firsts.data(), counts.data(), ids.data()};
}

void put(const Numbers& slots, const Numbers& firsts, const Numbers& counts, const Numbers& ids,
         const Table& tokens, const Written& lengths) {
    const DraftedRows rows = checked_rows(slots, firsts, counts, ids, tokens, lengths);
    quire::put_drafts(rows, {tokens.data(), tokens.shape(1), lengths.data()});
}

void take_back(const Numbers& slots, const Numbers& firsts, const Numbers& counts,
               const Numbers& ids, const Flags& stays, const Table& tokens,
               const Written& lengths) {
    const DraftedRows rows = checked_rows(slots, firsts, counts, ids, tokens, lengths);
    require(stays.shape(0) == rows.num, "rows and what belongs to them differ in length");
    quire::take_back_drafts(rows, stays.data(), {tokens.data(), tokens.shape(1), lengths.data()});
}

void drop(const Numbers& counts, const Numbers& ids, const Numbers& sample_counts,
          const Written& token_ids) {
    const size_t num = counts.shape(0);
    require(sample_counts.shape(0) == num, "rows and what belongs to them differ in length");
    check_counts(counts, ids.shape(0), "counts of drafts do not add up to the drafts");
    check_counts(sample_counts, token_ids.shape(0), "sampled positions do not add up to the tokens");
    for (size_t i = 0; i < num; ++i) {
        require(!counts(i) || counts(i) < sample_counts(i),
                "a row has as many drafts as sampled positions");
    }
    const DraftedRows rows{num, nullptr, nullptr, counts.data(), ids.data()};
    quire::drop_after_mismatch(rows, sample_counts.data(), token_ids.data());
}

void count(const Numbers& counts, const Numbers& ids, const Numbers& token_counts,
           const Numbers& token_ids, const Written& accepted) {
    const size_t num = counts.shape(0);
    require(token_counts.shape(0) == num && accepted.shape(0) == num,
            "rows and what belongs to them differ in length");
    check_counts(counts, ids.shape(0), "counts of drafts do not add up to the drafts");
    check_counts(token_counts, token_ids.shape(0), "runs do not add up to the tokens");
    quire::count_accepted(num, counts.data(), ids.data(), token_counts.data(), token_ids.data(),
                          accepted.data());
}

size_t leading(const Numbers& sample_counts, const Numbers& token_ids, const Flags& failed,
               const Written& counts, const Places& kept) {
    const size_t num = sample_counts.shape(0);
    require(failed.shape(0) == num && counts.shape(0) == num &&
                kept.shape(0) == token_ids.shape(0),
            "rows and what belongs to them differ in length");
    check_counts(sample_counts, token_ids.shape(0), "sampled positions do not add up to the tokens");
    return quire::leading_tokens(num, sample_counts.data(), token_ids.data(), failed.data(),
                                 counts.data(), kept.data());
}

double lengths_of(const Known& chances, const Numbers& limits, const Times& draft_ms,
                  const Times& added_ms, double step_ms, double step_tokens, double once_ms,
                  double row_ms, double margin, const Written& lengths) {
    const size_t num = chances.shape(0), width = chances.shape(1);
    require(limits.shape(0) == num && draft_ms.shape(0) == num && lengths.shape(0) == num,
            "rows and what belongs to them differ in length");
    for (size_t i = 0; i < num; ++i) {
        require(limits(i) <= static_cast<int64_t>(width), "a limit is beyond the chances");
    }
    require(added_ms.shape(0) >= 2, "prices of no and of one draft are needed at least");
    const quire::DraftPrice price{added_ms.data(), added_ms.shape(0), step_ms, step_tokens,
                                  once_ms,         row_ms,            margin};
    return quire::draft_lengths(num, width, chances.data(), limits.data(), draft_ms.data(), price,
                                lengths.data());
}

size_t checked_slot(const DraftCounts& counts, int64_t slot) {
    require(slot >= 0 && static_cast<size_t>(slot) < counts.num_slots(), "a slot is out of range");
    return static_cast<size_t>(slot);
}

void chances(DraftCounts& counts, const Slots& slots, int32_t num_steps, const Chances& found) {
    require(found.shape(0) == slots.shape(0) && found.shape(1) == counts.max_drafts(),
            "chances have another shape than slots and drafts");
    for (size_t i = 0; i < slots.shape(0); ++i) checked_slot(counts, slots(i));
    counts.fade_all(slots.shape(0), slots.data(), num_steps);
    for (size_t i = 0; i < slots.shape(0); ++i) {
        double* row = found.data() + i * found.shape(1);
        counts.chances(static_cast<size_t>(slots(i)), num_steps, row);
    }
}

void verified(DraftCounts& counts, const Slots& slots, const Numbers& drafted,
              const Numbers& accepted) {
    const size_t num = slots.shape(0);
    require(drafted.shape(0) == num && accepted.shape(0) == num,
            "slots and what belongs to them differ in length");
    for (size_t i = 0; i < num; ++i) {
        checked_slot(counts, slots(i));
        require(accepted(i) >= 0 && accepted(i) <= drafted(i) &&
                    static_cast<size_t>(drafted(i)) <= counts.max_drafts(),
                "more drafts were accepted than verified, or verified than allowed");
    }
    counts.verified(num, slots.data(), drafted.data(), accepted.data());
}

}  // namespace

void bind_drafts(nb::module_& module) {
    module.def("put_drafts", &put, nb::arg("slots"), nb::arg("firsts"), nb::arg("counts"),
               nb::arg("ids"), nb::arg("tokens"), nb::arg("lengths"));
    module.def("take_back_drafts", &take_back, nb::arg("slots"), nb::arg("firsts"),
               nb::arg("counts"), nb::arg("ids"), nb::arg("stays"), nb::arg("tokens"),
               nb::arg("lengths"));
    module.def("drop_after_mismatch", &drop, nb::arg("counts"), nb::arg("ids"),
               nb::arg("sample_counts"), nb::arg("token_ids"));
    module.def("count_accepted", &count, nb::arg("counts"), nb::arg("ids"),
               nb::arg("token_counts"), nb::arg("token_ids"), nb::arg("accepted"));
    module.def("leading_tokens", &leading, nb::arg("sample_counts"), nb::arg("token_ids"),
               nb::arg("failed"), nb::arg("counts"), nb::arg("kept"));
    module.def("draft_lengths", &lengths_of, nb::arg("chances"), nb::arg("limits"),
               nb::arg("draft_ms"), nb::arg("added_ms"), nb::arg("step_ms"),
               nb::arg("step_tokens"), nb::arg("once_ms"), nb::arg("row_ms"), nb::arg("margin"),
               nb::arg("lengths"));
    nb::class_<DraftCounts>(module, "DraftCounts",
                            "What became of drafts; see quire.speculative.plain_counts.")
        .def(nb::init<size_t, size_t>(), nb::arg("num_slots"), nb::arg("max_drafts"))
        .def(
            "begin",
            [](DraftCounts& counts, int64_t slot, size_t kind) {
                require(kind < DraftCounts::kNumKinds, "there is no such kind of drafts");
                counts.begin(checked_slot(counts, slot), kind);
            },
            nb::arg("slot"), nb::arg("kind"))
        .def("chances", &chances, nb::arg("slots"), nb::arg("num_steps"), nb::arg("found"))
        .def("verified", &verified, nb::arg("slots"), nb::arg("drafted"), nb::arg("accepted"));
}
