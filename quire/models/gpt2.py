"""GPT-2 and what shares its architecture: DistilGPT2, DialoGPT, Cerebras-GPT.

Learned positions, layer norms with bias, one fused product for queries, keys and values, and a
feed-forward half without a gate. Its files hold the matrices of products the other way round,
[columns, rows], and often leave `transformer.` out of the names. Read `build_gpt2` as a forward
pass; T token rows, H hidden width, D head width.
"""

from __future__ import annotations

from types import MappingProxyType

from quire.models import layers
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import ACTIVATIONS, read_decoder
from quire.models.spec import ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.forms import NormForm
from quire.program.program import Program
from quire.program.tensors import DType, View

NAMES = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    }
)

# Training; a mask's size in old code; the summary head of other tasks; and how attention is
# computed in half precision, which here is always in f32.
PASSED_OVER = (
    "attn_pdrop",
    "embd_pdrop",
    "n_ctx",
    "output_past",
    "predict_special_tokens",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


def read_gpt2(config: ConfigReader, architecture: str) -> ModelSpec:
    """Return the spec; raises ConfigError with every problem of the file."""
    config.pass_over(PASSED_OVER)
    hidden_size = config.whole("n_embd", 1, 2**20)
    num_heads = config.whole("n_head", 1, 2**16)
    if hidden_size % num_heads:
        config.note(
            f"n_embd is {hidden_size}, not a multiple of n_head {num_heads}; it must be",
            of=("n_embd", "n_head"),
        )
    is_scaled = config.flag("scale_attn_weights", default=True)
    return read_decoder(
        config,
        architecture,
        model_type="gpt2",
        names=NAMES,
        default_tied=True,
        attention={
            "num_kv_heads": num_heads,
            "head_dim": max(1, hidden_size // num_heads),
            "qkv_bias": True,
            "output_bias": True,
            "scale": None if is_scaled else 1.0,
            "scale_by_layer": config.flag("scale_attn_by_inverse_layer_idx", default=False),
        },
        mlp={
            "size": config.whole("n_inner", 1, 2**22, default=4 * hidden_size),
            "activation": config.choice("activation_function", ACTIVATIONS, default="gelu_tanh"),
            "bias": True,
        },
        norm={
            "eps": config.number("layer_norm_epsilon", 1e-12, 0.1, default=1e-5),
            "form": NormForm.LAYER,
            "has_bias": True,
        },
        rotary=None,
    )


def build_gpt2(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of a GPT-2; activations, products and cache in `dtype`, residual in
    f32."""
    p = layers.begin(spec, dtype)
    x, head = layers.embed(p, spec, "transformer.wte.weight")  # [T, H]
    p.add(x, layers.embed_positions(p, spec, "transformer.wpe.weight", spec.hidden_size))
    delta: View | None = None
    for layer in range(spec.num_layers):
        source = f"transformer.h.{layer}."
        h = layers.norm(p, spec, x, f"{source}ln_1", delta)
        q, k, v = _qkv(p, spec, h, layer, f"{source}attn.c_attn")
        attended = layers.attend(p, spec, q, k, v, layer)  # [T, heads * D]
        delta = layers.product(
            p,
            spec,
            attended,
            f"layers.{layer}.o",
            f"{source}attn.c_proj",
            has_bias=True,
            transposed=True,
        )
        h = layers.norm(p, spec, x, f"{source}ln_2", delta)
        up, down = f"{source}mlp.c_fc", f"{source}mlp.c_proj"
        delta = layers.plain_mlp(p, spec, h, layer, up=up, down=down, transposed=True)
    return layers.finish(
        p,
        spec,
        x,
        delta,
        head,
        max_positions=max_positions,
        norm_source="transformer.ln_f",
    )


def _qkv(
    p: ProgramBuilder, spec: ModelSpec, h: View, layer: int, source: str
) -> tuple[View, View, View]:
    """Return queries, keys and values [T, H] each, from one tensor that holds all three."""
    rows = [(name, spec.hidden_size) for name in ("q", "k", "v")]
    name = f"layers.{layer}.qkv"
    weight = p.matrix(name, layers.parts_of(f"{source}.weight", rows, transposed=True), h.width)
    bias = p.vector(f"{name}.bias", layers.parts_of(f"{source}.bias", rows))
    q, k, v = p.parts(p.linear(h, weight, bias=bias, out_name="qkv"), weight)
    return q, k, v
