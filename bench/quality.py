"""Quality of precisions: perplexity, and divergence from f32, on stories.

Trained models, teacher-forced: each token of a text is predicted from those before it, by the
native executor, or for fp8, which it does not multiply, by the torch executor on the CPU (the extra
gpu). For each precision of weights and KV cache: perplexity, its ratio to f32's, the mean
Kullback-Leibler divergence of its next-token distributions from f32's (nats), and how often both
agree on the most likely token. stories260K reads the first stories, the built-in model those left
out of its training. Independent of engine and sampling.

Run: python -m bench.quality [--stories 40]
     [--precisions int8,fp8] [--out bench/results/quality.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.data import outside
from quire.bench.machine import machine_card
from quire.execute.executor import ExecutorClass, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.model_folder import box_path
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.quantize import precision_text, quantize
from quire.program.tensors import DType
from quire.quant.scheme import INT_SCHEMES
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint

STORY_TOKENS = 240
BLOCK_SIZE = 16
SLICE_ROWS = 64
FP8 = ("fp8", "fp8-block")
BOX_HELD_OUT_EVERY = 20  # models/tiny/corpus.py holds out every 20th story
GOALS = {("stories260K", "int8"): 1.01, ("stories260K", "int4-g32"): 1.08}
GOALS |= {("box", "int8"): 1.01, ("box", "int4-g32"): 1.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The precision that a model is computed in."""

    dtype: DType
    scheme: str = "none"
    head: str = "auto"
    kv_cache_dtype: str = "auto"
    keep: tuple[str, ...] = ()

    @property
    def executor(self) -> str:
        kept = (self.scheme, self.head, self.kv_cache_dtype)
        return "torch" if any(name.startswith("fp8") for name in kept) else "native"

    @property
    def name(self) -> str:
        head = "" if self.head == "auto" else f" head {self.head}"
        kept = "" if self.kv_cache_dtype == "auto" else f" KV {self.kv_cache_dtype}"
        rules = "".join(f" {rule}" for rule in self.keep)
        scheme = self.scheme if self.scheme != "none" else "plain"
        return f"{scheme}{head}{kept}{rules}, {self.dtype}"


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    rows: NDArray[np.float64] = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return rows


def next_logprobs(
    folder: Path, setting: Setting, texts: Sequence[Sequence[int]]
) -> tuple[str, Iterator[NDArray[np.float64]]]:
    """Return the precision's name and log-probabilities [tokens - 1, vocab] of each text."""
    plain = build_program(open_model(folder), dtype=setting.dtype, max_positions=STORY_TOKENS + 1)
    program = quantize(plain, setting.scheme, head=setting.head, keep=setting.keep)
    program = with_kv_cache_dtype(program, setting.kv_cache_dtype)
    executor = _class_of(setting)(
        program,
        open_checkpoint(folder),
        ExecutorOptions(
            limits=StepLimits(max_tokens=STORY_TOKENS, max_samples=SLICE_ROWS, max_sequences=1),
            num_threads=1,
        ),
    )
    executor.allocate_cache(STORY_TOKENS // BLOCK_SIZE + 1, BLOCK_SIZE)

    def rows() -> Iterator[NDArray[np.float64]]:
        for ids in texts:
            known = np.array(ids[:-1], np.int32)
            positions = np.arange(len(known), dtype=np.int32)
            batch = ForwardBatch(
                token_ids=known,
                positions=positions,
                rope_positions=positions,
                caches=(
                    CacheRows(
                        kv_slots=positions,
                        block_tables=np.arange(STORY_TOKENS // BLOCK_SIZE + 1, dtype=np.int32)[
                            None
                        ],
                    ),
                ),
                seq_starts=np.array([0, len(known)], np.int32),
                sample_rows=positions,
            )
            executor.run_trunk(batch)
            parts = [
                log_softmax(executor.run_head(batch, first, min(SLICE_ROWS, len(known) - first)))
                for first in range(0, len(known), SLICE_ROWS)
            ]
            yield np.concatenate(parts)
        executor.close()

    return precision_text(program), rows()


def _class_of(setting: Setting) -> ExecutorClass:
    if setting.executor == "native":
        return NativeExecutor
    import torch

    from quire.execute.gpu.executor_class import TorchExecutorClass

    return TorchExecutorClass(torch.device("cpu"), exact=False)


def measure(folder: Path, texts: Sequence[Sequence[int]], settings: Sequence[Setting]) -> Any:
    """Return a row for each setting; the first is the reference of the others."""
    _, base_rows = next_logprobs(folder, settings[0], texts)
    base = list(base_rows)
    targets = [np.array(ids[1:]) for ids in texts]
    num_tokens = sum(map(len, targets))
    results: list[dict[str, Any]] = []
    for setting in settings:
        precision, rows = next_logprobs(folder, setting, texts)
        nats = divergence = same = 0.0
        for ids, wanted, found in zip(targets, base, rows, strict=True):
            nats -= found[np.arange(len(ids)), ids].sum()
            divergence += (np.exp(wanted) * (wanted - found)).sum()
            same += (wanted.argmax(axis=1) == found.argmax(axis=1)).sum()
        perplexity = float(np.exp(nats / num_tokens))
        results.append(
            {
                "setting": setting.name,
                "precision": precision,
                "executor": setting.executor,
                "perplexity": perplexity,
                "ratio": perplexity / (results[0]["perplexity"] if results else perplexity),
                "kl_nats": float(divergence / num_tokens),
                "same_likeliest": float(same / num_tokens),
            }
        )
        print(
            f"  {setting.name:>28}: perplexity {perplexity:.4f} "
            f"({100 * (results[-1]['ratio'] - 1):+.2f} %), KL {results[-1]['kl_nats']:.5f}, "
            f"same likeliest {100 * results[-1]['same_likeliest']:.1f} %",
            flush=True,
        )
    return {"num_tokens": num_tokens, "settings": results}


def story_ids(folder: Path, stories: Sequence[str]) -> list[list[int]]:
    """Return the first STORY_TOKENS tokens of each story, with the tokenizer's prefix."""
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.encode(story)[: STORY_TOKENS + 1] for story in stories]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--stories", type=int, default=40)
    parser.add_argument("--precisions", default=",".join([*INT_SCHEMES, *FP8]))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = [Setting(dtype=DType.F32), Setting(dtype=DType.BF16)]
    for scheme in filter(None, args.precisions.split(",")):
        settings.append(Setting(dtype=DType.F32, scheme=scheme))
    settings.append(Setting(dtype=DType.F32, scheme="int4-g32", head="none"))
    settings.append(Setting(dtype=DType.F32, scheme="int4-g32", head="int4-g32"))
    settings += [Setting(dtype=DType.BF16, scheme=scheme) for scheme in ("int8", "int4-g32")]
    caches = ("bf16", "int8", "fp8")
    settings += [Setting(dtype=DType.F32, kv_cache_dtype=kept) for kept in caches]
    settings.append(Setting(dtype=DType.BF16, kv_cache_dtype="int8"))
    settings.append(Setting(dtype=DType.BF16, scheme="fp8", kv_cache_dtype="fp8"))
    stories = json.loads(outside("text/tinystories_1000.json").read_text())
    models = {
        "stories260K": (outside("stories260K"), stories[: args.stories]),
        "box": (box_path(), stories[::BOX_HELD_OUT_EVERY][: args.stories]),
    }
    outcome: dict[str, Any] = {"machine": machine_card(), "stories": args.stories}
    for name, (folder, texts) in models.items():
        print(name)
        outcome[name] = measure(folder, story_ids(folder, texts), settings)
        for row in outcome[name]["settings"]:
            goal = GOALS.get((name, row["setting"].partition(",")[0]))
            if goal is not None:
                row["goal_ratio"] = goal
                row["reaches_goal"] = row["ratio"] <= goal
    if args.out is not None:
        args.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
