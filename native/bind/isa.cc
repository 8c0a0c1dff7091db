// Binds the choice of instruction set. Knows no kernel and keeps no state: each call looks anew
// at QUIRE_ISA and at the machine. What the machine lacks becomes RuntimeError, with the names of
// what it has.

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
    module.attr("MAX_HEAD_DIM") = quire::kMaxHeadDim;  // columns of a head that kernels hold
    module.def("available_isas", &quire::available_isas,
               "Instruction sets this machine can run, best first.");
}
