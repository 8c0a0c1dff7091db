// Bindings for the writer of beats.
// No call waits: the writer's lock is held for writes that do not block, by a thread that never
// takes the interpreter lock. Callers keep a socket open until it is removed.

#include "quire/beat_writer.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

void bind_beat_writer(nb::module_& module) {
    using quire::BeatWriter;
    nb::class_<BeatWriter>(module, "BeatWriter",
                           "Writes a message to sockets at regular times, from a native thread.")
        .def("__init__",
             [](BeatWriter* self, double period_s, const nb::bytes& message) {
                 new (self) BeatWriter(period_s, std::string(message.c_str(), message.size()));
             },
             "period_s"_a, "message"_a)
        .def("add", &BeatWriter::add, "socket"_a,
             "Write to the socket of this descriptor until it is removed. It does not block.")
        .def("remove", &BeatWriter::remove, "socket"_a,
             "Write no more to a socket, which may be closed then.")
        .def("write",
             [](BeatWriter& self, int socket, const nb::bytes& piece) {
                 self.write(socket, piece.c_str(), static_cast<int64_t>(piece.size()));
             },
             "socket"_a, "piece"_a,
             "Write between two messages. A socket that takes only a part is shut down.")
        .def("__len__", &BeatWriter::size, "Return how many sockets are written to.");
}
