"""ModelSpec: what a model is, read from its configuration files and nowhere else.

A frozen record of checked numbers: whoever holds one need not check again. Knows no file, no
weights and no program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """How rotary angles are made; `kind` is default, linear, llama3 or yarn.

    Fields that a kind does not use keep their defaults. original_max_positions: the length the
    model was trained for before its angles were scaled. attention_factor: yarn's factor on cos
    and sin where the configuration gives one, else None (it follows from factor and mscale).
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's shape and defaults.

    dtype: what the checkpoint says its weights are ("f32", "f16", "bf16"; "f32" where it says
    nothing). bos_ids, eos_ids: ids that begin and end a text, several allowed, perhaps none.
    generation_defaults: names of SamplingParams' fields (temperature, top_k, top_p, min_p,
    repetition_penalty) and max_new_tokens, only those that generation_config.json gives.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_positions: int
    rope: RopeSettings
    tied_head: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
