"""Convert the products of a tiny checkpoint to fp8 and write it like published ones.

    folder = write_fp8_of(plain_folder, tmp_path / "fp8", kind="block")

The arithmetic is independent on purpose: the reader under test must not be checked by itself.
Kinds: "tensor", "channel" and "block", by what shares a scale; "fp8" writes `quantization_config`
as Qwen and DeepSeek do, "compressed" as compressed-tensors; is_static fixes the scales of
activations. The head and the embedding are not converted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.weights.checkpoint import open_checkpoint
from tests.safetensors_writer import encode, write_raw

Float32s = NDArray[np.float32]
KINDS = ("tensor", "channel", "block")


def value_of(code: int) -> float:
    """Return the value of a byte of e4m3, as the format defines it."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


VALUES = np.array([value_of(code) for code in range(256)], np.float32)


def codes_of(values: Float32s) -> NDArray[np.uint8]:
    """Return the nearest codes."""
    order = np.argsort(VALUES[:127])
    half = VALUES[:127][order]
    sizes = np.abs(values)
    above = np.clip(np.searchsorted(half, sizes), 1, 126)
    is_below = sizes - half[above - 1] <= half[above] - sizes
    found = order[np.where(is_below, above - 1, above)]
    return (found + np.where(values < 0, 128, 0)).astype(np.uint8)


def quantized(w: Float32s, kind: str) -> tuple[NDArray[np.uint8], Float32s, Float32s]:
    """Return codes, scales as stored, and dequantized values [N, K]."""
    rows, columns = w.shape
    size = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[kind]
    scales = np.array(
        [
            [
                np.abs(w[r : r + size[0], c : c + size[1]]).max() / 448
                for c in range(0, columns, size[1])
            ]
            for r in range(0, rows, size[0])
        ],
        np.float32,
    )
    each = np.repeat(np.repeat(scales, size[0], axis=0), size[1], axis=1)[:rows, :columns]
    codes = codes_of(w / each)
    return codes, scales, VALUES[codes] * each


# Of activations by product, 0.02 for all others: products with the same input need not agree.
INPUT_SCALES = {"k_proj": 0.03, "v_proj": 0.025, "up_proj": 0.025}


def input_scale_of(name: str) -> Float32s:
    """Return the content of a product's `input_scale`."""
    return np.array([INPUT_SCALES.get(name.split(".")[-2], 0.02)], np.float32)


def config_of(kind: str, style: str, *, is_static: bool = False) -> dict[str, Any]:
    """Return the content of config.json."""
    if style == "fp8":
        own = {"weight_block_size": [128, 128]} if kind == "block" else {}
        scheme = "static" if is_static else "dynamic"
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": scheme} | own
    shared = {"num_bits": 8, "type": "float", "symmetric": True, "observer": "minmax"}
    block = {"block_structure": [128, 128]} if kind == "block" else {}
    rows = {"strategy": "group", "group_size": 128} if kind == "block" else {"strategy": "token"}
    if is_static:
        rows = {"strategy": "tensor"}
    group = {
        "targets": ["Linear"],
        "weights": shared | block | {"strategy": kind, "dynamic": False, "group_size": None},
        "input_activations": shared | rows | {"dynamic": not is_static},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.9.0",
    }


def write_fp8_of(
    plain: Path,
    folder: Path,
    *,
    kind: str,
    style: str = "fp8",
    drop: str = "",
    is_static: bool = False,
) -> Path:
    """Write the checkpoint in `plain` with the layers' products in fp8; `drop` leaves a
    tensor out.
    """
    shutil.copytree(plain, folder)
    checkpoint = open_checkpoint(plain)
    header: dict[str, Any] = {}
    body = b""

    def add(name: str, dtype: str, shape: tuple[int, ...], raw: bytes) -> None:
        nonlocal body
        if name != drop:
            span = [len(body), len(body) + len(raw)]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": span}
            body += raw

    for name in checkpoint.names:
        values = checkpoint.read_f32(name)
        if "_proj.weight" not in name:
            add(name, "BF16", values.shape, encode(values, "bf16"))
            continue
        codes, scales, _ = quantized(values, kind)
        ending = "weight_scale_inv" if kind == "block" and style == "fp8" else "weight_scale"
        shape = (1,) if kind == "tensor" else scales.shape
        add(name, "F8_E4M3", codes.shape, codes.tobytes())
        add(name.replace("weight", ending), "F32", shape, encode(scales, "f32"))
        if kind == "tensor" or is_static:
            fixed = encode(input_scale_of(name), "f32")
            add(name.replace("weight", "input_scale"), "F32", (1,), fixed)
    write_raw(folder / "model.safetensors", json.dumps(header).encode(), body)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config_of(kind, style, is_static=is_static)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
