// Bindings for the exchange between ranks. Every call that may wait releases the GIL, so that a
// rank's other threads go on. Lengths are checked here, what fits a slot by the group. The group
// keeps the shared memory alive.

#include "quire/rank_group.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Shared = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Parts = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_rank_group(nb::module_& module) {
    nb::class_<quire::RankGroup>(module, "RankGroup",
                                 "The ranks of a model, in shared memory or connected by sockets.")
        .def("__init__",
             [](quire::RankGroup* self, const Shared& memory, int rank, int degree,
                int64_t slot_bytes, int64_t message_bytes, double timeout_s, int members) {
                 new (self) quire::RankGroup(reinterpret_cast<char*>(memory.data()),
                                             static_cast<int64_t>(memory.size()), rank, degree,
                                             {slot_bytes, message_bytes}, timeout_s, members);
             },
             "memory"_a, nb::kw_only(), "rank"_a, "degree"_a, "slot_bytes"_a, "message_bytes"_a,
             "timeout_s"_a, "members"_a = 0, nb::keep_alive<1, 2>(),
             "memory: shared by all ranks, zero at first. timeout_s: the longest wait for a rank "
             "that responds. members: how many ranks gather columns together; 0 for all.")
        .def_prop_ro("rank", &quire::RankGroup::rank)
        .def_prop_ro("degree", &quire::RankGroup::degree)
        .def_prop_ro("members", &quire::RankGroup::members,
                     "How many ranks gather columns with this one, itself included.")
        .def_prop_ro("progress", &quire::RankGroup::progress,
                     "Operations done by all ranks, modulo 2^32.")
        .def("note_progress", &quire::RankGroup::note_progress, "operations"_a,
             "Count operations done by this rank.")
        .def_prop_ro("num_gathers", &quire::RankGroup::num_gathers,
                     "Exchanges of columns so far.")
        .def_prop_ro("received_bytes", &quire::RankGroup::received_bytes,
                     "Bytes of columns received from other ranks so far.")
        .def("all_gather",
             [](quire::RankGroup& self, const Bytes& own, const Parts& out) {
                 if (out.shape(0) != static_cast<size_t>(self.members()) ||
                     out.shape(1) != own.size()) {
                     throw std::invalid_argument("out is not [members, bytes of own]");
                 }
                 nb::gil_scoped_release release;
                 self.all_gather(reinterpret_cast<const char*>(own.data()),
                                 reinterpret_cast<char*>(out.data()),
                                 static_cast<int64_t>(own.size()));
             },
             "own"_a, "out"_a, "Gather the bytes of all members in out [members, bytes].")
        .def("barrier",
             [](quire::RankGroup& self) {
                 nb::gil_scoped_release release;
                 self.barrier();
             })
        .def("send",
             [](quire::RankGroup& self, const Bytes& message) {
                 nb::gil_scoped_release release;
                 self.send(reinterpret_cast<const char*>(message.data()),
                           static_cast<int64_t>(message.size()));
             },
             "message"_a, "Rank 0: send a message to all others.")
        .def("receive",
             [](quire::RankGroup& self) {
                 const char* message = nullptr;
                 int64_t size = 0;
                 {
                     nb::gil_scoped_release release;
                     size = self.receive(&message);
                 }
                 return nb::bytes(message, static_cast<size_t>(size));
             },
             "Other ranks: wait for the next message, without limit, and return it.")
        .def("connect", &quire::RankGroup::connect, "sockets"_a,
             "Exchange with ranks that do not share the memory through these sockets, by rank, -1 "
             "for the others; they belong to the group from now on.")
        .def("leave", &quire::RankGroup::leave, nb::call_guard<nb::gil_scoped_release>(),
             "End by agreement: the end of this process is no loss to the ranks connected.")
        .def("wait_until_over", &quire::RankGroup::wait_until_over,
             nb::call_guard<nb::gil_scoped_release>(),
             "Wait until a rank connected is lost and return why, or an empty text after leave.")
        .def("abort", &quire::RankGroup::abort, "reason"_a = "",
             nb::call_guard<nb::gil_scoped_release>(),
             "Let the waits of all ranks end with RankLost. reason: why this rank fails, for those "
             "connected.")
        .def_prop_ro("is_aborted", &quire::RankGroup::is_aborted);
    module.def(
        "rank_group_bytes",
        [](int degree, int64_t slot_bytes, int64_t message_bytes) {
            return quire::RankGroup::shared_bytes(degree, {slot_bytes, message_bytes});
        },
        "degree"_a, nb::kw_only(), "slot_bytes"_a, "message_bytes"_a, "Bytes of shared memory.");
    nb::exception<quire::RankLost>(module, "RankLost", PyExc_RuntimeError);
}
