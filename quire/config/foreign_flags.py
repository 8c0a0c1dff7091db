"""What to do instead of flags that people bring along from vLLM, llama.cpp and SGLang.

Words only: none of these flags does anything here, and each is refused by name. Knows no parser.
Always holds: what a line recommends exists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType

_MODEL = "the model's folder is given without a flag: quire serve FOLDER"
_CONTEXT = "the longest prompt and output together is --max-model-len"
_MEMORY = "the KV cache's size is --kv-cache-memory, as in 2GiB"
_KV = "keys and values have one precision: --kv-cache-dtype auto, f32, bf16, int8 or fp8"
_HOST = "memory of the host for keys and values that leave a GPU's is --kv-tier-host-size"
_EAGER = "a GPU's steps are launched kernel by kernel, without graphs, by --enforce-eager"
_THREADS = "threads are set by --threads N"
_ONE_DEVICE = "one process on one device serves a model here; leave it out"
_LAYERS = "a GPU computes all layers (--executor torch) or none; leave it out"
_DRAFT = "there is no speculative decoding yet; leave it out"
_LORA = "there are no LoRA adapters yet: merge the adapter into the model's weights"
_CHUNKS = "prompts are always computed in parts, beside answers; leave it out"
_TOOLS = "calls are read out of every answer to a request with tools; leave it out"
_CODE = (
    "code that comes with a model is never run: it could do whatever you can do. Known "
    "architectures load without it, others are refused by name; leave it out"
)
_TOKENIZER = "the tokenizer is the one in the model's folder; leave it out"

INSTEAD = MappingProxyType(
    {
        "--trust-remote-code": _CODE,
        "--model": _MODEL,
        "-m": _MODEL,
        "--tokenizer": _TOKENIZER,
        "--tokenizer-mode": _TOKENIZER,
        "--max-seq-len": _CONTEXT,
        "--ctx-size": _CONTEXT,
        "--context-length": _CONTEXT,
        "-c": _CONTEXT,
        "--gpu-memory-utilization": _MEMORY,
        "--mem-fraction-static": _MEMORY,
        "--cache-type-k": _KV,
        "--cache-type-v": _KV,
        "-ctk": _KV,
        "-ctv": _KV,
        "--swap-space": _HOST,
        "--kv-offloading-size": _HOST,
        "--hicache-size": _HOST,
        "--enable-hierarchical-cache": _HOST,
        "--disable-cuda-graph": _EAGER,
        "-t": _THREADS,
        "--parallel": "how many requests are computed at once is --max-num-seqs",
        "-np": "how many requests are computed at once is --max-num-seqs",
        "--batch-size": "the most tokens of a step are --max-num-batched-tokens",
        "-b": "the most tokens of a step are --max-num-batched-tokens",
        "--alias": "the model's name in the API is --served-model-name",
        "--no-prefix-caching": "prefix caching is turned off by --no-enable-prefix-caching",
        "--tensor-parallel-size": _ONE_DEVICE,
        "-tp": _ONE_DEVICE,
        "--pipeline-parallel-size": _ONE_DEVICE,
        "--data-parallel-size": _ONE_DEVICE,
        "--n-gpu-layers": _LAYERS,
        "-ngl": _LAYERS,
        "--speculative-config": _DRAFT,
        "--model-draft": _DRAFT,
        "-md": _DRAFT,
        "--enable-lora": _LORA,
        "--lora-modules": _LORA,
        "--lora": _LORA,
        "--enable-chunked-prefill": _CHUNKS,
        "--enable-auto-tool-choice": _TOOLS,
        "--jinja": "a chat is always rendered by the model's template; leave it out",
    }
)


def instead_of_setting(name: str) -> str:
    """As `instead_of`, for a keyword of LLM, in the names that LLM takes."""
    hint = instead_of([f"--{name.replace('_', '-')}"])
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), hint)


def instead_of(words: Sequence[str]) -> str:
    """What to do instead of the foreign flags among `words`; empty where there is none."""
    hints = (INSTEAD.get(word.split("=")[0]) for word in words)
    return "".join(f"; {hint}" for hint in dict.fromkeys(hints) if hint is not None)
