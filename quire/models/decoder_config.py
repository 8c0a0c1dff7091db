"""What the config.json of decoders has in common, as a ModelSpec; families add what is their own.

A family reads its own keys first, then calls `read_decoder` with what they mean. Every key is
read, required to have the one value that is supported, or named as unable to change an answer (in
passed_over.py, and those of mixtures of experts in expert_config.py); any other key is a problem.
Knows JSON only through ConfigReader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.fp8_config import read_quantization
from quire.models.passed_over import FIXED, PASSED_OVER, SAMPLING_DEFAULTS, SAMPLING_ELSEWHERE
from quire.models.refusals import code_problem
from quire.models.rope_reader import HEAD_DIM_KEYS, check_rotated_columns, read_rope
from quire.models.spec import (
    AttentionSpec,
    EmbeddingSpec,
    ExpertsSpec,
    GenerationSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
)
from quire.program.forms import ActivationForm

MAX_POSITIONS = 2**27
MIN_POSITIONS = 2  # a token of the prompt and one of the answer
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# Fields of a record of the spec, by name.
Fields = Mapping[str, Any]
NO_FIELDS: Fields = MappingProxyType({})


class Shared(Enum):
    """Stands for what a family leaves to the shared reader, where None means something else."""

    ROTARY = "rotary"


# What most families call the numbers that some call otherwise.
SHARED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_hidden_layers": "num_hidden_layers",
        "max_position_embeddings": "max_position_embeddings",
    }
)


def read_decoder(
    config: ConfigReader,
    architecture: str,
    *,
    model_type: str,
    default_activation: str = "silu",
    default_tied: bool = False,
    default_head_dim: int = 0,
    names: Mapping[str, str] = SHARED_NAMES,
    attention: Fields = NO_FIELDS,
    mlp: Fields = NO_FIELDS,
    norm: Fields = NO_FIELDS,
    embedding: Fields = NO_FIELDS,
    head: Fields = NO_FIELDS,
    experts: ExpertsSpec | None = None,
    residual_scale: float = 1.0,
    rotary: RotarySpec | Shared | None = Shared.ROTARY,
) -> ModelSpec:
    """Return the spec from the keys that decoders share and from what the family has read.

    attention, mlp, norm, embedding, head: fields of these records that the family has read or
    always has; the keys that such fields stand for are not read here. rotary: None where positions
    are learned. default_head_dim 0 means hidden_size / num_attention_heads. names: the family's
    names of hidden_size, num_attention_heads, num_hidden_layers and max_position_embeddings.
    Raises ConfigError with every problem of the file.
    """
    _check_fixed_keys(config, architecture, model_type)
    static_activations = read_quantization(config)
    if problem := code_problem(config.take("auto_map"), architecture):
        config.note(problem)

    hidden_size = config.whole(names["hidden_size"], 1, 2**20)
    num_heads = config.whole(names["num_attention_heads"], 1, 2**16)
    vocab_size = config.whole("vocab_size", 1, 2**24)
    max_positions = config.whole(names["max_position_embeddings"], MIN_POSITIONS, MAX_POSITIONS)
    num_layers = config.whole(names["num_hidden_layers"], 1, 10_000)
    is_tied = config.flag("tie_word_embeddings", default=default_tied)
    dtype = read_dtype(config)
    generation = _read_ends(config, vocab_size)

    mlp = _complete(mlp, {"size": lambda: config.whole("intermediate_size", 1, 2**22)})
    attention = _complete(
        attention,
        {
            "num_kv_heads": lambda: _read_kv_heads(config, num_heads),
            "head_dim": lambda: _read_head_dim(config, hidden_size, num_heads, default_head_dim),
        },
    )
    norm = _complete(norm, {"eps": lambda: config.number("rms_norm_eps", 1e-12, 0.1)})
    activations = {
        "activation": lambda: config.choice("hidden_act", ACTIVATIONS, default=default_activation)
    }
    mlp = _complete(mlp, activations)
    if isinstance(rotary, Shared):
        rotary = RotarySpec(full=read_rope(config, max_positions))
    if rotary is not None:
        max_positions = _check_ropes(config, rotary, attention["head_dim"], max_positions)
    config.finish()
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        max_positions=max_positions,
        dtype=dtype,
        attention=AttentionSpec(num_heads=num_heads, **attention),
        mlp=MlpSpec(**{**mlp, "activation": ActivationForm(mlp["activation"])}),
        rotary=rotary,
        norm=NormSpec(**norm),
        embedding=EmbeddingSpec(**embedding),
        head=HeadSpec(is_tied=is_tied, **head),
        generation=generation,
        experts=experts,
        residual_scale=residual_scale,
        static_activations=static_activations,
    )


def _check_fixed_keys(config: ConfigReader, architecture: str, model_type: str) -> None:
    """Check the keys that have one supported value, and ignore those that change no answer."""
    config.pass_over(PASSED_OVER)
    config.pass_over(["architectures"])
    config.require("model_type", (model_type,), f"{architecture} needs {model_type!r}")
    for key, (allowed, reason) in FIXED.items():
        config.require(key, allowed, reason)
    for key, allowed in SAMPLING_DEFAULTS.items():
        config.require(key, allowed, SAMPLING_ELSEWHERE)


def _complete(given: Fields, readers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the given fields of a record, and those that are missing as their readers read them.

    Readers of given fields are not called: the family has read those keys.
    """
    return {**given, **{name: read() for name, read in readers.items() if name not in given}}


def read_layer_windows(
    config: ConfigReader, *, windowed: str = "sliding_attention", plain: str = "full_attention"
) -> tuple[int, ...]:
    """Return the window of each layer by `layer_types` and `sliding_window`; empty where none has
    one.

    Where layer_types is absent, the family's own rule counts: it must not call this then.
    """
    window = config.whole("sliding_window", 1, 2**27, default=0)
    num_layers = config.whole("num_hidden_layers", 1, 10_000)
    types = config.take("layer_types")
    allowed = {windowed: window, plain: 0}
    is_list = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if not is_list or len(types) != num_layers or not set(types) <= set(allowed):
        config.note(
            f"layer_types is {show(types)}; a list of num_hidden_layers {num_layers} entries, each "
            f"{windowed!r} or {plain!r}, is allowed",
            of=("num_hidden_layers",),
        )
        return ()
    if windowed in types and not window:
        config.note(f"layer_types has {windowed!r}, but there is no sliding_window; give it")
    windows = tuple(allowed[kind] for kind in types)
    return windows if any(windows) else ()


def _read_kv_heads(config: ConfigReader, num_heads: int) -> int:
    num_kv_heads = config.whole("num_key_value_heads", 1, 2**16, default=num_heads)
    if num_heads % num_kv_heads:
        config.note(
            f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads "
            f"{num_kv_heads}; each key-value head serves the same number of heads",
            of=("num_attention_heads", "num_key_value_heads"),
        )
    return num_kv_heads


def _check_ropes(
    config: ConfigReader, rotary: RotarySpec, head_dim: int, max_positions: int
) -> int:
    """Note angles that do not fit the heads; return the length that the angles stretch to."""
    rope = rotary.full
    for one in (rope, rotary.windowed):
        if one is not None:
            check_rotated_columns(config, one, head_dim)
    if rope.kind == "yarn":
        # Qwen and SmolLM give the length before scaling there, others the one after.
        scaled = min(int(rope.original_max_positions * rope.factor), MAX_POSITIONS)
        return max(max_positions, scaled)
    if rope.kind == "dynamic":
        # max_position_embeddings is the length before scaling.
        return min(int(max_positions * rope.factor), MAX_POSITIONS)
    return max_positions


def _read_head_dim(config: ConfigReader, hidden_size: int, num_heads: int, default: int) -> int:
    if config.has("head_dim"):
        head_dim = config.whole("head_dim", 2, 2**16)
    elif default:
        head_dim = default
    elif hidden_size % num_heads:
        config.note(
            f"hidden_size is {hidden_size}, not a multiple of num_attention_heads {num_heads}, "
            "and there is no head_dim; give head_dim",
            of=HEAD_DIM_KEYS,
        )
        return 2
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        config.note(f"head_dim is {head_dim}; rotary angles need an even number", of=HEAD_DIM_KEYS)
    return head_dim


def _read_ends(config: ConfigReader, vocab_size: int) -> GenerationSpec:
    eos_ids = config.ids("eos_token_id", vocab_size, past=True)
    return GenerationSpec(
        bos_ids=config.ids("bos_token_id", vocab_size, past=True),
        eos_ids=eos_ids,
        warnings=eos_warnings(config, vocab_size, eos_ids),
    )


def eos_warnings(
    config: ConfigReader, vocab_size: int, eos_ids: tuple[int, ...]
) -> tuple[str, ...]:
    """Return what to say of ids of eos_token_id that the model does not have. eos_ids: those that
    end an answer."""
    past = config.ids_past.get("eos_token_id", ())
    if not past:
        return ()
    effect = (
        f"answers end with {', '.join(map(str, eos_ids))} only"
        if eos_ids
        else "no token ends an answer: it goes on to max_tokens, a stop string or the end of the "
        "context"
    )
    return (
        f"{config.where}: eos_token_id holds {', '.join(map(str, past))}, and the model has ids "
        f"from 0 to {vocab_size - 1} (vocab_size), so {effect}; correct eos_token_id",
    )


def read_dtype(config: ConfigReader) -> str:
    """Return what the checkpoint says its weights are: "f32", "f16" or "bf16"."""
    old = config.choice("torch_dtype", DTYPES, default="")
    new = config.choice("dtype", DTYPES, default="")
    if old and new and old != new:
        config.note(f"torch_dtype says {old} and dtype says {new}; they must agree")
    return new or old or "f32"
