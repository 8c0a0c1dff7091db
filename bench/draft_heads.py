"""Acceptance of draft heads, by temperature and position, beside that of the draft model and of the
model's first layers.

    python -m bench.draft_heads
    python -m bench.draft_heads --model MODEL --heads eagle=HEAD medusa=HEADS self=4

24 different prompts at once, 128 tokens each, a fixed number of drafts in each step. It counts, and
takes no times, so it may run beside other programs. Every answer is compared with that without
drafts; a difference ends the run.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.data import outside
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.bench.machine import machine_card
from quire.engine.assembly import draft_model
from quire.engine.assembly import drafter as assembly
from quire.engine.library.llm import LLM
from quire.runner.draft_runner import DraftRunner
from quire.scheduler.speculation.plain_steps import PlainSteps
from quire.speculative.control import FixedControl
from quire.speculative.drafter import Drafter
from quire.speculative.rests import NoRests

FIRST_LAYERS = tuple(f"self={num}" for num in (1, 2, 3, 4))
# By model; "independent" is the draft model with noise of its own.
BUILT_IN = {
    "": ("draft=", "independent=", "eagle=", *FIRST_LAYERS),
    "stories260K": FIRST_LAYERS,
}
QUESTIONS = ("Write a story about a {}.", "What can a {} do?", "Write about a {} and a friend.")
TOPICS = ("cat", "dog", "boat", "tree", "bird", "frog", "girl", "king")


class Acceptance:
    """Drafts and accepted ones by their place in the draft, and rows with drafts."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.rows = 0
        self.drafted: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()

    def note(self, drafted: list[int], accepted: list[int]) -> None:
        """Count the rows of a step."""
        self.rows += len(drafted)
        for num_drafted, num_accepted in zip(drafted, accepted, strict=True):
            self.drafted.update(range(num_drafted))
            self.accepted.update(range(num_accepted))

    def cell(self) -> dict[str, Any]:
        """Return what was counted."""
        drafted, accepted = sum(self.drafted.values()), sum(self.accepted.values())
        return {
            "drafted": drafted,
            "acceptance": round(accepted / drafted, 4) if drafted else None,
            "tokens_per_row": round(1 + accepted / self.rows, 3) if self.rows else None,
            "by_position": [
                round(self.accepted[place] / self.drafted[place], 4)
                for place in sorted(self.drafted)
            ],
        }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--model", default="", help="with --heads; default: the built-in model")
    parser.add_argument(
        "--heads",
        nargs="+",
        metavar="KIND=PATH",
        help="what drafts: a value of --speculate and of --draft-model, or of --self-draft-layers; "
        "default: what there is for the built-in model, and first layers of stories260K",
    )
    parser.add_argument("--drafts", type=int, default=4, help="in each step")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--temperature", nargs="+", type=float, default=(0.0, 0.6, 1.0))
    parser.add_argument("--out", type=Path, default=Path("bench/results/draft_heads.json"))
    args = parser.parse_args()
    if args.model and not args.heads:
        parser.error("--model needs --heads: which of its drafts are counted")
    assembly.AdaptiveControl = lambda *_: FixedControl(args.drafts, NoRests())  # type: ignore
    PlainSteps.begin_if_due = lambda *_, **__: False  # type: ignore  # none is left out to be timed
    seen = Acceptance()
    Drafter.verified = _counting(Drafter.verified, seen)  # type: ignore[method-assign]
    cells = []
    heads = {args.model: tuple(args.heads)} if args.heads else BUILT_IN
    for model, given in ((model, one) for model, some in heads.items() for one in some):
        kind, settings = settings_of(given)
        path = str(outside(model)) if model == "stories260K" else model
        draft_model.DraftRunner = partial(  # type: ignore[misc]
            DraftRunner, shares_noise=kind != "independent"
        )
        with LLM(path, max_num_seqs=args.batch, **settings) as llm:
            for temperature in args.temperature:
                sampling = SamplingParams(
                    temperature=temperature, max_tokens=args.tokens, ignore_eos=True, seed=7
                )
                plain = tokens_of(llm, args.batch, sampling, is_on=False)
                seen.clear()
                if tokens_of(llm, args.batch, sampling, is_on=True) != plain:
                    raise SystemExit("drafts changed the tokens of an answer; nothing is reported")
                of_model = {"model": Path(model).name or "box", "proposer": kind}
                if kind == "self":
                    of_model["layers"] = settings["self_draft_layers"]
                cells.append(of_model | {"temperature": temperature} | seen.cell())
                print(json.dumps(cells[-1]), flush=True)
    result = {
        "bench": "draft_heads",
        "machine": machine_card(),
        "drafts": args.drafts,
        "cells": cells,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def settings_of(given: str) -> tuple[str, dict[str, Any]]:
    """Return the kind of KIND=PATH, and the engine's settings."""
    kind, _, value = given.partition("=")
    if kind == "independent":
        return kind, {"speculate": "draft"}
    settings: dict[str, Any] = {"speculate": kind}
    if kind == "self":
        settings["self_draft_layers"] = int(value)
    elif value:
        settings["draft_model"] = value
    return kind, settings


def tokens_of(
    llm: LLM, num: int, sampling: SamplingParams, *, is_on: bool
) -> list[tuple[int, ...]]:
    """Return the tokens of answers to `num` different questions, with drafts or without."""
    prompts = [
        QUESTIONS[number % len(QUESTIONS)].format(TOPICS[number // len(QUESTIONS) % len(TOPICS)])
        for number in range(num)
    ]
    terms = SchedulingParams(speculation=SpeculationParams(is_on=is_on))
    answers = llm.generate(prompts, sampling, terms=terms, progress=False)
    return [answer.outputs[0].token_ids for answer in answers]


def _counting(verified: Callable[..., None], seen: Acceptance) -> Callable[..., None]:
    def counted(self: Drafter, index: Any, drafted: Any, accepted: Any) -> None:
        seen.note(drafted.tolist(), accepted.tolist())
        verified(self, index, drafted, accepted)

    return counted


if __name__ == "__main__":
    main()
