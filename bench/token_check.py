"""Check that the engines compute the same model: greedy tokens of a trained one, in f32.

The built-in model is converted like the others and gets the same continuations as token ids.
Rounding differs between engines, so single tokens may; a wrong conversion or a wrong option shows
at once. The outcome is part of the results, and nothing is reported of an engine that fails.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.checkpoints import cache_folder
from bench.peers.child import Peer
from bench.peers.convert import converted
from quire.models.model_folder import box_path
from quire.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 24
MIN_AGREEMENT = 0.75
PROMPTS = (
    "Once upon a time, there was a little dog named",
    "One day, a girl went to the park with her mom. She saw",
    "Tom and his sister wanted to play. They",
    "The sun was hot and the big bear was",
    "Lily had a red ball. She loved to",
    "In the morning the boy looked out of the window and",
)
# f32, as far as each engine supports it.
PLAIN: dict[str, dict[str, Any]] = {
    "quire": {"dtype": "f32"},
    "llama.cpp": {"-np": 1, "-c": 512, "-ctk": "f32", "-ctv": "f32", "-fa": "off"},
    "openvino": {"cache_size": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "vllm": {"dtype": "float32", "max_model_len": 512},
    "transformers": {"dtype": "float32", "batch_size": 1},
}


def trained_checkpoint() -> Path:
    """Return a copy of the built-in model, under a name that changes with its content."""
    box = box_path()
    digest = hashlib.sha256((box / "model.safetensors").read_bytes()).hexdigest()[:12]
    target = cache_folder() / f"box-{digest}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent))
        for file in box.iterdir():
            shutil.copy(file, partial / file.name)
        partial.rename(target)
    return target


def greedy_tokens(engine: str, threads: int, log: Path) -> list[list[int]]:
    """Return continuations of PROMPTS, each run alone. Raises PeerFailed, Unavailable."""
    checkpoint = trained_checkpoint()
    tokenizer = Tokenizer.load(checkpoint, vocab_size=0)
    model = converted(engine, checkpoint, "f32")
    found = []
    with Peer(engine, threads, log) as peer:
        peer.load(str(model), PLAIN[engine], limit_s=150)
        for prompt in PROMPTS:
            request = {"prompt_ids": tokenizer.encode(prompt), "output_tokens": OUTPUT_TOKENS}
            reply = peer.ask({"do": "run", "requests": [request]}, limit_s=120)
            found.append(list(reply["answers"][0]["token_ids"]))
    return found


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Return the mean share of equal leading tokens, and whether it suffices."""
    shares = []
    for mine, other in zip(ours, theirs, strict=True):
        equal = next(
            (at for at, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]),
            min(len(mine), len(other)),
        )
        shares.append(equal / max(len(mine), 1))
    mean = sum(shares) / len(shares)
    return {
        "ok": mean >= MIN_AGREEMENT,
        "leading_tokens_equal": round(mean, 4),
        "prompts": len(shares),
        "tokens_each": OUTPUT_TOKENS,
        "model": "the model in the box, f32",
    }
