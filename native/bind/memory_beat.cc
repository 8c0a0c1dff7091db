// Bindings for the beat in memory.
// Nothing waits but the destructor, for a thread that never takes the interpreter lock. The caller
// gives a file of at least eight bytes.

#include "quire/memory_beat.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

void bind_memory_beat(nb::module_& module) {
    using quire::MemoryBeat;
    nb::class_<MemoryBeat>(module, "MemoryBeat",
                           "Writes the time into a file in memory, from a native thread.")
        .def(nb::init<int, double>(), "file"_a, "period_s"_a,
             "Write milliseconds of the monotonic clock into the first eight bytes of the file "
             "while it runs. The descriptor may be closed.")
        .def("run", &MemoryBeat::run, "is_running"_a,
             "Write times from now on, or 0 and no more. At first none are written.");
}
