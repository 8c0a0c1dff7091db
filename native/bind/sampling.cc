// Bindings for sampling: NumPy arrays become the pointers of ChooseArgs, and the GIL is released.
// Only dtypes and dimensions are checked here: quire/sampling/native.py has checked shapes and ids
// and made arrays contiguous.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "compute_time.h"
#include "quire/kernels.h"
#include "quire/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntTable = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The arrays of RareParameters by name, all required. Keeps each alive until it is destroyed.
class RareArrays {
  public:
    explicit RareArrays(const nb::dict& arrays) : arrays_(arrays) {
        args_.typical_p = floats("typical_p");
        args_.top_n_sigma = floats("top_n_sigma");
        args_.epsilon_cutoff = floats("epsilon_cutoff");
        args_.eta_cutoff = floats("eta_cutoff");
        args_.xtc_probability = floats("xtc_probability");
        args_.xtc_threshold = floats("xtc_threshold");
        args_.dry_multiplier = floats("dry_multiplier");
        args_.dry_base = floats("dry_base");
        args_.dry_allowed_length = ints("dry_allowed_length");
        args_.dry_last_n = ints("dry_last_n");
        args_.ngram_size = ints("ngram_size");
        args_.mirostat = ints("mirostat");
        args_.mirostat_tau = floats("mirostat_tau");
        args_.mirostat_eta = floats("mirostat_eta");
        args_.mirostat_mu = floats("mirostat_mu");
        args_.breaker_starts = ints("breaker_starts");
        args_.breaker_ids = ints("breaker_ids");
        args_.sequence_rows = ints("sequence_rows");
        args_.sequence_starts = ints("sequence_starts");
        args_.sequence_ids = ints("sequence_ids");
        args_.allowed_starts = ints("allowed_starts");
        args_.allowed_ids = ints("allowed_ids");
    }

    const quire::RareArgs* args() const { return &args_; }

  private:
    const float* floats(const char* name) { return nb::cast<Floats>(arrays_[name], false).data(); }
    const int32_t* ints(const char* name) { return nb::cast<Ints>(arrays_[name], false).data(); }

    const nb::dict& arrays_;  // the caller's dictionary, which owns the arrays
    quire::RareArgs args_{};
};

// All sampling parameters except logits and positions. Keeps its arrays alive.
class ChooseParams {
  public:
    ChooseParams(Floats temperature, Ints top_k, Floats top_p, Floats min_p,
                 Floats repetition_penalty, Floats presence_penalty, Floats frequency_penalty, Longs seeds, Ints streams,
           Ints num_prompt_tokens, Ints num_logprobs, Ints history_starts, Ints history,
           Ints bias_starts, Ints bias_ids, Floats bias_values, Ints banned_starts,
           Ints banned_ids, std::optional<nb::dict> rare, Ints mask_rows, Masks masks,
           Ints num_candidates)
        : rows_(temperature.shape(0)),
          floats_{temperature, top_p, min_p, repetition_penalty, presence_penalty,
                  frequency_penalty, bias_values},
          ints_{top_k, streams, num_prompt_tokens, num_logprobs, history_starts, history,
                bias_starts, bias_ids, banned_starts, banned_ids, mask_rows, num_candidates},
          seeds_(seeds), masks_(masks), rare_(std::move(rare)) {
        args_.temperature = temperature.data();
        args_.top_k = top_k.data();
        args_.top_p = top_p.data();
        args_.min_p = min_p.data();
        args_.repetition_penalty = repetition_penalty.data();
        args_.presence_penalty = presence_penalty.data();
        args_.frequency_penalty = frequency_penalty.data();
        args_.seeds = seeds.data();
        args_.streams = streams.data();
        args_.num_prompt_tokens = num_prompt_tokens.data();
        args_.num_logprobs = num_logprobs.data();
        args_.history_starts = history_starts.data();
        args_.history = history.data();
        args_.bias_starts = bias_starts.data();
        args_.bias_ids = bias_ids.data();
        args_.bias_values = bias_values.data();
        args_.banned_starts = banned_starts.data();
        args_.banned_ids = banned_ids.data();
        args_.mask_rows = mask_rows.size() > 0 ? mask_rows.data() : nullptr;
        args_.masks = masks.data();
        args_.num_candidates = num_candidates.size() > 0 ? num_candidates.data() : nullptr;
        if (rare_) args_.rare = rare_arrays_.emplace(*rare_).args();
    }
    ChooseParams(const ChooseParams&) = delete;
    ChooseParams& operator=(const ChooseParams&) = delete;

    size_t rows() const { return rows_; }
    const quire::ChooseArgs& args() const { return args_; }

  private:
    size_t rows_;
    std::vector<Floats> floats_;
    std::vector<Ints> ints_;
    Longs seeds_;
    Masks masks_;
    std::optional<nb::dict> rare_;
    std::optional<RareArrays> rare_arrays_;
    quire::ChooseArgs args_{};
};

void choose(quire::Pool& pool, const ChooseParams& params, Logits logits, Ints positions,
            IntsOut token_ids, FloatsOut logprobs, IntTable top_ids, FloatTable top_logprobs,
            FloatsOut mus, IntTable candidate_ids, FloatTable candidate_scores,
            FloatTable candidate_logprobs) {
    if (logits.shape(0) != params.rows() || positions.size() != params.rows()) {
        throw std::invalid_argument("logits, positions and params differ in rows");
    }
    quire::ChooseArgs args = params.args();
    args.logits = logits.data();
    args.stride = logits.stride(0);
    args.rows = static_cast<int32_t>(logits.shape(0));
    args.vocabulary = static_cast<int32_t>(logits.shape(1));
    args.positions = positions.data();
    args.mus = mus.size() > 0 ? mus.data() : nullptr;
    args.num_top = static_cast<int32_t>(top_ids.shape(1));
    args.token_ids = token_ids.data();
    args.logprobs = logprobs.data();
    args.top_ids = top_ids.data();
    args.top_logprobs = top_logprobs.data();
    args.max_candidates = static_cast<int32_t>(candidate_ids.shape(1));
    args.candidate_ids = candidate_ids.data();
    args.candidate_scores = candidate_scores.data();
    args.candidate_logprobs = candidate_logprobs.data();
    args.pool = &pool;
    nb::gil_scoped_release release;
    const ComputeTime counted;
    pool.kernels().choose(args);
}

}  // namespace

void bind_sampling(nb::module_& module) {
    nb::class_<ChooseParams>(module, "ChooseParams",
                       "What rows ask of token choice; see quire/sampling/native.py.")
        .def(nb::init<Floats, Ints, Floats, Floats, Floats, Floats, Floats, Longs, Ints, Ints, Ints,
                      Ints, Ints, Ints, Ints, Floats, Ints, Ints, std::optional<nb::dict>, Ints,
                      Masks, Ints>(),
             nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
             "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "seeds"_a,
             "streams"_a, "num_prompt_tokens"_a, "num_logprobs"_a, "history_starts"_a, "history"_a,
             "bias_starts"_a, "bias_ids"_a, "bias_values"_a, "banned_starts"_a, "banned_ids"_a,
             "rare"_a.none(), "mask_rows"_a, "masks"_a, "num_candidates"_a);
    module.def("choose", &choose, "Choose a token for each row; see quire/sampling/native.py.");
}
