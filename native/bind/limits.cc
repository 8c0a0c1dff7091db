// Bindings for the machine's limits (kernels.h, limit) and for the time spent computing.
// The loops are selected by name. The returned time is that of the loop alone, without the
// interpreter lock.

#include "compute_time.h"
#include "quire/kernels.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <chrono>
#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr const char* kNames[] = {"read",      "fma_f32",   "dot_bf16", "dot_int8",
                                  "tile_bf16", "tile_int8", "fork_join"};

quire::Limit limit_named(const std::string& name) {
    for (int32_t i = 0; i < static_cast<int32_t>(std::size(kNames)); ++i) {
        if (name == kNames[i]) return static_cast<quire::Limit>(i);
    }
    throw std::invalid_argument("no limit is called \"" + name + "\"");
}

// The amount of work done, and the seconds it took.
std::tuple<int64_t, double> limit(quire::Pool& pool, const std::string& name, int64_t chunks,
                                  const Bytes& memory) {
    int64_t done = 0;
    const quire::LimitArgs args{limit_named(name), memory.data(),
                                static_cast<int64_t>(memory.size()), chunks, &done, &pool};
    nb::gil_scoped_release release;
    const auto began = std::chrono::steady_clock::now();
    pool.kernels().limit(args);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began;
    return {done, spent.count()};
}

}  // namespace

void bind_limits(nb::module_& module) {
    module.def("limit", &limit, "pool"_a, "name"_a, "chunks"_a, "memory"_a,
               "Run one loop with all threads of the pool: (bytes, operations or handings-out "
               "done, seconds). Done is 0 where the instruction set has no such loop.");
    module.def("compute_ns", [] { return compute_nanoseconds.load(); },
               "Nanoseconds this process has spent in native calls that compute.");
}
