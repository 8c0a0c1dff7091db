// The Python module quire._native. Each other file NAME.cc of this directory defines
// bind_NAME(module); the build writes the list of them into bindings.inc. Only this directory uses
// Python: native/src takes plain pointers.

#include <nanobind/nanobind.h>

#define QUIRE_BIND(name) void bind_##name(nanobind::module_& module);
#include "bindings.inc"
#undef QUIRE_BIND

NB_MODULE(_native, module) {
    // An engine thread may live until the interpreter ends; what it holds then is no leak.
    nanobind::set_leak_warnings(false);
    module.doc() = "Quire's native kernels, thread pool and program interpreter.";
#define QUIRE_BIND(name) bind_##name(module);
#include "bindings.inc"
#undef QUIRE_BIND
}
