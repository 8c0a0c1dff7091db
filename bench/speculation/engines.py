"""Engines and requests of the cells.

An engine has a control that can be switched, and where it is asked for a synthetic proposer; they
are put in place of the real ones where the engine is assembled. Answers without drafts are computed
once for all proposers of a model. Knows no times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.checkpoints import random_checkpoint
from bench.data import outside
from bench.speculation.cells import SHAPE_TOKENS, WAVES, Cell
from bench.speculation.measure import OFF, Load, Tokens, tokens_of
from bench.speculation.proposers import FixedAcceptance, SwitchControl, SwitchPrices
from bench.speculation.texts import Forced, Prompts, edited_answers, questions, repeated_passages
from quire.base.sampling_params import SamplingParams
from quire.engine.assembly import draft_model, lookup
from quire.engine.assembly import drafter as assembly
from quire.engine.library.llm import LLM
from quire.runner.draft_runner import DraftRunner
from quire.scheduler.speculation import draft_rows
from quire.speculative.ngram import NgramProposer

MAX_DRAFTS = 8
PROMPT_TOKENS = 64  # of part shapes
PROMPT_CHARACTERS = 160  # of part small: the models have short contexts
SEED = 7
# Part history: other answers between two equal ones, and how many of them are kept.
HISTORY_ANSWERS, KEPT_ANSWERS = 8, 3
HISTORY_PROMPT_TOKENS = 16
HISTORY_TOKENS = KEPT_ANSWERS * SHAPE_TOKENS[1]


@contextmanager
def engine_of(cell: Cell) -> Iterator[LLM]:
    """Yield the engine of a cell."""
    assembly.AdaptiveControl = SwitchControl  # type: ignore[misc]
    draft_rows.DraftPrices = SwitchPrices  # type: ignore[misc]
    lookup.NgramProposer = (  # type: ignore[misc]
        FixedAcceptance if cell.proposer == "synthetic" else NgramProposer
    )
    draft_model.DraftRunner = partial(  # type: ignore[misc]
        DraftRunner, shares_noise=cell.proposer != "independent"
    )
    with LLM(
        model_path(cell.model),
        max_num_seqs=cell.max_num_seqs,
        max_draft_tokens=MAX_DRAFTS,
        enable_prefix_caching=cell.part != "small",  # of shapes only answers are measured
        **proposer_settings(cell),
    ) as llm:
        yield llm


def model_path(model: str) -> str:
    """Return what the engine loads: nothing for the built-in model, a checkpoint for a shape."""
    if model == "box":
        return ""
    return str(outside(model) if model == "stories260K" else random_checkpoint(model))


def proposer_settings(cell: Cell) -> Mapping[str, Any]:
    """Return the settings that select the cell's proposer."""
    if cell.proposer in ("draft", "independent"):
        draft = None if cell.model == "box" else str(outside("llama2xs"))
        return {"speculate": "draft", "draft_model": draft}
    if cell.proposer == "history":
        return {"speculate": "ngram", "speculate_history_tokens": HISTORY_TOKENS}
    return {"speculate": "ngram"}


class Loads:
    """Makes the requests of cells."""

    def __init__(self) -> None:
        self._forced: Forced | None = None
        self._answers: dict[tuple[Any, ...], Tokens] = {}  # of requests that cells share

    def of(self, cell: Cell, llm: LLM) -> Load:
        """Return the requests of a cell; a synthetic proposer learns their answers."""
        sampling = SamplingParams(
            temperature=cell.temperature,
            max_tokens=cell.num_tokens,
            ignore_eos=True,
            seed=SEED,
        )
        if cell.part == "repeats":
            return self._repeats(cell, llm)
        if cell.part == "history":
            return self._history(cell, llm)
        if cell.part == "shapes":
            return self._synthetic(cell, llm, sampling)
        num = WAVES * cell.batch
        prompts = [text[:PROMPT_CHARACTERS] for text in questions(num)]
        return self._answered(cell, llm, Load(prompts=prompts, sampling=[sampling] * num))

    def _answered(self, cell: Cell, llm: LLM, load: Load) -> Load:
        """Return `load` with its answers, which are the same whatever the proposer."""
        key = cell.part, cell.model, cell.batch, cell.temperature
        if key not in self._answers:
            self._answers[key] = tokens_of(llm, load, OFF)
        return replace(load, expected=self._answers[key])

    def _repeats(self, cell: Cell, llm: LLM) -> Load:
        made = repeated_passages(cell.batch, cell.num_tokens, llm.card.vocab_size)
        return Load(prompts=made[0], sampling=self._forced_sampling(*made))

    def _history(self, cell: Cell, llm: LLM) -> Load:
        """Return requests with prompts that say nothing of their answers, which are versions of one
        text; as many as are kept are found at a time."""
        num_tokens, vocab_size = cell.num_tokens, llm.card.vocab_size
        answers = edited_answers(HISTORY_ANSWERS, num_tokens, vocab_size)
        shape = (HISTORY_ANSWERS, HISTORY_PROMPT_TOKENS)
        prompts = np.random.default_rng(2).integers(5, vocab_size, shape, np.int32).tolist()
        loads = [
            Load(prompts=[prompt], sampling=[sampling])
            for prompt, sampling in zip(
                prompts, self._forced_sampling(prompts, answers), strict=True
            )
        ]
        return replace(loads[0], others=loads[1:])

    def _forced_sampling(self, prompts: Prompts, answers: Prompts) -> list[SamplingParams]:
        """Return parameters of requests that are answered so."""
        self._forced = self._forced or Forced()
        return [
            SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True, seed=seed)
            for seed, answer in zip(self._forced.answer(prompts, answers), answers, strict=True)
        ]

    def _synthetic(self, cell: Cell, llm: LLM, sampling: SamplingParams) -> Load:
        assert cell.acceptance is not None, "the proposer is synthetic"
        rng = np.random.default_rng(cell.batch)
        prompts = rng.integers(5, 1000, (cell.batch, PROMPT_TOKENS), np.int32)
        load = Load(prompts=prompts.tolist(), sampling=[sampling] * cell.batch)
        load = self._answered(cell, llm, load)
        assert load.expected is not None, "it is answered"
        FixedAcceptance.rate = cell.acceptance
        FixedAcceptance.answers = {
            prompt.tobytes(): answer for prompt, answer in zip(prompts, load.expected, strict=True)
        }
        return load
