"""ModelSpec: what a model is, read from its configuration files and nowhere else.

A frozen record of checked numbers: whoever holds one need not check again. Knows no file, no
weights and no program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """How rotary angles are made; `kind` is default, linear, dynamic, llama3, yarn or longrope.

    Fields that a kind does not use keep their defaults. rotary_share: how much of a head is
    rotated, its first columns. original_max_positions: the length the model was trained for
    before its angles were scaled. attention_factor: the factor on cos and sin of yarn and
    longrope where the configuration gives one, else None (it follows from the others).
    short_factors, long_factors: longrope's divisors, one a rotated pair.
    """

    kind: str = "default"
    theta: float = 10_000.0
    rotary_share: float = 1.0
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's shape and defaults. Fields with a default say "off" by it.

    dtype: what the checkpoint says its weights are ("f32", "f16", "bf16"; "f32" where it says
    nothing). rope: None where positions are learned. bos_ids, eos_ids: ids that begin and end a
    text, several allowed, perhaps none.
    qkv_bias, output_bias: biases of attention's products in and out. windows: for each layer how
    many positions back it sees, 0 for all; empty where no layer has a window. local_rope: angles
    of layers with a window, where they differ. unrotated_layers: those without rotary angles.
    attention_scale: factor on q.k, None for head_dim ** -0.5. soft caps: 0 is none. norm_offset
    is added to the stored weights of norms. embedding_scale, residual_scale and logit_scale
    multiply the embedded tokens, what each half of a layer adds, and the logits.
    head_norms: queries and keys are normed head by head before they turn.
    norm_form: "rms" or "layer"; norm_weight, norm_bias: what layer norms have. norms_sums: the
    stream itself is normed after each half of a layer, not what goes into it. final_norm: the
    stream is normed before the head. embedding_size: width of token embeddings where it is not
    hidden_size. scores_by_layer: layer n, counted from 1, divides its attention scale by n.
    static_activations: of a checkpoint in fp8 that fixes the scales of what is multiplied.
    generation_defaults: names of SamplingParams' fields (temperature, top_k, top_p, min_p,
    repetition_penalty, presence_penalty, frequency_penalty, typical_p, epsilon_cutoff, eta_cutoff,
    no_repeat_ngram_size) and max_new_tokens, only those that generation_config.json gives.
    banned_sequences: its suppress_tokens and bad_words_ids; the last id of one may not follow the
    others.
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
    rope: RopeSettings | None
    tied_head: bool
    dtype: str
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()
    local_rope: RopeSettings | None = None
    unrotated_layers: frozenset[int] = frozenset()
    attention_scale: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    head_norms: bool = False
    norm_form: str = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norms_sums: bool = False
    final_norm: bool = True
    embedding_size: int = 0
    scores_by_layer: bool = False
    static_activations: bool = False
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    def window(self, layer: int) -> int:
        """How many positions layer `layer` sees, its own among them; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def score_scale(self, layer: int) -> float:
        """The factor on q.k in layer `layer`."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scores_by_layer else scale
