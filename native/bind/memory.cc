// Bindings for the process's own memory management.
// Referenced memory is never changed. The C library and the system decide what is kept: calls here
// are hints.

#include "quire/memory.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_memory(nb::module_& module) {
    module.def(
        "give_back_freed_memory",
        [] {
            nb::gil_scoped_release release;
            quire::give_back_freed_memory();
        },
        "What was freed and is still kept for later goes back to the system. Worth it where much "
        "was read and little of it stays.");
}
