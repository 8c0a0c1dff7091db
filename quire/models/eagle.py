"""EAGLE-3 heads: a decoder layer that guesses from hidden states of three layers of the target.

The layout of SafeAILab's checkpoints: `fc` makes one vector of the three hidden states at a
position; `midlayer` reads it beside the embedding of the token after that position, each normed;
`norm` and `lm_head` give logits over a part of the vocabulary, the token ids
`arange + d2t`. The stream that leaves the layer takes the place of `fc`'s vector at positions that
the target has not computed yet. Later heads (EAGLE-3.1) norm the hidden states before `fc`, or feed
the normed stream back. Knows no file but config.json and no executor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quire.base.errors import ConfigError, ModelError
from quire.base.show import show
from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import ACTIVATIONS, MAX_POSITIONS, MIN_POSITIONS, read_dtype
from quire.models.rope_reader import HEAD_DIM_KEYS, read_rope
from quire.models.spec import (
    AttentionSpec,
    GenerationSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
)
from quire.program.builder import ProgramBuilder
from quire.program.declarations import CacheSpec, WeightPart
from quire.program.forms import ActivationForm
from quire.program.program import Program
from quire.program.tensors import DType, View

NUM_TAPS = 3
TAP_KEY = "eagle_aux_hidden_state_layer_ids"
LAYER_KEY = "transformer_layer_config"
DTYPE_KEYS = ("torch_dtype", "dtype")
# By the names in a checkpoint: those that the builder below gives.
SOURCES: Mapping[str, str] = {
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.weight": "model.embed_tokens.weight",
    **{
        f"midlayer.{name}.weight": f"model.layers.0.{name}.weight"
        for name in (
            *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    },
}
FUSE, D2T, T2D, EMBEDDING = "fc.weight", "d2t", "t2d", "embed_tokens.weight"
LM_HEAD, INPUT_NORM = "lm_head.weight", "input_norm.weight"
EACH_NORM = tuple(f"fc_norm.{tap}.weight" for tap in range(NUM_TAPS))
HIDDEN = "midlayer.hidden_norm.weight"  # of the first layer only
MAX_LAYERS = 16
# What a layer of another family than Llama may have besides.
HEAD_NORMS = tuple(f"midlayer.self_attn.{part}_norm.weight" for part in "qk")
QKV_BIASES = tuple(f"midlayer.self_attn.{part}_proj.bias" for part in "qkv")
OUTPUT_BIAS = "midlayer.self_attn.o_proj.bias"


class FuseNorm(Enum):
    """What is normed before `fc`."""

    NONE = "none"
    WHOLE = "whole"  # the three hidden states as one vector (norm_before_fc)
    EACH = "each"  # each hidden state (fc_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """layer: the shape of the layer, and how many there are, of which the first reads hidden states
    and embeddings; its vocab_size is that of the logits. vocab_size,
    target_hidden_size: of the target, 0 where config.json does not say. taps: the layers after
    which hidden states are read; empty: the usual ones. first_layer_id: the number that
    config.json has for the first of the layers. norms_residual: the layer adds to the normed
    vector, not to the vector itself. feeds_normed: the stream is fed back after `norm`."""

    layer: ModelSpec
    vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    first_layer_id: int
    norms_residual: bool
    fuse_norm: FuseNorm = FuseNorm.NONE
    feeds_normed: bool = False

    @property
    def layer_sources(self) -> dict[str, str]:
        """The tensors of the layer and its head: by the names in a checkpoint, the builder's."""
        attention = self.layer.attention
        first = [
            *(name for name in SOURCES if name.startswith("midlayer.")),
            *(HEAD_NORMS if attention.head_norms else ()),
            *(QKV_BIASES if attention.qkv_bias else ()),
            *((OUTPUT_BIAS,) if attention.output_bias else ()),
        ]
        sources = {
            **SOURCES,
            **{name: name.replace("midlayer", "model.layers.0") for name in first},
        }
        for index in range(1, self.layer.num_layers):
            later = [
                name.replace("midlayer", f"layers.{index}") for name in first if name != HIDDEN
            ]
            sources |= {name: f"model.{name}" for name in later}
        return sources

    @property
    def fuse_names(self) -> tuple[str, ...]:
        """The tensors of `fc` and what is before it, in a checkpoint as in the builder."""
        norms = {FuseNorm.NONE: (), FuseNorm.WHOLE: (INPUT_NORM,), FuseNorm.EACH: EACH_NORM}
        return (*norms[self.fuse_norm], FUSE)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers that heads read which say nothing else: the inputs of layers 2, n / 2 and
    n - 3, so the streams after the layers before them. Raises ModelError for too few layers."""
    taps = (1, num_layers // 2 - 1, num_layers - 4)
    if min(taps) < 0 or len(set(taps)) != NUM_TAPS:
        raise ModelError(
            f"the model has {num_layers} layers, too few for the usual hidden states of EAGLE-3 "
            "heads; give eagle_aux_hidden_state_layer_ids in their config.json, three different "
            "numbers: layer i is read before it is computed"
        )
    return taps


def flat_config(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the values of a config.json on one level: the layout of the speculators library has
    the layer in transformer_layer_config. where: names the file. Raises ConfigError."""
    layer = values.get(LAYER_KEY)
    is_nested = LAYER_KEY in values or "speculators_model_type" in values
    if layer is None and (not is_nested or "hidden_size" in values):
        return dict(values)
    if not isinstance(layer, dict):
        found = f"is {show(layer)}" if LAYER_KEY in values else "is missing"
        raise ConfigError(
            f"{where}: {LAYER_KEY} {found}; an object with hidden_size, num_attention_heads and "
            "what else describes the layer of the heads is needed; take config.json from where "
            "the heads were published"
        )
    top = {name: value for name, value in values.items() if value is not None}
    if not top.keys().isdisjoint(DTYPE_KEYS):
        layer = {name: value for name, value in layer.items() if name not in DTYPE_KEYS}
    return {**layer, **top}


def read_eagle(config: ConfigReader, names: Collection[str] = ()) -> EagleSpec:
    """Return the head's configuration; keys that say nothing of it are passed over.

    names: of the tensors of the checkpoint, which say what config.json may leave out. Raises
    ConfigError with every problem of the file.
    """
    hidden_size = config.whole("hidden_size", 1, 2**20)
    max_positions = config.whole("max_position_embeddings", MIN_POSITIONS, MAX_POSITIONS)
    vocab_size = config.whole("vocab_size", 1, 2**24)
    num_layers = config.whole("num_hidden_layers", 1, MAX_LAYERS, default=1)
    config.require("mlp_bias", (False,), "heads with biases in the MLP are not supported")
    spec = ModelSpec(
        architecture="EagleHead",
        vocab_size=config.whole("draft_vocab_size", 1, 2**24, default=vocab_size),
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_positions=max_positions,
        dtype=read_dtype(config),
        attention=_read_attention(config, hidden_size, num_layers, names),
        mlp=MlpSpec(
            size=config.whole("intermediate_size", 1, 2**22),
            activation=ActivationForm(config.choice("hidden_act", ACTIVATIONS, default="silu")),
        ),
        rotary=RotarySpec(full=read_rope(config, max_positions)),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-12, 0.1, default=1e-6)),
        head=HeadSpec(is_tied=False),
        generation=GenerationSpec(bos_ids=(), eos_ids=()),
    )
    section = config.take("eagle_config")
    if not isinstance(section, dict | None):
        config.note(f"eagle_config is {show(section)}; an object is allowed")
    section = section if isinstance(section, dict) else {}
    _check_section(config, section)
    taps, first_layer_id = _read_taps(config, section)
    eagle = EagleSpec(
        layer=spec,
        vocab_size=vocab_size,
        target_hidden_size=config.whole("target_hidden_size", 1, 2**20, default=0),
        taps=taps,
        first_layer_id=first_layer_id,
        norms_residual=config.flag("norm_before_residual", default=False),
        fuse_norm=_read_fuse_norm(config, section, names),
        feeds_normed=config.flag("norm_output", default=False),
    )
    config.pass_over_all()
    config.finish()
    return eagle


def _read_attention(
    config: ConfigReader, hidden_size: int, num_layers: int, names: Collection[str]
) -> AttentionSpec:
    num_heads = config.whole("num_attention_heads", 1, 2**16)
    if not config.has("head_dim") and hidden_size % num_heads:
        config.note(
            f"hidden_size {hidden_size} is no multiple of {num_heads} heads",
            of=("hidden_size", "num_attention_heads"),
        )
    num_kv_heads = config.whole("num_key_value_heads", 1, 2**16, default=num_heads)
    if num_heads % num_kv_heads:
        config.note(
            f"num_attention_heads {num_heads} is no multiple of {num_kv_heads} KV heads",
            of=("num_attention_heads", "num_key_value_heads"),
        )
    has_bias = config.flag("attention_bias", default=False)
    types = config.take("layer_types")
    types = types[:num_layers] if isinstance(types, list) else []
    windows: tuple[int, ...] = ()
    if "sliding_attention" in types:
        window = config.whole("sliding_window", 1, 2**27)
        windows = tuple(window if one == "sliding_attention" else 0 for one in types)
        windows += (0,) * (num_layers - len(windows))
    head_dim = config.whole("head_dim", 2, 2**12, default=max(hidden_size // num_heads, 1))
    if head_dim % 2:
        config.note(
            f"head_dim is {head_dim}; pairs of columns are rotated, so it must be even",
            of=("head_dim",) if config.has("head_dim") else HEAD_DIM_KEYS,
        )
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        qkv_bias=has_bias or QKV_BIASES[0] in names,
        output_bias=has_bias or OUTPUT_BIAS in names,
        head_norms=HEAD_NORMS[0] in names,
        windows=windows,
    )


def _check_section(config: ConfigReader, section: Mapping[str, Any]) -> None:
    """Note what `eagle_config` asks for and is not supported."""
    for key, allowed in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
    ):
        if section.get(key, allowed) not in (allowed, None):
            config.note(
                f"eagle_config.{key} is {show(section[key])}; {str(allowed).lower()} is supported"
            )
    if section.get("parallel_draft_step") not in (None, 0, 1):
        config.note(
            f"eagle_config.parallel_draft_step is {show(section['parallel_draft_step'])}; heads "
            "that guess several tokens in one pass are not supported"
        )


def _read_fuse_norm(
    config: ConfigReader, section: Mapping[str, Any], names: Collection[str]
) -> FuseNorm:
    is_whole = config.flag("norm_before_fc", default=INPUT_NORM in names)
    is_whole |= section.get("norm_before_fc") is True
    is_each = config.flag("fc_norm", default=EACH_NORM[0] in names)
    if is_whole and is_each:
        config.note(
            "norm_before_fc and fc_norm are both true; one of them is allowed",
            of=("norm_before_fc", "fc_norm"),
        )
    if is_whole:
        return FuseNorm.WHOLE
    return FuseNorm.EACH if is_each else FuseNorm.NONE


def _read_taps(config: ConfigReader, section: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the layers after which hidden states are read, none where config.json has none; and
    the number that the first of the layers has there.

    At its top, as vLLM has them, numbers are of layers before which they are read; in eagle_config
    (`section`), as SGLang and the checkpoints trained for it have them, of layers after which they
    are.
    """
    key, least = TAP_KEY, 1
    value = config.take(key)
    if value in (None, []) and section:
        value, least, key = section.get(key), 0, f"eagle_config.{key}"
    if value is None or value == []:
        return (), least
    fine = isinstance(value, list) and all(type(one) is int and one >= least for one in value)
    if not fine or len(set(value)) != NUM_TAPS or len(value) != NUM_TAPS:
        allowed = f"{NUM_TAPS} different numbers from {least} are allowed"
        config.note(f"{key} is {show(value)}; {allowed}")
        return (), least
    return tuple(one - least for one in value), least


def build_eagle(spec: EagleSpec, *, vocab_size: int, dtype: DType, max_positions: int) -> Program:
    """Return the program of the layers and their head: vectors [T, H] and token ids in, logits of
    `draft_vocab_size` tokens out, and the stream [T, H] as "hidden". vocab_size: of the target."""
    own = spec.layer
    p = ProgramBuilder("EagleHead", dtype=dtype)
    attention, width = own.attention, own.hidden_size
    p.cache(CacheSpec("paged", own.num_layers, attention.num_kv_heads, attention.head_dim, dtype))
    ropes = layers.declare_ropes(p, own, max_positions)
    part = WeightPart("embed", "model.embed_tokens.weight", vocab_size)
    embedded = p.embed(p.table("embed", part, width))  # [T, H]
    head = p.matrix("head", [WeightPart("head", "lm_head.weight", own.vocab_size)], width)
    both = p.space("both", 2 * width)
    names = [f"layers.0.{name}" for name in ("input_layernorm", "hidden_norm")]
    weights = [
        p.vector(name, [WeightPart("norm", f"model.{name}.weight", width)]) for name in names
    ]
    eps = own.norm.eps
    p.norm(embedded, weights[0], eps=eps, out=both.columns(0, width))
    x = p.feed(width)  # [T, H]
    if spec.norms_residual:
        x = p.norm(x, weights[1], eps=eps, dtype=DType.F32)
        p.copy(x, both.columns(width, width))
    else:
        p.norm(x, weights[1], eps=eps, out=both.columns(width, width))
    q, k, v = layers.qkv(p, own, both, 0)
    delta = layers.self_attention(p, own, (q, k, v), 0, ropes)
    h = layers.norm(p, own, x, "model.layers.0.post_attention_layernorm", delta)
    delta = layers.gated_mlp(p, own, h, 0)
    for index in range(1, own.num_layers):
        source = f"model.layers.{index}"
        h = layers.norm(p, own, x, f"{source}.input_layernorm", delta)
        delta = layers.self_attention(p, own, layers.qkv(p, own, h, index), index, ropes)
        h = layers.norm(p, own, x, f"{source}.post_attention_layernorm", delta)
        delta = layers.gated_mlp(p, own, h, index)
    if not spec.feeds_normed:
        return layers.finish(p, own, x, delta, head, max_positions=max_positions)
    x = layers.norm(p, own, p.add(x, delta), "model.norm", dtype=DType.F32)
    layers.logits(p, own, p.rounded(p.begin_head(x)), head)
    return p.build(vocab_size=own.vocab_size, max_positions=max_positions)


def build_fuse(spec: EagleSpec, *, columns: int, vocab_size: int, dtype: DType) -> Program:
    """Return the program of `fc`: hidden states of the target [T, columns] to "hidden" [T, H].

    vocab_size: of the target; batches of both programs have the same token ids.
    """
    p = ProgramBuilder("EagleFuse", dtype=dtype)
    weight = p.matrix("fc", [WeightPart("fc", FUSE, spec.layer.hidden_size)], columns)
    x = _normed(p, spec, p.feed(columns))
    p.output("hidden", p.linear(x, weight, dtype=DType.F32))
    return p.build(vocab_size=vocab_size, max_positions=1)


def _normed(p: ProgramBuilder, spec: EagleSpec, x: View) -> View:
    """Return what `fc` reads of the hidden states x [T, columns], in the program's dtype."""
    names, eps = spec.fuse_names[:-1], spec.layer.norm.eps
    if not names:
        return p.rounded(x)
    normed, width = p.space("normed", x.width), x.width // len(names)
    for at, name in enumerate(names):
        own = name.removesuffix(".weight")
        weight = p.vector(own, [WeightPart("norm", name, width)])
        columns = at * width, width
        p.norm(x.columns(*columns), weight, eps=eps, out=normed.columns(*columns))
    return normed
