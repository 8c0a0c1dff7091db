"""ModelSpec: what a model is, read from its configuration files.

Frozen records of checked numbers: a reader of config.json checks them once. Knows no file and no
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.program.forms import ActivationForm, NormForm, RouterScore


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
class AttentionSpec:
    """Heads, biases, windows and scales of attention.

    qkv_bias, output_bias: biases of the products in and out. head_norms: queries and keys are
    normed head by head before they are rotated. windows: for each layer how many positions it
    attends to, its own included, 0 for all; empty where no layer has a window. scale: factor on
    q.k, None for head_dim ** -0.5; scale_by_layer divides it by n in layer n, counted from 1.
    soft_cap: 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    windows: tuple[int, ...] = ()
    scale: float | None = None
    scale_by_layer: bool = False
    soft_cap: float = 0.0

    @property
    def query_size(self) -> int:
        """Columns of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all keys, or of all values, of a token."""
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int:
        """Return positions that layer `layer` attends to, its own included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def score_scale(self, layer: int) -> float:
        """Return the factor on q.k in layer `layer`."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale / (layer + 1) if self.scale_by_layer else scale


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """The feed-forward half: inner width, activation function, biases of its products."""

    size: int
    activation: ActivationForm
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """Names of the tensors of a layer's experts, after "model.layers.N.".

    block: what the router and the experts are in. router: in it, without ".weight" (most files
    call the router "gate"); selection_bias: the whole name of its bias, which only counts for the
    choice. gate_proj, up_proj, down_proj: the products of expert E, `block`.experts.E.NAME.weight.
    stacked: each of them is one tensor `block`.experts.NAME.weight [experts, rows, columns]
    instead. Tensors with gate and up in one, or [experts, columns, rows], have no names here yet.
    """

    block: str = "mlp"
    router: str = "gate"
    selection_bias: str = "gate.e_score_correction_bias"
    gate_proj: str = "gate_proj"
    up_proj: str = "up_proj"
    down_proj: str = "down_proj"
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of the feed-forward half, where `layers` says so.

    size: inner width of an expert (moe_intermediate_size); top_k of num_experts are chosen per
    token. score: see Route in quire/program/expert_ops.py. normalized: the weights of the chosen
    experts are divided by their sum (norm_topk_prob). has_selection_bias, groups, top_groups
    (n_group, topk_group), scale: as DeepSeek-V3 chooses. shared_size: inner width of the shared
    expert, which every token passes, 0 for none; has_shared_gate: its output is multiplied by the
    sigmoid of a gate. shared: the name of its tensors.
    """

    layers: frozenset[int]
    num_experts: int
    top_k: int
    size: int
    score: RouterScore = RouterScore.SOFTMAX
    normalized: bool = False
    scale: float = 1.0
    has_selection_bias: bool = False
    groups: int = 0
    top_groups: int = 0
    shared_size: int = 0
    has_shared_gate: bool = False
    shared: str = "shared_expert"
    tensors: ExpertTensors = ExpertTensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary angles by layer. windowed: of layers with a window, None where they have those of all
    layers. unrotated_layers: layers without rotary angles."""

    full: RopeSettings
    windowed: RopeSettings | None = None
    unrotated_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The norms of layers and of the stream before the head.

    offset is added to stored weights. on_sums: the stream itself is normed after each half of a
    layer, instead of that half's input. has_final: the stream is normed before the head.
    """

    eps: float
    form: NormForm = NormForm.RMS
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0
    on_sums: bool = False
    has_final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """Token embeddings. size: their width, 0 for hidden_size; scale multiplies them."""

    size: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """The product that gives the logits. is_tied: its weight is the embedding's. scale multiplies
    the logits; soft_cap bounds them, 0 for none."""

    is_tied: bool
    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What begins and ends a text, and the model's own defaults of generation.

    bos_ids, eos_ids: several are allowed, perhaps none. defaults: by the names of SamplingParams'
    fields (temperature, top_k, top_p and others) and max_new_tokens, only those that
    generation_config.json gives, or the metadata of a GGUF file. banned_sequences: its
    suppress_tokens and bad_words_ids; the last id of one may not follow the others. warnings: what
    of the files has no effect, each with the file's name.
    """

    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, float | int | tuple[str, ...]] = field(default_factory=dict)
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's shape and defaults.

    dtype: of the checkpoint's weights ("f32", "f16", "bf16"; "f32" where it does not say).
    rotary: None where positions are learned. experts: None for a dense model. residual_scale
    multiplies what each half of a layer adds to the stream. static_activations: the checkpoint is
    in fp8 and fixes the scales of activations. has_head: False for a decoder that was saved alone,
    which has embeddings and no logits.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    dtype: str
    attention: AttentionSpec
    mlp: MlpSpec
    rotary: RotarySpec | None
    norm: NormSpec
    head: HeadSpec
    generation: GenerationSpec
    embedding: EmbeddingSpec = EmbeddingSpec()
    experts: ExpertsSpec | None = None
    residual_scale: float = 1.0
    static_activations: bool = False
    has_head: bool = True
