"""Measure speculation: acceptance, and speed with drafts against without, as interleaved pairs.

ngram: a model that writes text (the built-in one by default) with prompt lookup; each prompt quotes
itself, so that answers repeat some of it. draft: the built-in model with its draft model, which
samples with the noise of the target and, to compare, with noise of its own; --fixed-drafts N drafts
N tokens in each step, whatever they cost, so that acceptance is measured. synthetic: a random
checkpoint in the shapes of a real model, with a proposer that knows the answer and is right with a
fixed probability; it shows what verification costs and gains, and says nothing about any proposer.
Both sides of a pair run in one engine on the same requests; the order alternates. Refuses to report
where tokens differ. Run:
python -m bench.speculation [--part ngram|draft|synthetic ...] [--model PATH] [--draft-model PATH]
[--shape qwen3-0.6b]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.checkpoints import SHAPES, random_checkpoint
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.base.token_table import TokenTable
from quire.bench.machine import machine_card
from quire.engine.assembly import draft_model
from quire.engine.assembly import drafts as assembly
from quire.engine.library.llm import LLM
from quire.runner.draft_runner import DraftRunner
from quire.speculative.control import FixedControl
from quire.speculative.draft_model import ModelProposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.proposer import Drafts

Int32s = NDArray[np.int32]
PARTS = ("ngram", "draft", "synthetic")
QUESTIONS = ("Write a story about a {}.", "What can a {} do?", "Write about a {} and a friend.")
TOPICS = ("cat", "dog", "boat", "tree", "bird", "frog", "girl", "king")
TEXT = "The old man had a red boat. He painted the boat blue, and the blue boat went to sea. "
OFF = SchedulingParams(speculation=SpeculationParams(is_on=False))
ON = SchedulingParams(speculation=SpeculationParams(is_on=True))


class Counts:
    """Drafts verified and accepted since `clear`, and the rows that had some."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.rows = self.drafted = self.accepted = 0

    def add(self, drafted: Int32s, accepted: Int32s) -> None:
        """Add rows of a step."""
        self.rows += len(drafted)
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())


class CountedNgrams(NgramProposer):
    """Prompt lookup that counts what became of its drafts."""

    counts = Counts()

    def verified(self, slots: NDArray[np.intp], drafted: Int32s, accepted: Int32s) -> None:
        self.counts.add(drafted, accepted)


class FixedAcceptance(CountedNgrams):
    """Proposes the known answer of each prompt; each token is right with probability `rate`."""

    rate = 0.7
    answers: dict[bytes, tuple[int, ...]] = {}  # noqa: RUF012  set by the measurement

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._drafts: dict[int, Int32s] = {}

    def begin(self, slot: int, request: Request) -> None:
        answer = np.array(self.answers.get(request.prompt_ids.tobytes(), ()), np.int32)
        rng = np.random.default_rng(len(answer) + int(request.prompt_ids.sum()))
        wrong = rng.random(len(answer)) >= self.rate
        self._drafts[slot] = np.where(wrong, (answer + 1) % 1000, answer).astype(np.int32)

    def end(self, slot: int) -> None:
        self._drafts.pop(slot, None)

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s, drafts: Drafts
    ) -> None:
        done = tokens.lengths[slots] - tokens.prompt_lengths[slots]
        for row, slot in enumerate(slots.tolist()):
            following = self._drafts[slot][done[row] : done[row] + limits[row]]
            drafts.ids[row, : len(following)] = following
            drafts.counts[row] = len(following)


class CountedModel(ModelProposer):
    """A draft model, with counts of what became of its drafts."""

    counts = Counts()

    def verified(self, slots: NDArray[np.intp], drafted: Int32s, accepted: Int32s) -> None:
        self.counts.add(drafted, accepted)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--model", default="", help="of parts ngram and draft; default: the built-in model"
    )
    parser.add_argument("--draft-model", help="of part draft; default: that of the built-in model")
    parser.add_argument("--fixed-drafts", type=int, help="of part draft; default: adaptive")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batch", nargs="+", type=int, default=(1, 4, 16, 64))
    parser.add_argument("--temperature", nargs="+", type=float, default=(0.0, 0.6, 1.0))
    parser.add_argument("--acceptance", nargs="+", type=float, default=(0.3, 0.5, 0.7, 0.9))
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of part synthetic")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("bench/results/speculation.json"))
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    result |= {"bench": "speculation", "machine": machine_card()}
    for part in args.part:
        result[part] = MEASURES[part](args)
        print(part, json.dumps(result[part], indent=1))
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def engine(model: str, proposer: type[CountedNgrams], args: argparse.Namespace) -> LLM:
    """Return an engine with this proposer."""
    assembly.NgramProposer = proposer  # type: ignore[misc]
    return LLM(
        model,
        max_num_seqs=max(args.batch),
        max_draft_tokens=args.max_draft_tokens,
        enable_prefix_caching=False,
    )


def measure_ngrams(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return cells by temperature and batch."""
    with engine(args.model, CountedNgrams, args) as llm:
        return [
            {"temperature": temperature, "batch": batch}
            | measure_pairs(
                llm,
                [f"{number}. {TEXT}{TEXT}" for number in range(batch)],
                sampling_of(args.tokens, temperature),
                args.pairs,
                CountedNgrams.counts,
            )
            for temperature in args.temperature
            for batch in args.batch
        ]


def measure_drafts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return cells by noise, temperature and batch."""
    draft_model.ModelProposer = CountedModel  # type: ignore[misc]
    if args.fixed_drafts:
        assembly.AdaptiveControl = lambda *_: FixedControl(args.fixed_drafts)  # type: ignore
    cells = []
    for noise in ("shared", "independent"):
        draft_model.DraftRunner = partial(  # type: ignore[misc]
            DraftRunner, shares_noise=noise == "shared"
        )
        with LLM(
            args.model,
            max_num_seqs=max(args.batch),
            max_draft_tokens=args.max_draft_tokens,
            enable_prefix_caching=False,
            speculate="draft",
            draft_model=args.draft_model,
        ) as llm:
            for temperature in args.temperature:
                for batch in args.batch:
                    cell = measure_pairs(
                        llm,
                        story_prompts(batch),
                        sampling_of(args.tokens, temperature),
                        args.pairs,
                        CountedModel.counts,
                    )
                    cells.append(
                        {"noise": noise, "temperature": temperature, "batch": batch} | cell
                    )
    return cells


def story_prompts(num: int) -> list[str]:
    """Return different prompts."""
    return [
        QUESTIONS[number % len(QUESTIONS)].format(TOPICS[number // len(QUESTIONS) % len(TOPICS)])
        for number in range(num)
    ]


def measure_synthetic(args: argparse.Namespace) -> dict[str, Any]:
    """Return cells by acceptance and batch, of one shape."""
    cells, sampling = [], sampling_of(args.tokens, 0.0)
    with engine(str(random_checkpoint(args.shape)), FixedAcceptance, args) as llm:
        for batch in args.batch:
            rng = np.random.default_rng(batch)
            prompts = rng.integers(5, 1000, (batch, args.prompt_tokens), np.int32)
            answers = tokens_of(llm, prompts.tolist(), sampling, OFF)
            FixedAcceptance.answers = {
                prompt.tobytes(): answer for prompt, answer in zip(prompts, answers, strict=True)
            }
            for rate in args.acceptance:
                FixedAcceptance.rate = rate
                cell = measure_pairs(
                    llm, prompts.tolist(), sampling, args.pairs, FixedAcceptance.counts
                )
                cells.append({"synthetic_acceptance": rate, "batch": batch} | cell)
    return {"shape": args.shape, "cells": cells}


def sampling_of(num_tokens: int, temperature: float) -> SamplingParams:
    """Return parameters of answers of exactly num_tokens."""
    return SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=7)


def measure_pairs(
    llm: LLM, prompts: Sequence[Any], sampling: SamplingParams, num_pairs: int, counts: Counts
) -> dict[str, Any]:
    """Return seconds of both sides of each pair, the median ratio, and acceptance."""
    plain = tokens_of(llm, prompts, sampling, OFF)  # warms up, too
    tokens_of(llm, prompts, sampling, ON)
    counts.clear()
    pairs = []
    for number in range(num_pairs):
        seconds: dict[str, float] = {}
        sides = [("off", OFF), ("on", ON)]
        for name, terms in sides if number % 2 == 0 else reversed(sides):
            seconds[name] = timed(lambda terms=terms: check(llm, prompts, sampling, terms, plain))
        pairs.append(seconds)
    return {
        "pairs": [{name: round(value, 5) for name, value in pair.items()} for pair in pairs],
        "speedup": round(statistics.median(pair["off"] / pair["on"] for pair in pairs), 3),
        "drafted": counts.drafted,
        "acceptance": round(counts.accepted / counts.drafted, 4) if counts.drafted else None,
        "tokens_per_row_with_drafts": (
            round(1 + counts.accepted / counts.rows, 3) if counts.rows else None
        ),
    }


def check(
    llm: LLM,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    terms: SchedulingParams,
    expected: list[tuple[int, ...]],
) -> None:
    """Run the requests; exit where the tokens are not those expected."""
    if tokens_of(llm, prompts, sampling, terms) != expected:
        raise SystemExit("speculation changed the tokens of an answer; nothing is reported")


def timed(run: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def tokens_of(
    llm: LLM, prompts: Sequence[Any], sampling: SamplingParams, terms: SchedulingParams
) -> list[tuple[int, ...]]:
    """Return the tokens of each answer."""
    answers = llm.generate(list(prompts), sampling, terms=terms, progress=False)
    return [answer.outputs[0].token_ids for answer in answers]


MEASURES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "ngram": measure_ngrams,
    "draft": measure_drafts,
    "synthetic": measure_synthetic,
}


if __name__ == "__main__":
    main()
