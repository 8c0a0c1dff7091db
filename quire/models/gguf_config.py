"""A GGUF file's metadata as the config.json of the same model, and from that its ModelSpec.

The family's own reader makes the spec: this file only translates keys, so that a model is the same
from either. Every key of the architecture is translated, required to have the one value that is
supported, or listed as unable to change an answer; any other is a problem. What the converter did
to values counts here (Gemma's norms hold their 1 already); what it did to names and rows is in
quire/weights. Two things a checkpoint says GGUF does not: the window of a Mistral or StarCoder 2.
Source: convert_hf_to_gguf.py, gguf-py and src/models (ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.base.errors import ConfigError
from quire.base.gguf_model import GgufModel
from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_POSITIONS, MIN_POSITIONS
from quire.models.gguf_ends import TOKENIZER, read_ends
from quire.models.gguf_rope import (
    FREQUENCY_DIVISORS,
    divided,
    llama3_scaling,
    read_divisors,
    read_longrope,
    read_scaling,
)
from quire.models.gguf_sampling import read_sampling
from quire.models.gguf_values import plain_values
from quire.models.model_folder import EMBEDDING
from quire.models.refusals import gguf_kind
from quire.models.spec import ExpertsSpec, ModelSpec

Json = dict[str, Any]
ReadFamily = Callable[[Json, str], ModelSpec]  # config.json, and what errors call it

# Keys of other architectures that some files carry, and the values that change nothing.
SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "nextn_predict_layers": (0,),
        "pooling_type": (0,),
        "use_parallel_residual": (False,),
    }
)
# Why another value is not supported, where more is to be said.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "nextn_predict_layers": "layers that predict further tokens (MTP) are counted with the "
        "model's here and not read yet; take its files in safetensors, which are read without them"
    }
)
# Of a mixture of experts, and what config.json calls them.
EXPERT_COUNTS: Mapping[str, str] = MappingProxyType(
    {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
)
PASSED_OVER = ("tensor_data_layout",)
HEAD = "output.weight"
GEMMA_BIG_LAYERS = {"gemma2": 46, "gemma3": 62}  # of the 27B: its queries are scaled otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """An architecture: what transformers calls it, and what its config.json has of its own."""

    architecture: str
    read: Callable[[ConfigReader, GgufModel, Json], None]
    norm_eps: str = "attention.layer_norm_rms_epsilon"


def read_gguf(path: Path, read_family: ReadFamily) -> ModelSpec:
    """Return the spec of the model in the file `path`. Raises ConfigError with every problem.

    read_family: the registry's reader of a config.json of the architecture it is given.
    """
    model = GgufModel(path)
    named = model.metadata.get("general.architecture")
    if not isinstance(named, str) or named not in MEANINGS:
        raise ConfigError(
            f"{path}: general.architecture is {show(named)}, which is not read from GGUF"
            f"{gguf_kind(named)}; these are: {', '.join(MEANINGS)}"
        )
    meaning = MEANINGS[named]
    config = ConfigReader(plain_values(model.metadata, f"{named}."), where=f"{path}: {named}.*")
    values = _read_shape(config, model, meaning)
    meaning.read(config, model, values)
    divisors = _read_divisors(config, model, values)
    if divisors is not None and "rope_scaling" not in values:
        values["rope_scaling"] = llama3_scaling(divisors, values["rope_theta"], values["head_dim"])
    _read_tokens(config, model, values)
    for key, allowed in SWITCHED_OFF.items():
        if key in EXPERT_COUNTS and EXPERT_COUNTS[key] in values:
            continue
        reason = REASONS.get(key, f"only {show(allowed[0])} is supported")
        config.require(key, allowed, reason)
    config.pass_over(PASSED_OVER)
    config.finish()

    where = f"{path}: its metadata, read as a config.json,"
    spec = read_family(values, where)
    if divisors is not None and values.get("rope_scaling") is None:
        assert spec.rotary is not None, "it has divisors of angles"
        rope = divided(divisors, values["rope_theta"], spec.max_positions)
        spec = replace(spec, rotary=replace(spec.rotary, full=rope))
    tensors = model.tensors
    return replace(
        spec,
        norm=replace(spec.norm, offset=0.0),
        attention=replace(
            spec.attention,
            qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
        ),
        mlp=replace(spec.mlp, bias="blk.0.ffn_down.bias" in tensors),
        experts=_stacked(spec.experts),
        generation=replace(spec.generation, defaults=read_sampling(model.metadata, str(path))),
    )


def _stacked(experts: ExpertsSpec | None) -> ExpertsSpec | None:
    """Return the experts of a layer, which the converter stacks."""
    if experts is None:
        return None
    return replace(experts, tensors=replace(experts.tensors, stacked=True))


def _read_shape(config: ConfigReader, model: GgufModel, meaning: Meaning) -> Json:
    """Return what all architectures have, under the names most config.json use."""
    hidden = config.whole("embedding_length", 1, 2**20)
    heads = _one(config, "attention.head_count", 2**16)
    head_dim = config.whole("attention.key_length", 2, 2**16, default=max(2, hidden // heads))
    config.require(
        "attention.value_length", (head_dim,), f"values as wide as keys ({head_dim}) are supported"
    )
    rows = _embedding_rows(config, model)
    config.require("vocab_size", (rows,), f"{EMBEDDING} has {rows} rows; they must agree")
    return {
        "architectures": [meaning.architecture],
        "hidden_size": hidden,
        "num_hidden_layers": config.whole("block_count", 1, 10_000),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(config, "attention.head_count_kv", 2**16, default=heads),
        "head_dim": head_dim,
        "intermediate_size": _one(config, "feed_forward_length", 2**22),
        "rms_norm_eps": config.number(meaning.norm_eps, 1e-12, 0.1),
        "max_position_embeddings": config.whole("context_length", MIN_POSITIONS, MAX_POSITIONS),
        "vocab_size": rows,
        "tie_word_embeddings": HEAD not in model.tensors,
        "torch_dtype": _dtype(model),
    }


def _one(config: ConfigReader, key: str, high: int, *, default: int | None = None) -> int:
    """Return a number that some files give for each layer: it must be the same in all."""
    listed = config.take(key)
    if isinstance(listed, list) and listed and len(set(listed)) == 1:
        listed = listed[0]
        if isinstance(listed, int) and not isinstance(listed, bool) and 1 <= listed <= high:
            return listed
    if isinstance(listed, list):
        config.note(f"{key} is {show(listed)}; only layers that are all alike are supported")
        return 1
    return config.whole(key, 1, high, default=default)


def _embedding_rows(config: ConfigReader, model: GgufModel) -> int:
    stored = model.tensors.get(EMBEDDING)
    if stored is None or len(stored.shape) != 2:
        shape = "missing" if stored is None else f"of shape {list(stored.shape)}"
        config.note(f"tensor {EMBEDDING} is {shape}; a row a token is needed")
        return 1
    return stored.shape[0]


def _dtype(model: GgufModel) -> str:
    """Return what most of the matrices are, in config.json's words; quantized ones compute as
    bf16."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.end - tensor.start
    most = max(sizes, key=sizes.__getitem__, default="F32")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _read_tokens(config: ConfigReader, model: GgufModel, values: Json) -> None:
    entries = {
        key.removeprefix(TOKENIZER): value
        for key, value in model.metadata.items()
        if key.startswith(TOKENIZER)
    }
    tokens = ConfigReader(entries, where=f"{TOKENIZER}*")
    values["eos_token_id"] = list(read_ends(tokens, values["vocab_size"])) or None
    values["bos_token_id"] = list(tokens.ids("bos_token_id", values["vocab_size"])) or None
    tokens.pass_over_all()  # quire/text reads the rest
    config.absorb(tokens)


def _read_rotation(config: ConfigReader, model: GgufModel, values: Json) -> None:
    """Read the angles of those that rotate all of a head."""
    config.require(
        "rope.dimension_count",
        (values["head_dim"],),
        f"rotating a part of a head (of {values['head_dim']} columns) is not supported for this "
        "architecture",
    )
    values["rope_theta"] = config.number("rope.freq_base", 2.0, 1e15, default=10_000.0)
    scaling = read_scaling(config, model)
    if scaling is not None:
        values["rope_scaling"] = scaling


def _read_divisors(config: ConfigReader, model: GgufModel, values: Json) -> Any:
    if FREQUENCY_DIVISORS not in model.tensors:
        return None
    if "rope_theta" not in values or values.get("rope_scaling") is not None:
        config.note(f"tensor {FREQUENCY_DIVISORS} is there beside other angles; one must count")
        return None
    return read_divisors(config, model, FREQUENCY_DIVISORS, values["head_dim"] // 2)


def _read_expert_counts(config: ConfigReader, values: Json) -> None:
    for key, name in EXPERT_COUNTS.items():
        values[name] = config.whole(key, 1, 2**16)


def _read_llama(config: ConfigReader, model: GgufModel, values: Json) -> None:
    """Read a Llama, or with experts a Mixtral."""
    _read_rotation(config, model, values)
    if config.take("expert_count"):
        _read_expert_counts(config, values)
        values["architectures"] = ["MixtralForCausalLM"]


def _read_qwen3_moe(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    _read_expert_counts(config, values)
    values["moe_intermediate_size"] = config.whole("expert_feed_forward_length", 1, 2**22)
    values["norm_topk_prob"] = True  # of all that were published


def _read_olmoe(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    _read_expert_counts(config, values)


def _read_granite(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    config.require("rope.scaling.finetuned", (True,), "a Granite without angles is not supported")
    for key, name in (
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ):
        if config.has(key):
            values[name] = config.number(key, 1e-6, 1e6)
    if "attention_multiplier" not in values:  # llama.cpp's own default; config.json's is 1
        values["attention_multiplier"] = values["head_dim"] ** -0.5


def _read_gemma2(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    values["query_pre_attn_scalar"] = _gemma_scalar("gemma2", values)
    values["sliding_window"] = config.whole("attention.sliding_window", 1, 2**27, default=4_096)
    values["layer_types"] = _read_layer_types(config, values, pattern=2)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.has(key):
            values[key] = config.number(key, 1e-3, 1e6)


def _read_gemma3(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    values["query_pre_attn_scalar"] = _gemma_scalar("gemma3", values)
    values["rope_local_base_freq"] = config.number("rope.freq_base_swa", 2.0, 1e15, default=1e4)
    window = config.whole("attention.sliding_window", 0, 2**27, default=0)
    if window:
        values["sliding_window"] = window
        values["layer_types"] = _read_layer_types(config, values, pattern=6)
    else:
        config.require("attention.sliding_window_pattern", (), "it needs attention.sliding_window")
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    if config.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = config.number("final_logit_softcapping", 1e-3, 1e6)


def _gemma_scalar(named: str, values: Json) -> int:
    """query_pre_attn_scalar, which GGUF does not say: the width of a head, but for the 27B."""
    if values["num_hidden_layers"] == GEMMA_BIG_LAYERS[named]:
        return int(values["hidden_size"]) // int(values["num_attention_heads"])
    return int(values["head_dim"])


def _read_layer_types(config: ConfigReader, values: Json, *, pattern: int) -> list[str]:
    """Return which layers have a window: by a flag a layer, or all but every `pattern`th."""
    key, num_layers = "attention.sliding_window_pattern", values["num_hidden_layers"]
    listed = config.take(key)
    if isinstance(listed, list):
        flags = [flag for flag in listed if isinstance(flag, bool)]
        if len(flags) != num_layers or len(listed) != num_layers:
            config.note(f"{key} is {show(listed)}; a flag for each of {num_layers} layers, or one "
                        "number, is allowed")  # fmt: skip
            return ["full_attention"] * num_layers
    else:
        period = config.whole(key, 1, 10_000, default=pattern)
        flags = [bool((layer + 1) % period) for layer in range(num_layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def _read_olmo2(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    window = config.whole("attention.sliding_window", 0, 2**27, default=0)
    if not window:
        config.require("attention.sliding_window_pattern", (), "it needs attention.sliding_window")
        return
    values["architectures"] = ["Olmo3ForCausalLM"]
    values["sliding_window"] = window
    values["layer_types"] = _read_layer_types(config, values, pattern=4)
    config.require(
        "rope.freq_base_swa", (values["rope_theta"],), "windowed layers turn by rope.freq_base too"
    )
    # Only layers that see everything are scaled.
    plain = {"rope_type": "default", "rope_theta": values["rope_theta"]}
    values["rope_parameters"] = {
        "full_attention": {"rope_theta": values["rope_theta"], **values.pop("rope_scaling", plain)},
        "sliding_attention": plain,
    }


def _read_phi3(config: ConfigReader, model: GgufModel, values: Json) -> None:
    head_dim, max_positions = values["head_dim"], values["max_position_embeddings"]
    rotated = config.whole("rope.dimension_count", 2, head_dim, default=head_dim)
    values["partial_rotary_factor"] = rotated / head_dim
    values["rope_theta"] = config.number("rope.freq_base", 2.0, 1e15, default=10_000.0)
    read_scaling_kind = {"none": "none", "longrope": "longrope"}
    config.choice("rope.scaling.type", read_scaling_kind, default="none")
    scaling = read_longrope(config, model, rotated // 2, max_positions)
    if scaling is not None:
        values["rope_scaling"] = scaling
    window = config.whole("attention.sliding_window", 0, 2**31, default=0)
    if window:
        values["sliding_window"] = window


def _read_gpt2(config: ConfigReader, model: GgufModel, values: Json) -> None:
    renamed = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    heads = values["num_attention_heads"]
    if (
        values.pop("num_key_value_heads") != heads
        or values.pop("head_dim") * heads != (values["hidden_size"])
    ):
        config.note("a GPT-2 has as many key-value heads as heads, which together are its width")
    for name, gpt2 in renamed.items():
        values[gpt2] = values.pop(name)


def _read_starcoder2(config: ConfigReader, model: GgufModel, values: Json) -> None:
    _read_rotation(config, model, values)
    values["norm_epsilon"] = values.pop("rms_norm_eps")


LAYER_NORM_EPS = "attention.layer_norm_epsilon"
MEANINGS: Mapping[str, Meaning] = MappingProxyType(
    {
        "llama": Meaning(architecture="LlamaForCausalLM", read=_read_llama),
        "qwen2": Meaning(architecture="Qwen2ForCausalLM", read=_read_rotation),
        "qwen3": Meaning(architecture="Qwen3ForCausalLM", read=_read_rotation),
        "qwen3moe": Meaning(architecture="Qwen3MoeForCausalLM", read=_read_qwen3_moe),
        "olmoe": Meaning(architecture="OlmoeForCausalLM", read=_read_olmoe),
        "gemma": Meaning(architecture="GemmaForCausalLM", read=_read_rotation),
        "gemma2": Meaning(architecture="Gemma2ForCausalLM", read=_read_gemma2),
        "gemma3": Meaning(architecture="Gemma3ForCausalLM", read=_read_gemma3),
        "phi3": Meaning(architecture="Phi3ForCausalLM", read=_read_phi3),
        "granite": Meaning(architecture="GraniteForCausalLM", read=_read_granite),
        "smollm3": Meaning(architecture="SmolLM3ForCausalLM", read=_read_rotation),
        "olmo2": Meaning(architecture="Olmo2ForCausalLM", read=_read_olmo2),
        "gpt2": Meaning(architecture="GPT2LMHeadModel", read=_read_gpt2, norm_eps=LAYER_NORM_EPS),
        "starcoder2": Meaning(
            architecture="Starcoder2ForCausalLM", read=_read_starcoder2, norm_eps=LAYER_NORM_EPS
        ),
    }
)
