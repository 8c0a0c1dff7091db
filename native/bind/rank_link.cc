// Bindings for a link between two ranks. Every call that may wait releases the GIL, so that other
// threads of a rank go on. The link keeps the shared memory alive. Rows are sent and received by
// operations (program.cc), or from here by executors that are not compiled; what fits a slot is
// checked by the link.

#include "quire/rank_link.h"
#include "quire/pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Shared = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

quire::RankLink::Block block_of(const Rows& rows) {
    const auto row_bytes = static_cast<int64_t>(rows.shape(1));
    if (row_bytes == 0) throw std::invalid_argument("rows have no bytes");
    return {reinterpret_cast<char*>(rows.data()), static_cast<int64_t>(rows.shape(0)), row_bytes,
            row_bytes};
}

}  // namespace

void bind_rank_link(nb::module_& module) {
    nb::class_<quire::RankLink>(module, "RankLink",
                                "Rows or messages from one rank to another, in shared memory.")
        .def("__init__",
             [](quire::RankLink* self, std::shared_ptr<quire::RankGroup> group,
                const Shared& memory, int64_t slot_bytes, int64_t slots, int peer, bool sends) {
                 new (self) quire::RankLink(std::move(group),
                                            reinterpret_cast<char*>(memory.data()),
                                            static_cast<int64_t>(memory.size()),
                                            {slot_bytes, slots}, peer, sends);
             },
             "group"_a, "memory"_a, nb::kw_only(), "slot_bytes"_a, "slots"_a, "peer"_a, "sends"_a,
             nb::keep_alive<1, 3>(),
             "memory: shared by both ends, zero at first. peer: the rank at the other end. sends: "
             "whether this end does.")
        .def("begin", &quire::RankLink::begin, "step"_a,
             "Begin a step: rows belong to it from now on.")
        .def("reject",
             [](quire::RankLink& self) {
                 nb::gil_scoped_release release;
                 self.reject();
             },
             "The step has no rows: the other end rejects it too.")
        .def("send_message",
             [](quire::RankLink& self, const Bytes& message) {
                 nb::gil_scoped_release release;
                 self.send_message(reinterpret_cast<const char*>(message.data()),
                                   static_cast<int64_t>(message.size()));
             },
             "message"_a)
        .def("receive_message",
             [](quire::RankLink& self) {
                 const char* message = nullptr;
                 int64_t size = 0;
                 {
                     nb::gil_scoped_release release;
                     size = self.receive_message(&message);
                 }
                 return nb::bytes(message, static_cast<size_t>(size));
             },
             "Wait for the next message, without limit, and return it.")
        .def("send_rows",
             [](quire::RankLink& self, const Rows& rows, quire::Pool& pool) {
                 const auto block = block_of(rows);
                 nb::gil_scoped_release release;
                 self.send(block, pool);
             },
             "rows"_a, "pool"_a, "Send rows [rows, bytes] of the step.")
        .def("receive_rows",
             [](quire::RankLink& self, const Rows& rows, quire::Pool& pool) {
                 const auto block = block_of(rows);
                 nb::gil_scoped_release release;
                 self.receive(block, pool);
             },
             "rows"_a, "pool"_a, "Fill rows [rows, bytes] with those that the other end sends.")
        .def_prop_ro("received_bytes", &quire::RankLink::received_bytes,
                     "Bytes of rows received so far.")
        .def_prop_ro("waited_ns", &quire::RankLink::waited_ns,
                     "Nanoseconds the receiver has waited for rows so far.");
    module.def(
        "rank_link_bytes",
        [](int64_t slot_bytes, int64_t slots) {
            return quire::RankLink::shared_bytes({slot_bytes, slots});
        },
        nb::kw_only(), "slot_bytes"_a, "slots"_a, "Bytes of shared memory.");
}
