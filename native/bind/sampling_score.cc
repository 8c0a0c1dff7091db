// Bindings for the scoring of known tokens: NumPy arrays become the pointers of ScoreArgs, and the
// GIL is released. Only dtypes and dimensions are checked here: quire/sampling/native_scoring.py
// has checked shapes and ids and made arrays contiguous.

#include "compute_time.h"
#include "quire/sampling_score.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "quire/kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void score(quire::Pool& pool, Logits logits, Ints targets, Ints num_top, Ints listed_starts,
           Ints listed_ids, FloatsOut logprobs, IntsOut ranks, IntTable top_ids,
           FloatTable top_logprobs, FloatsOut listed_logprobs) {
    quire::ScoreArgs args{};
    args.logits = logits.data();
    args.stride = logits.stride(0);
    args.rows = static_cast<int32_t>(logits.shape(0));
    args.vocabulary = static_cast<int32_t>(logits.shape(1));
    args.targets = targets.data();
    args.num_top = num_top.data();
    args.listed_starts = listed_starts.data();
    args.listed_ids = listed_ids.data();
    args.width = static_cast<int32_t>(top_ids.shape(1));
    args.logprobs = logprobs.data();
    args.ranks = ranks.data();
    args.top_ids = top_ids.data();
    args.top_logprobs = top_logprobs.data();
    args.listed_logprobs = listed_logprobs.data();
    args.pool = &pool;
    nb::gil_scoped_release release;
    const ComputeTime counted;
    pool.kernels().score(args);
}

}  // namespace

void bind_sampling_score(nb::module_& module) {
    module.attr("MAX_SCORE_TOP") = quire::kMaxScoreTop;
    module.def("score", &score, "pool"_a, nb::kw_only(), "logits"_a, "targets"_a, "num_top"_a,
               "listed_starts"_a, "listed_ids"_a, "logprobs"_a, "ranks"_a, "top_ids"_a,
               "top_logprobs"_a, "listed_logprobs"_a,
               "How likely known tokens were; see quire/sampling/native_scoring.py.");
}
