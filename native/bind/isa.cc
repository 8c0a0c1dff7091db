// Bindings for instruction set selection. Stateless: each call reads QUIRE_ISA and the CPU's
// features again. An unavailable instruction set becomes RuntimeError, with the names of available
// ones.

#include "quire/isa.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "quire/kernels.h"

namespace nb = nanobind;

void bind_isa(nb::module_& module) {
    module.def(
        "isa", [](const std::string& name) { return std::string(quire::kernels_for(name).isa); },
        nb::arg("name") = "",
        "The instruction set used for `name`; empty: QUIRE_ISA, else the best of this machine.\n"
        "Raises RuntimeError where the machine or the build lacks it.");
    module.attr("MAX_HEAD_DIM") = quire::kMaxHeadDim;  // columns of a head that kernels support
    module.def("available_isas", &quire::available_isas,
               "Instruction sets this machine can run, best first.");
}
