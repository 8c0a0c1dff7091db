"""Write GGUF files for tests: valid ones, and invalid ones with any header.

The writer is independent on purpose: the reader under test must not be checked by itself. It uses
nothing of the package. `write_gguf` takes metadata (Python values; `typed` forces a type) and
tensors that are float32 arrays with the type to store them as. `converted` does to a checkpoint's
tensors what llama.cpp's converter does: new names, rows of queries and keys paired, GPT-2's
matrices transposed, 1 added to Gemma's norms.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_quantizers import BLOCKS, quantized
from tests.safetensors_writer import encode

Float32s = NDArray[np.float32]
LETTERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
U8, U16, I32, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 5, 4, 6, 7, 8, 9, 10
PLAIN = {"F32": 0, "F16": 1, "BF16": 30}


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value of a given type; `kind` is the file's number for it."""

    kind: int
    value: Any


def string(text: str | bytes) -> bytes:
    """Encode a length and the bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """Encode a typed metadata value: type number and content."""
    if isinstance(content, Typed):
        return struct.pack("<I", content.kind) + _of(content.kind, content.value)
    if isinstance(content, list):
        kind = _kind(content[0]) if content else U32
        entries = b"".join(_of(kind, entry) for entry in content)
        return struct.pack("<IIQ", ARRAY, kind, len(content)) + entries
    return struct.pack("<I", _kind(content)) + _of(_kind(content), content)


def _kind(content: Any) -> int:
    if isinstance(content, bool):
        return BOOL
    if isinstance(content, int):
        return U32 if content >= 0 else I32
    return F32 if isinstance(content, float) else STRING


def _of(kind: int, content: Any) -> bytes:
    return string(content) if kind == STRING else struct.pack("<" + LETTERS[kind], content)


def entry(key: str | bytes, content: Any) -> bytes:
    """Encode a whole metadata entry."""
    return string(key) + value(content)


def stored(values: Float32s, kind: str) -> bytes:
    """Return the bytes of a tensor stored as `kind`."""
    if kind in PLAIN:
        return encode(values, kind.lower())
    return quantized(values, kind)


def code_of(kind: str) -> int:
    """Return the file's number for a storage type."""
    return PLAIN[kind] if kind in PLAIN else BLOCKS[kind].code


def describe(name: str, shape: Sequence[int], code: int, offset: int) -> bytes:
    """Encode a tensor's description; `shape` with the outermost first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + sizes + struct.pack("<IQ", code, offset)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[Float32s, str]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a well-formed file; tensors are float32 values and their storage type."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    entries = b"".join(entry(key, content) for key, content in metadata.items())
    described, body = b"", b""
    for name, (values, kind) in tensors.items():
        described += describe(name, values.shape, code_of(kind), len(body))
        raw = stored(values, kind)
        body += raw + bytes(-len(raw) % alignment)
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += entries + described
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(header + bytes(-len(header) % alignment) + body)
    return path


# ---- like llama.cpp's converter

_WHOLE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}  # fmt: skip
_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}  # fmt: skip
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_PAIRED = ("llama", "granite", "smollm3")
_NORMED_BEHIND = ("gemma2", "gemma3", "olmo2")
_TURNED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def gguf_name(source: str, architecture: str) -> str:
    """Return the converter's name of a checkpoint's tensor."""
    stem, _, last = source.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{last}"
    found = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", stem)
    assert found, source
    name = _LAYER[found[2]]
    if found[2] == "post_attention_layernorm" and architecture in _NORMED_BEHIND:
        name = "post_attention_norm"
    return f"blk.{found[1]}.{name}.{last}"


def paired(rows: Float32s, num_heads: int) -> Float32s:
    """Interleave rows for rotation of neighbours: row i and row i + half of a head side by side."""
    head_dim = len(rows) // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def stacked(tensors: Mapping[str, Float32s]) -> dict[str, Float32s]:
    """The tensors of a layer's experts as one [experts, rows, columns], others as they are."""
    others = {name: values for name, values in tensors.items() if not _OF_EXPERT.fullmatch(name)}
    experts: dict[str, dict[int, Float32s]] = {}
    for name in tensors.keys() - others.keys():
        found = _OF_EXPERT.fullmatch(name)
        assert found
        experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensors[name]
    return others | {
        name: np.stack([matrices[expert] for expert in sorted(matrices)])
        for name, matrices in sorted(experts.items())
    }


def converted(
    tensors: Mapping[str, Float32s], architecture: str, *, heads: int, kv_heads: int
) -> dict[str, Float32s]:
    """Return a checkpoint's tensors as the converter writes them, by their new names."""
    found: dict[str, Float32s] = {}
    for source, values in stacked(tensors).items():
        if architecture in _PAIRED and ".q_proj." in source:
            values = paired(values, heads)
        if architecture in _PAIRED and ".k_proj." in source:
            values = paired(values, kv_heads)
        if architecture == "gpt2" and source.endswith(_TURNED):
            values = np.ascontiguousarray(values.T)
        if architecture.startswith("gemma") and source.endswith("norm.weight"):
            values = values + np.float32(1)
        found[gguf_name(source, architecture)] = values
    return found
