"""OPT, Galactica among its checkpoints: learned positions that begin at the table's third row.

Layer norms come before each half of a layer, or (opt-350m) after its sum, where the normed sum
is what the stream goes on with; opt-350m also has token embeddings narrower than the stream.
Biases and the weights of norms can be missing. Read `build_opt` as a forward pass; T token rows,
S sample rows, H hidden width, E embedding width, D head width.
"""

from __future__ import annotations

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import ACTIVATIONS, read_decoder
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.declarations import WeightPart
from quire.program.forms import NormForm
from quire.program.program import Program
from quire.program.tensors import DType, View

SOURCE = "model.decoder."
FIRST_POSITION = 2  # row of the table that is position 0's; the two before it are never read
NORM_EPS = 1e-5  # no configuration says it

# Training, and a head kept apart from the embedding by the library that wrote the file.
PASSED_OVER = ("activation_dropout", "dropout", "init_std", "layerdrop", "output_projection")


def read_opt(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.pass_over(PASSED_OVER)
    hidden_size = config.whole("hidden_size", 1, 2**20)
    num_heads = config.whole("num_attention_heads", 1, 2**16)
    if hidden_size % num_heads:
        config.note(
            f"hidden_size is {hidden_size}, not a multiple of num_attention_heads {num_heads}; "
            "it must be",
            of=("hidden_size", "num_attention_heads"),
        )
    # Galactica's checkpoints say these; other values belong to code that is not transformers'.
    config.require("learned_embeddings", (True,), "only learned positions are supported")
    config.require("scale_embeddings", (False,), "only false is supported")
    is_biased = config.flag("enable_bias", default=True)
    is_affine = config.flag("layer_norm_elementwise_affine", default=True)
    comes_before = config.flag("do_layer_norm_before", default=True)
    drops_final_norm = config.flag("_remove_final_layer_norm", default=False)
    embedding_size = config.whole("word_embed_proj_dim", 1, 2**20, default=hidden_size)
    return read_decoder(
        config,
        architecture,
        model_type="opt",
        default_tied=True,
        attention={
            "num_kv_heads": num_heads,
            "head_dim": max(1, hidden_size // num_heads),
            "qkv_bias": is_biased,
            "output_bias": is_biased,
        },
        mlp={
            "size": config.whole("ffn_dim", 1, 2**22),
            "activation": config.choice("activation_function", ACTIVATIONS, default="relu"),
            "bias": is_biased,
        },
        norm={
            "eps": NORM_EPS,
            "form": NormForm.LAYER,
            "has_weight": is_affine,
            "has_bias": is_affine,
            "on_sums": not comes_before,
            "has_final": comes_before and not drops_final_norm,
        },
        embedding={"size": 0 if embedding_size == hidden_size else embedding_size},
        rotary=None,
    )


def build_opt(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of an OPT; activations, products and cache in `dtype`, residual in f32."""
    p = layers.begin(spec, dtype)
    x, head = _embed(p, spec)  # [T, H]
    positions = f"{SOURCE}embed_positions.weight"
    p.add(
        x,
        layers.embed_positions(p, spec, positions, spec.hidden_size, first_row=FIRST_POSITION),
    )
    for layer in range(spec.num_layers):
        source = f"{SOURCE}layers.{layer}."
        h = _norm_before(p, spec, x, f"{source}self_attn_layer_norm")
        q, k, v = layers.qkv(p, spec, h, layer, source=f"{source}self_attn.")
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        name, out = f"layers.{layer}.o", f"{source}self_attn.out_proj"
        delta = layers.product(p, spec, attended, name, out, has_bias=spec.attention.output_bias)
        x = _sum(p, spec, x, delta, f"{source}self_attn_layer_norm")
        h = _norm_before(p, spec, x, f"{source}final_layer_norm")
        up, down = f"{source}fc1", f"{source}fc2"
        delta = layers.plain_mlp(p, spec, h, layer, up=up, down=down)
        x = _sum(p, spec, x, delta, f"{source}final_layer_norm")
    h = p.begin_head(x)  # [S, H]
    h = (
        layers.norm(p, spec, h, f"{SOURCE}final_layer_norm")
        if spec.norm.has_final
        else p.rounded(h)
    )
    if spec.embedding.size:
        out_part = WeightPart("project_out", f"{SOURCE}project_out.weight", spec.embedding.size)
        h = p.linear(h, p.matrix("project_out", [out_part], spec.hidden_size))  # [S, E]
    layers.logits(p, spec, h, head)
    return p.build(vocab_size=spec.vocab_size, max_positions=max_positions)


def _embed(p: ProgramBuilder, spec: ModelSpec) -> tuple[View, str]:
    """Return embedded tokens [T, H], and the name of the head."""
    tokens, head = layers.embed(p, spec, f"{SOURCE}embed_tokens.weight")  # [T, E]
    if not spec.embedding.size:
        return tokens, head
    part = WeightPart("project_in", f"{SOURCE}project_in.weight", spec.hidden_size)
    weight = p.matrix("project_in", [part], spec.embedding.size)
    return p.linear(p.rounded(tokens), weight, dtype=DType.F32, out_name="residual"), head


def _norm_before(p: ProgramBuilder, spec: ModelSpec, x: View, source: str) -> View:
    """Return what goes into a half of a layer: the normed stream, or the stream normed at its last
    sum."""
    return p.rounded(x) if spec.norm.on_sums else layers.norm(p, spec, x, source)


def _sum(p: ProgramBuilder, spec: ModelSpec, x: View, delta: View, source: str) -> View:
    """Return the stream after a half of a layer."""
    if spec.norm.on_sums:
        return layers.norm(p, spec, x, source, delta, dtype=DType.F32)
    return p.add(x, delta)
