"""dots.llm1: a Qwen 3 with experts as DeepSeek-V3 chooses them.

Scores are sigmoids, a bias counts for the choice only, and a few experts are passed by every token.
The first layers are dense. Layers from max_window_layers on may have a window. `build_llama` is the
builder.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_decoder, read_layer_windows
from quire.models.expert_config import COUNT_KEYS, MAX_COUNT, MAX_SIZE, read_experts
from quire.models.spec import ExpertsSpec, ModelSpec
from quire.program.forms import RouterScore

DEFAULT_WINDOW = 4_096  # where sliding_window is absent; null is none


def read_dots1(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.require("pretraining_tp", (1,), "sums split as in pretraining are not supported")
    config.require("moe_layer_freq", (1,), "all layers after the first ones have experts")
    # Published files have the name of the method as that of the scores.
    config.require("scoring_func", ("noaux_tc", "sigmoid"), "scores are sigmoids")
    config.require("topk_method", ("noaux_tc",), "only noaux_tc is, by a bias and by groups")
    config.require("ep_size", (1,), "it is how training was split")
    if not config.has("num_key_value_heads"):
        config.note("num_key_value_heads is missing; it has no sensible default in a dots.llm1")
    has_bias = config.flag("attention_bias", default=False)
    return read_decoder(
        config,
        architecture,
        model_type="dots1",
        attention={
            "qkv_bias": has_bias,
            "output_bias": has_bias,
            "head_norms": True,
            "windows": _read_windows(config),
        },
        experts=_read_sigmoid_experts(config),
    )


def _read_sigmoid_experts(config: ConfigReader) -> ExpertsSpec:
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    first = config.whole("first_k_dense_replace", 0, 10_000, default=0)
    shared = config.whole("n_shared_experts", 1, MAX_COUNT)
    experts = replace(
        read_experts(
            config,
            size_key="moe_intermediate_size",
            layers=frozenset(range(first, num_layers)),
            normalized=config.flag("norm_topk_prob", default=False),
        ),
        score=RouterScore.SIGMOID,
        has_selection_bias=True,
        groups=config.whole("n_group", 1, MAX_COUNT, default=1),
        top_groups=config.whole("topk_group", 1, MAX_COUNT, default=1),
        scale=config.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
        shared_size=shared * config.whole("moe_intermediate_size", 1, MAX_SIZE),
        shared="shared_experts",
    )
    in_group, left = divmod(experts.num_experts, experts.groups)
    if left or experts.top_groups > experts.groups or experts.top_k > in_group * experts.top_groups:
        config.note(
            f"{experts.top_k} of {experts.num_experts} experts in {experts.top_groups} of "
            f"{experts.groups} groups (n_group, topk_group) cannot be chosen; groups of equal "
            "size that hold enough experts are needed",
            of=("n_group", "topk_group", "num_experts_per_tok", *COUNT_KEYS),
        )
    return experts


def _read_windows(config: ConfigReader) -> tuple[int, ...]:
    """Return the window of each layer; empty where none has one."""
    config.require("use_sliding_window", (False,), "sliding_window null says it")
    if config.has("layer_types"):
        config.pass_over(["max_window_layers"])
        return read_layer_windows(config)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    first = config.whole("max_window_layers", 0, 10_000, default=num_layers)
    if config.is_null("sliding_window"):
        config.pass_over(["sliding_window"])
        return ()
    window = config.whole("sliding_window", 1, 2**27, default=DEFAULT_WINDOW)
    windows = tuple(window if layer >= first else 0 for layer in range(num_layers))
    return windows if any(windows) else ()
