"""Map GGUF's tensor names to those of checkpoints, for each architecture.

llama.cpp's converter renames tensors, and reorders some: rows of query and key products, so that
rotation pairs adjacent rows (Llama, Granite, SmolLM 3), and GPT-2's matrices, which checkpoints
store transposed. Changes of values (Gemma's norms) are handled in quire/models. Source:
convert_hf_to_gguf.py and gguf-py (ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_WHOLE = re.compile(r"(\w+)\.(weight|bias)")
# Read with the metadata, as settings of rotary embeddings; no program has them as weights.
ROPE_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


class Order(Enum):
    """The order of a GGUF tensor's rows relative to the checkpoint's."""

    SAME = "same"
    NEIGHBOURS = "neighbours"  # per head, row 2 i is row i, row 2 i + 1 is row i + half
    TRANSPOSED = "transposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor's name in the checkpoint, and the order of its rows.

    heads: for NEIGHBOURS, the metadata key with the number of heads, without the architecture.
    """

    source: str
    order: Order = Order.SAME
    heads: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of an architecture: of the whole model, and of a layer after `layer_prefix`."""

    whole: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str = "model.layers."
    pairs_neighbours: bool = False
    transposed: frozenset[str] = frozenset()


_WHOLE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_PLAIN = Names(whole=_WHOLE_NAMES, layer={**_ATTENTION, **_GATED, **_NORMS})
_WITH_EXPERTS = Names(whole=_WHOLE_NAMES, layer={**_PLAIN.layer, **_EXPERTS})
_NEIGHBOURS = Names(whole=_WHOLE_NAMES, layer=_PLAIN.layer, pairs_neighbours=True)
_SANDWICH_NORMS = Names(
    whole=_WHOLE_NAMES,
    layer={
        **_ATTENTION,
        **_GATED,
        **_POST_NORMS,
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
    },
)

NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "llama": Names(
            whole=_WHOLE_NAMES, layer={**_PLAIN.layer, **_MIXTRAL}, pairs_neighbours=True
        ),
        "granite": _NEIGHBOURS,
        "smollm3": _NEIGHBOURS,
        "qwen2": _PLAIN,
        "qwen3": _PLAIN,
        "qwen3moe": _WITH_EXPERTS,
        "olmoe": _WITH_EXPERTS,
        "gemma": _PLAIN,
        "gemma2": _SANDWICH_NORMS,
        "gemma3": _SANDWICH_NORMS,
        "olmo2": Names(whole=_WHOLE_NAMES, layer={**_ATTENTION, **_GATED, **_POST_NORMS}),
        "phi3": Names(
            whole=_WHOLE_NAMES,
            layer={
                **_NORMS,
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            },
        ),
        "starcoder2": Names(
            whole=_WHOLE_NAMES,
            layer={**_ATTENTION, **_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "gpt2": Names(
            whole={
                "token_embd": "transformer.wte",
                "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            layer={
                "attn_norm": "ln_1",
                "attn_qkv": "attn.c_attn",
                "attn_output": "attn.c_proj",
                "ffn_norm": "ln_2",
                "ffn_up": "mlp.c_fc",
                "ffn_down": "mlp.c_proj",
            },
            layer_prefix="transformer.h.",
            transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
        ),
    }
)


def place(name: str, names: Names) -> Placed:
    """Return where the GGUF tensor `name` belongs; an unknown name is kept."""
    if whole := _WHOLE.fullmatch(name):
        known = names.whole.get(whole[1])
        return Placed(source=name if known is None else f"{known}.{whole[2]}")
    layer = _LAYER.fullmatch(name)
    known = None if layer is None else names.layer.get(layer[2])
    if layer is None or known is None:
        return Placed(source=name)
    source = f"{names.layer_prefix}{layer[1]}.{known}.{layer[3]}"
    if names.pairs_neighbours and layer[2] in ("attn_q", "attn_k"):
        heads = "attention.head_count" + ("_kv" if layer[2] == "attn_k" else "")
        return Placed(source=source, order=Order.NEIGHBOURS, heads=heads)
    if layer[2] in names.transposed and layer[3] == "weight":
        return Placed(source=source, order=Order.TRANSPOSED)
    return Placed(source=source)
