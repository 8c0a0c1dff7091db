"""Measure the KV cache that sequences of one prompt take, against separate keys and values.

The engine runs one request after the other on a model (default: the built-in one): four beams,
sixteen samples (n = 16), and both again with prompts of other lengths. At the end of each step,
counted in tokens of blocks: what is in use, and the sum over sequences, which is what would be in
use without sharing. The peak is reported. No times are measured: the numbers are the same on every
machine with the same kernels.

Run: python -m bench.memory groups [--model DIR] [--block-size 16] [--out ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.memory.plots import plot_groups
from quire.base.clock import Clock
from quire.base.sampling_params import SamplingParams
from quire.bench.machine import machine_card
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import Engine, assemble
from quire.engine.client.request_builder import make_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`width` sequences of `prompt` tokens and `output` more; beams or samples."""

    name: str
    width: int
    prompt: int
    output: int
    beams: bool


def shapes(long_prompt: int) -> tuple[Shape, ...]:
    """Return the measured shapes; `long_prompt` is the longest that fits."""
    beams = [("4 beams", 4, 100), ("16 beams", 16, 100), ("4 beams, long prompt", 4, long_prompt)]
    drawn = [("n = 16", 16, 100), ("n = 16, long prompt", 16, long_prompt)]
    return tuple(
        Shape(
            name=name, width=width, prompt=prompt, output=50, beams=(name, width, prompt) in beams
        )
        for name, width, prompt in (*beams, *drawn)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Peaks of one shape, in blocks and in tokens."""

    shape: Shape
    blocks: int
    blocks_unshared: int
    tokens: int
    tokens_unshared: int


def measure(engine: Engine, shape: Shape) -> Used:
    """Run one request of `shape` alone."""
    core, cache = engine.core, engine.core.scheduler._cache
    vocabulary = engine.card.vocab_size
    prompt = [(7 + 31 * at * at) % vocabulary for at in range(shape.prompt)]
    sampling = SamplingParams(
        n=shape.width,
        use_beam_search=shape.beams,
        temperature=0.0 if shape.beams else 1.0,
        seed=1,
        max_tokens=shape.output,
        ignore_eos=True,
    )
    core.add(make_requests(engine.card, prompt, sampling, request_id="r", arrival_ms=0.0))
    blocks = unshared = 0
    while core.has_work:
        core.step(lambda: 0.0)
        blocks = max(blocks, cache.num_blocks - cache.num_free)
        unshared = max(unshared, int(cache.tables.counts.sum()))
    return Used(
        shape=shape,
        blocks=blocks,
        blocks_unshared=unshared,
        tokens=blocks * cache.block_size,
        tokens_unshared=unshared * cache.block_size,
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="bench.memory groups")
    parser.add_argument("--model", default="")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("bench/results/groups.json"))
    asked = parser.parse_args(arguments)
    clock = Clock()
    config = engine_config(
        {"model": asked.model, "block_size": asked.block_size, "max_num_seqs": 16}
    )
    engine = assemble(config, clock=clock, report=_say)
    try:
        room = engine.card.max_model_len - 50
        found = [measure(engine, shape) for shape in shapes(min(1000, room))]
    finally:
        engine.core.runner.close()
    for used in found:
        share = used.tokens / used.tokens_unshared
        print(
            f"{used.shape.name}: {used.tokens} tokens' worth of blocks, {used.tokens_unshared} "
            f"without sharing ({share:.0%})"
        )
    content = {
        "bench": "memory groups",
        "machine": machine_card(),
        "model": engine.card.name,
        "block_size": asked.block_size,
        "shapes": [asdict(used) for used in found],
    }
    asked.out.write_text(json.dumps(content, indent=1) + "\n")
    plot_groups(content, asked.out.with_suffix(".png"))


def _say(what: str, **fields: object) -> None:
    print(what, fields)
