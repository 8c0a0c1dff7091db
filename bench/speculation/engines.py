"""Engines and requests of the cells.

The sides of a cell differ in nothing but their drafts: none, those that the control chooses, and
fixed numbers. In a small model they share engines; else each has one. Engines map one file of
packed weights, and are started where they are first needed. What replaces parts of an engine (a
control, a synthetic proposer) is put in place where it is assembled. Answers without drafts are
computed once for all cells that share them, whatever their batch. Knows no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.checkpoints import cache_folder, random_checkpoint
from bench.data import outside
from bench.speculation.cells import SHAPE_TOKENS, Cell
from bench.speculation.proposers import FixedAcceptance
from bench.speculation.sides import PausedClock, Side, Task, answers_of
from bench.speculation.swap import Parts, SharedEngine, plain_runner
from bench.speculation.texts import (
    Forced,
    Prompts,
    edited_answers,
    other_text,
    questions,
    repeated_passages,
)
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.engine.assembly import drafter as assembly
from quire.engine.assembly.assemble import Engine, assemble
from quire.engine.assembly.sized_model import sized_model
from quire.engine.client.tokenizer_side import load_tokenizer_side
from quire.hub.cache import with_local_model
from quire.speculative.control import AdaptiveControl, FixedControl
from quire.speculative.drafter import Drafter
from quire.speculative.ngram import NgramProposer
from quire.speculative.proposer import Proposer
from quire.speculative.rests import NoRests

MAX_DRAFTS = 8
# Different prompts: of models that write text, of synthetic ones, and of repeated passages. Larger
# batches run some of them several times at once.
NUM_QUESTIONS, NUM_SYNTHETIC, NUM_PASSAGES = 64, 16, 4
# Prompts are whole blocks and a token: they are in the prefix cache, so that answers are measured.
BLOCK_TOKENS = 16
PROMPT_TOKENS = BLOCK_TOKENS + 1
PROMPT_CHARACTERS = 160  # of part small: the models have short contexts
SEED = 7
# Part history: other answers between two equal ones, and how many of them are kept.
HISTORY_ANSWERS, KEPT_ANSWERS = 8, 3
HISTORY_TOKENS = KEPT_ANSWERS * SHAPE_TOKENS
# First layers that draft: engines that measured it for themselves would differ.
SELF_LAYERS = 2
# Of each engine of a part: room for all requests, and little more. Pages that were never written
# are slow at first. In part small it holds the answers of all temperatures.
KV_BYTES = {"small": 256 << 20, "shapes": 1 << 30, "repeats": 512 << 20, "history": 128 << 20}
SHAPE_MODEL_LEN = 512


class Engines:
    """The engines of a group of cells, for sides "off", "auto", and "k4" for a fixed number: `num`
    that all sides share, or one for each side. They end with `ending`."""

    def __init__(self, cell: Cell, ending: ExitStack, num: int = 1) -> None:
        self._cell, self._ending, self._num = cell, ending, num
        self._own: dict[str, Side] = {}
        self._shared: list[SharedEngine] = []
        # Ids of a side and of a list of tasks that it has answered. Such lists are never freed.
        self._answered: set[tuple[int, int]] = set()

    @property
    def off(self) -> Side:
        """Return a side without drafts."""
        return self._without_drafts()[0]

    def ready(self, tasks: Sequence[Task], name: str) -> list[Side]:
        """Return a side on each engine. Each engine has the prompts of `tasks` in its prefix cache,
        that of a small model has answered them, and one that keeps answers has one. A side of
        shared engines is a new one, which has learned nothing."""
        if self._cell.shares_engines:
            off = self._without_drafts()
            for side in off:
                self._answer(side, tasks)
            return off if name == "off" else self._new_sides(name)
        side = self._of(name)
        self._answer(side, tasks)
        return [side]

    def _without_drafts(self) -> list[Side]:
        if not self._cell.shares_engines:
            return [self._of("off")]
        while len(self._shared) < self._num:
            self._shared.append(self._start_shared())
        return [shared.off for shared in self._shared]

    def _start_shared(self) -> SharedEngine:
        parts = self._put_in_place("auto")
        engine, clock = _started(_config(self._cell, drafts=True), self._ending)
        plain = plain_runner(engine, parts, sized_model(_config(self._cell, drafts=False)))
        if plain is not None:
            self._ending.callback(plain.close)
        return SharedEngine(engine, clock, parts, plain)

    def _new_sides(self, name: str) -> list[Side]:
        """Return a side with drafts on each shared engine."""
        self._put_in_place(name)
        return [shared.side(name, partial(self._drafter, shared.off)) for shared in self._shared]

    def _drafter(self, off: Side, proposer: Proposer) -> Drafter:
        """Return one as the assembly makes it."""
        return assembly.make_drafter(
            MAX_DRAFTS,
            num_slots=self._cell.max_num_seqs,
            vocab_size=off.card.vocab_size,
            report=Log("engine").error,
            proposer=proposer,
        )

    def _of(self, name: str) -> Side:
        """Return a side with an engine of its own."""
        if name not in self._own:
            self._own[name] = self._start(name)
        return self._own[name]

    def _answer(self, side: Side, tasks: Sequence[Task]) -> None:
        if (id(side), id(tasks)) in self._answered:
            return
        self._answered.add((id(side), id(tasks)))
        batch = self._cell.max_num_seqs
        if self._cell.is_small:
            # An engine that has these answers in its prefix cache takes shorter steps: by 8 % once.
            answers_of(side, tasks, batch)
            return
        answers_of(side, [first_token(task) for task in tasks], batch)
        if self._cell.part == "history" and side.name != "off":
            # The last task: the first ones of the measurement do not repeat it.
            answers_of(side, tasks[-1:], batch)

    def _start(self, name: str) -> Side:
        self._put_in_place(name)
        engine, clock = _started(_config(self._cell, drafts=name != "off"), self._ending)
        return Side(name=name, core=engine.core, card=engine.card, clock=clock)

    def _put_in_place(self, name: str) -> Parts:
        """Replace parts that an engine, or a side of one, is made of; return what makes its
        proposer."""
        assembly.AdaptiveControl = (  # type: ignore[misc]
            partial(_fixed_control, int(name[1:])) if name.startswith("k") else AdaptiveControl
        )
        is_synthetic = self._cell.proposer == "synthetic"
        parts = Parts(
            shares_noise=self._cell.proposer != "independent",
            prompt_lookup=FixedAcceptance if is_synthetic else NgramProposer,
        )
        parts.put_in_place()
        return parts


def _fixed_control(num_drafts: int, num_slots: int, max_drafts: int) -> FixedControl:
    """Return a control in place of the adaptive one."""
    return FixedControl(num_drafts, NoRests())


def _started(config: EngineConfig, ending: ExitStack) -> tuple[Engine, PausedClock]:
    clock = PausedClock()
    engine = assemble(config, clock=clock, report=Log("engine").error)
    core = engine.core
    ending.callback(core.runner.close)
    ending.callback(engine.close_drafts)
    if core.grammars is not None:
        ending.callback(core.grammars.close)
    while core.touch():
        pass
    clock.pause()
    return engine, clock


def _config(cell: Cell, *, drafts: bool) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": model_path(cell.model),
        "max_num_seqs": cell.max_num_seqs,
        "max_draft_tokens": MAX_DRAFTS if drafts else 0,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": KV_BYTES[cell.part],
        "pack_cache": str(cache_folder() / f"packed-{cell.model}"),
    }
    if not cell.is_small:
        settings["max_model_len"] = SHAPE_MODEL_LEN
    if drafts:
        settings |= proposer_settings(cell)
    return with_local_model(engine_config(settings))


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
    if cell.proposer == "self":
        return {"speculate": "self", "self_draft_layers": SELF_LAYERS}
    if cell.proposer == "eagle":
        return {"speculate": "eagle"}
    return {"speculate": "ngram"}


class Loads:
    """Makes the requests of cells, with their answers."""

    def __init__(self) -> None:
        self._forced: Forced | None = None
        self._answered: dict[tuple[Any, ...], list[Task]] = {}  # requests that cells share

    def of(self, cell: Cell, off: Side) -> list[Task]:
        """Return the requests of a cell with their answers, which side `off` computes if they are
        not forced. A synthetic proposer learns them."""
        key = cell.part, cell.model, cell.temperature, cell.predicts
        if key not in self._answered:
            tasks = self._tasks(cell, off.card.vocab_size)
            if not tasks[0].expected:
                tasks = answers_of(off, tasks, cell.max_num_seqs)
            if cell.predicts:
                tasks = [predicting(task, off.card.vocab_size) for task in tasks]
            self._answered[key] = tasks
        tasks = self._answered[key]
        if cell.acceptance is not None:
            FixedAcceptance.rate = cell.acceptance
            FixedAcceptance.answers = {
                np.array(task.prompt, np.int32).tobytes(): task.expected for task in tasks
            }
        return tasks

    def _tasks(self, cell: Cell, vocab_size: int) -> list[Task]:
        num_tokens = cell.num_tokens
        if cell.part == "repeats":
            return self._forced_tasks(*repeated_passages(NUM_PASSAGES, num_tokens, vocab_size))
        if cell.part == "history":  # prompts that say nothing of the answers, versions of one text
            answers = edited_answers(HISTORY_ANSWERS, num_tokens, vocab_size)
            shape = (HISTORY_ANSWERS, PROMPT_TOKENS)
            prompts = np.random.default_rng(2).integers(5, vocab_size, shape, np.int32)
            return self._forced_tasks(prompts.tolist(), answers)
        if cell.part == "shapes":
            drawn = np.random.default_rng(SEED).integers(5, 1000, (NUM_SYNTHETIC, PROMPT_TOKENS))
            return [Task(prompt=prompt, sampling=_sampling(cell)) for prompt in drawn.tolist()]
        return question_tasks(cell)

    def _forced_tasks(self, prompts: Prompts, answers: Prompts) -> list[Task]:
        """Return requests that are answered so."""
        self._forced = self._forced or Forced()
        return [
            Task(
                prompt=prompt,
                sampling=SamplingParams(
                    temperature=0.0, max_tokens=len(answer), ignore_eos=True, seed=seed
                ),
                expected=tuple(answer),
            )
            for prompt, answer, seed in zip(
                prompts, answers, self._forced.answer(prompts, answers), strict=True
            )
        ]


def first_token(task: Task) -> Task:
    """Return a request for the first token of the answer only."""
    return replace(task, sampling=replace(task.sampling, max_tokens=1), expected=task.expected[:1])


def predicting(task: Task, vocab_size: int) -> Task:
    """Return a request with a prediction that matches its answer nowhere."""
    return replace(task, prediction=other_text(task.expected, vocab_size))


def question_tasks(cell: Cell) -> list[Task]:
    """Return requests with published questions, in the tokens of a model that writes text."""
    config = with_local_model(engine_config({"model": model_path(cell.model)}))
    tokenizer = load_tokenizer_side(config.model).tokenizer
    prompts = [
        tokenizer.encode(question[:PROMPT_CHARACTERS], add_special_tokens=True)
        for question in questions(NUM_QUESTIONS)
    ]
    whole = [ids[: (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS + 1] for ids in prompts]
    return [Task(prompt=ids, sampling=_sampling(cell)) for ids in whole]


def _sampling(cell: Cell) -> SamplingParams:
    return SamplingParams(
        temperature=cell.temperature, max_tokens=cell.num_tokens, ignore_eos=True, seed=SEED
    )
