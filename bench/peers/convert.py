"""Convert checkpoints to the other engines' formats, once, in the cache directory.

llama.cpp: its own converter, then its own quantizer. OpenVINO: optimum-intel's export, with nncf
for int8 and int4. vLLM and transformers read the checkpoint as it is. An existing file or directory
is complete: conversions are written elsewhere and moved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.checkpoints import cache_folder, random_checkpoint
from bench.peers.places import environment_python, llama_source, llama_tool
from bench.peers.settings import settings_for

PRECISIONS = ("f32", "bf16", "int8", "int4", "int4-g128")
# Quire's flag for a precision; "int4-g128" has the groups of OpenVINO's int4, "int4" those of Q4_0
# (32). The head is int8 in both, as in OpenVINO.
QUIRE_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "f32": {"dtype": "f32"},
        "bf16": {"dtype": "bf16"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4-g32"},
        "int4-g128": {"quantization": "int4-g128"},
    }
)
_SAME_FILES = MappingProxyType({"int4-g128": "int4"})
# Each engine's name of the scheme for a precision; "-" if it has none.
SCHEMES = MappingProxyType(
    {
        "llama.cpp": {"f32": "f32", "bf16": "bf16", "int8": "Q8_0", "int4": "Q4_0"},
        "openvino": {
            "f32": "fp32",
            "bf16": "fp16",
            "int8": "int8",
            "int4": "int4 sym, groups of 128, embedding and head int8",
        },
        "vllm": {"f32": "float32", "bf16": "bfloat16"},
        "transformers": {"f32": "float32", "bf16": "bfloat16"},
    }
)
_OPENVINO_OPTIONS = MappingProxyType(
    {
        "f32": ["--weight-format", "fp32"],
        "bf16": ["--weight-format", "fp16"],
        "int8": ["--weight-format", "int8"],
        "int4": [
            *("--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
        ],
    }
)
# The tokenizers made here are byte-level BPE like GPT-2's; the converter knows only famous ones.
_GGUF = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


class Unavailable(Exception):
    """The engine has no scheme for the precision, or the conversion failed."""


def quire_settings(precision: str, workload: str) -> dict[str, Any]:
    """Return Quire's committed settings with those of the precision."""
    return {
        **settings_for("quire", precision=precision, workload=workload),
        **QUIRE_SETTINGS[precision],
    }


def scheme_of(engine: str, precision: str) -> str:
    """Return the engine's name of the scheme for a precision."""
    return SCHEMES[engine][_SAME_FILES.get(precision, precision)]


def converted(engine: str, checkpoint: Path, precision: str) -> Path:
    """Return what `engine` loads for a checkpoint in a precision; convert it if missing."""
    if engine == "quire":
        return checkpoint
    precision = _SAME_FILES.get(precision, precision)
    if precision not in SCHEMES[engine]:
        raise Unavailable(f"{engine} has no scheme for {precision} here")
    if engine == "llama.cpp":
        return _gguf(checkpoint, precision)
    return _openvino(checkpoint, precision) if engine == "openvino" else checkpoint


def _gguf(checkpoint: Path, precision: str) -> Path:
    scheme = SCHEMES["llama.cpp"][precision]
    target = cache_folder() / "gguf" / f"{checkpoint.name}-{scheme}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    if precision in ("f32", "bf16"):
        words = [environment_python("export"), "-c", _GGUF, llama_source(), checkpoint]
        _run([*words, "--outfile", partial, "--outtype", scheme], partial)
    else:
        plain = _gguf(checkpoint, "bf16")
        _run([llama_tool("llama-quantize"), plain, partial, scheme, "2"], partial)
    partial.rename(target)
    return target


def _openvino(checkpoint: Path, precision: str) -> Path:
    target = cache_folder() / "openvino" / f"{checkpoint.name}-{precision}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    python = environment_python("export")
    _run(
        [
            *(python.with_name("optimum-cli"), "export", "openvino", "--model", checkpoint),
            *("--task", "text-generation-with-past", *_OPENVINO_OPTIONS[precision], partial),
        ],
        partial,
    )
    partial.rename(target)
    return target


def _run(words: Sequence[str | os.PathLike[str]], product: Path) -> None:
    print(f"converting: {product.name}", file=sys.stderr, flush=True)
    kept = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [os.fspath(word) for word in words],
        env={**os.environ, **kept},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not product.exists():
        raise Unavailable(
            f"{product.name} was not made (exit code {done.returncode}): "
            f"{(done.stdout + done.stderr)[-1500:]}"
        )


def main() -> None:
    """Convert in advance what a comparison needs."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--engines", nargs="+", default=["llama.cpp", "openvino"])
    args = parser.parse_args()
    checkpoint = random_checkpoint(args.shape)
    for precision in args.precision:
        for engine in args.engines:
            print(converted(engine, checkpoint, precision), flush=True)


if __name__ == "__main__":
    main()
