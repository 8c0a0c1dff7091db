// Bindings for sampling: NumPy arrays become the pointers of ChooseArgs, and the GIL is released.
// Only dtypes and dimensions are checked here: quire/sampling/native.py has checked shapes and ids
// and made arrays contiguous.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <utility>

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

// All parameters of token choice but logits and positions: the arrays of a SampleBatch by their
// paths, as quire/sampling/native.py names them. Those of a part that no row uses are missing.
// Keeps the arrays alive.
class ChooseParams {
  public:
    explicit ChooseParams(nb::dict arrays) : arrays_(std::move(arrays)) {
        rows_ = nb::cast<Floats>(arrays_["temperature"], false).shape(0);
        args_.temperature = floats("temperature");
        args_.seeds = get<Longs>("noise_seeds");
        args_.streams = ints("noise_streams");
        args_.top_k = ints("truncation_top_k");
        args_.top_p = floats("truncation_top_p");
        args_.min_p = floats("truncation_min_p");
        args_.repetition_penalty = floats("penalties_repetition");
        args_.presence_penalty = floats("penalties_presence");
        args_.frequency_penalty = floats("penalties_frequency");
        args_.penalty_last_n = ints("penalties_last_n");
        args_.history_starts = ints("history_tokens_starts");
        args_.history = ints("history_tokens_ids");
        args_.num_prompt_tokens = ints("history_num_prompt_tokens");
        args_.bias_starts = ints("logit_bias_tokens_starts");
        args_.bias_ids = ints("logit_bias_tokens_ids");
        args_.bias_values = floats("logit_bias_values");
        args_.banned_starts = ints("banned_starts");
        args_.banned_ids = ints("banned_ids");
        args_.mask_rows = ints("masks_rows");
        args_.masks = get<Masks>("masks_words");
        args_.num_logprobs = ints("num_logprobs");
        args_.num_candidates = ints("num_candidates");
        find_rare();
        if (num_found_ != arrays_.size()) {
            throw std::invalid_argument("some arrays have names that no parameter has");
        }
    }
    ChooseParams(const ChooseParams&) = delete;
    ChooseParams& operator=(const ChooseParams&) = delete;

    size_t rows() const { return rows_; }
    const quire::ChooseArgs& args() const { return args_; }

  private:
    void find_rare() {
        const size_t num_before = num_found_;
        rare_.typical_p = floats("rare_truncation_typical_p");
        rare_.top_n_sigma = floats("rare_truncation_top_n_sigma");
        rare_.epsilon_cutoff = floats("rare_truncation_epsilon_cutoff");
        rare_.eta_cutoff = floats("rare_truncation_eta_cutoff");
        rare_.xtc_probability = floats("rare_truncation_xtc_probability");
        rare_.xtc_threshold = floats("rare_truncation_xtc_threshold");
        rare_.dry_multiplier = floats("rare_dry_multiplier");
        rare_.dry_base = floats("rare_dry_base");
        rare_.dry_allowed_length = ints("rare_dry_allowed_length");
        rare_.dry_last_n = ints("rare_dry_last_n");
        rare_.breaker_starts = ints("rare_dry_breakers_starts");
        rare_.breaker_ids = ints("rare_dry_breakers_ids");
        rare_.mirostat = ints("rare_mirostat_mode");
        rare_.mirostat_tau = floats("rare_mirostat_tau");
        rare_.mirostat_eta = floats("rare_mirostat_eta");
        rare_.mirostat_mu = floats("rare_mirostat_mu");
        rare_.sequence_rows = ints("rare_banned_sequences_rows");
        rare_.sequence_starts = ints("rare_banned_sequences_tokens_starts");
        rare_.sequence_ids = ints("rare_banned_sequences_tokens_ids");
        rare_.ngram_size = ints("rare_ngram_size");
        rare_.allowed_starts = ints("rare_allowed_starts");
        rare_.allowed_ids = ints("rare_allowed_ids");
        rare_.order = get<Longs>("rare_order");
        if (num_found_ > num_before) args_.rare = &rare_;
    }

    template <class Array>
    auto get(const char* name) -> decltype(Array().data()) {
        if (!arrays_.contains(name)) return nullptr;
        num_found_++;
        return nb::cast<Array>(arrays_[name], false).data();
    }
    const float* floats(const char* name) { return get<Floats>(name); }
    const int32_t* ints(const char* name) { return get<Ints>(name); }

    nb::dict arrays_;
    size_t rows_ = 0, num_found_ = 0;
    quire::RareArgs rare_{};
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
        .def(nb::init<nb::dict>(), "arrays"_a);
    module.def("choose", &choose, "Choose a token for each row; see quire/sampling/native.py.");
}
