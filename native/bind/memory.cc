// Binds what the process does about its own memory. Knows no weights and no cache; changes nothing
// that is still referenced. What is kept where is the C library's and the system's business: calls
// here are wishes.

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
