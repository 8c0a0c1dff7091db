"""The sides of a cell, which differ in their drafts only, and streams of requests.

A side is an engine of its own (its scheduler, control, prices and KV cache) over the same packed
weights, or has one with other sides by turns, with a control and prices of its own (swap.py). It
is stepped by the caller, as if it were alone: its clock stands still while others compute, and a
control learns from its own steps only.
Always holds: a step's time has no work of other sides and no checks; a token other than the
expected one ends the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from quire.base.clock import Clock
from quire.base.engine_stats import EngineStats
from quire.base.records import Request, StepOutputs
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.base.speculation_params import SpeculationParams
from quire.engine.client.request_builder import make_requests
from quire.engine.model_card import ModelCard

# Draws when the first requests end.
SEED = 11
# Steps in turn that may yield nothing.
MAX_IDLE_STEPS = 1000


class PausedClock(Clock):
    """Stands still but between `resume` and `pause`."""

    def __init__(self) -> None:
        self._at_ms = self._since_ms = super().now_ms()
        self._runs = True  # while the engine starts

    def now_ms(self) -> float:
        """See Clock."""
        return self._at_ms + (super().now_ms() - self._since_ms if self._runs else 0.0)

    def resume(self) -> None:
        """Go on."""
        self._since_ms, self._runs = super().now_ms(), True

    def pause(self) -> None:
        """Stand still."""
        self._at_ms, self._runs = self.now_ms(), False


class Core(Protocol):
    """What a side needs of an EngineCore."""

    @property
    def has_work(self) -> bool: ...

    def add(self, requests: Sequence[Request]) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> Any: ...

    def step(self, now_ms: Callable[[], float]) -> StepOutputs | None: ...

    def stats(self) -> EngineStats: ...


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An engine. name: "off", "auto", or "k" and a fixed number of drafts. attach: called while
    nothing runs, before the side has a turn."""

    name: str
    core: Core
    card: ModelCard
    clock: PausedClock
    attach: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request and its answer without drafts; (): not known yet. prediction: which sides with
    drafts send, to have drafts of it alone; (): none."""

    prompt: Sequence[int]
    sampling: SamplingParams
    expected: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()


class Drafted:
    """Drafts of a side so far, by its counters."""

    def __init__(self, stats: EngineStats) -> None:
        self.rows = stats.draft_rows_total
        self.drafts = sum(stats.draft_tokens_total)
        self.accepted = sum(stats.accepted_draft_tokens_total)

    def since(self, before: Drafted) -> tuple[int, int, int]:
        """Return rows with drafts, drafts, and those accepted."""
        drafts, accepted = self.drafts - before.drafts, self.accepted - before.accepted
        return self.rows - before.rows, drafts, accepted


class Stream:
    """Keeps `batch` requests running on a side: `tasks` in turn, again from the first.

    ends_anywhere: the answers of the first batch do; seed: draws where. first: the number of the
    first task. tokens, seconds, steps: so far. answers: of the tasks that have ended, by their
    number.
    """

    def __init__(
        self,
        side: Side,
        tasks: Sequence[Task],
        batch: int,
        *,
        ends_anywhere: bool = True,
        first: int = 0,
        seed: int | tuple[int, ...] = SEED,
    ) -> None:
        side.attach()
        self.tokens = self.steps = 0
        self.seconds = 0.0
        self.answers: dict[int, tuple[int, ...]] = {}
        self._side, self._tasks, self._batch = side, tasks, batch
        self._num_cut = batch if ends_anywhere else 0
        self._before = 0, 0.0  # tokens and seconds before the last step that yielded some
        self._num_begun = 0
        self._phases = np.random.default_rng(seed)
        self._first = first
        self._running: dict[str, tuple[int, list[int]]] = {}  # task and its tokens, by request id
        self._drafted = Drafted(side.core.stats())

    def until(self, num_tokens: int) -> float:
        """Step until there are so many tokens in all; return at how many seconds that was.

        A step that yields more is divided in proportion.
        """
        idle = 0
        while self.tokens < num_tokens:
            before = self.tokens
            self._step()
            idle = 0 if self.tokens > before else idle + 1
            if idle > MAX_IDLE_STEPS:
                raise SystemExit(f"{self._side.name}: no token in {idle} steps")
        tokens, seconds = self._before
        part = (num_tokens - tokens) / (self.tokens - tokens)
        return seconds + part * (self.seconds - seconds)

    def for_steps(self, num_steps: int) -> None:
        """Take so many steps."""
        for _ in range(num_steps):
            self._step()

    def drafted(self) -> tuple[int, int, int]:
        """Return rows with drafts, drafts, and those accepted, since it began. Raises SystemExit if
        speculation failed meanwhile: drafts are missing then."""
        stats = self._side.core.stats()
        if stats.draft_errors_total or stats.draft_proposer_errors_total:
            raise SystemExit(
                f"{self._side.name}: {stats.draft_errors_total} errors of the control of drafts and"
                f" {stats.draft_proposer_errors_total} of a proposer (see the log); nothing is "
                "reported"
            )
        return Drafted(stats).since(self._drafted)

    def end(self) -> None:
        """Abort what is running."""
        for number, tokens in self._running.values():
            self._check(number, tokens)
        self._side.core.abort(list(self._running))
        self._running.clear()
        while self._side.core.has_work:
            self._side.core.step(self._side.clock.now_ms)

    def _step(self) -> None:
        side, new = self._side, []
        while len(self._running) < self._batch:
            new += self._next()
        side.clock.resume()
        began_s = time.perf_counter()
        if new:
            side.core.add(new)
        outputs = side.core.step(side.clock.now_ms)
        seconds = time.perf_counter() - began_s
        side.clock.pause()
        self.steps += 1
        before = self.tokens, self.seconds
        self.seconds += seconds
        for output in outputs or ():
            number, tokens = self._running[output.request_id]
            if output.error is not None:
                raise SystemExit(f"{side.name}: a request failed: {output.error}")
            tokens += output.token_ids
            self.tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._check(number, tokens)
                self.answers.setdefault(number, tuple(tokens))
                del self._running[output.request_id]
        if self.tokens > before[0]:
            self._before = before

    def _next(self) -> tuple[Request, ...]:
        """Return the next request. Those of the first batch may end anywhere in their answers:
        requests that begin and take blocks in the same steps cost less, and only without drafts do
        they stay together."""
        begun = self._num_begun
        number = (self._first + begun) % len(self._tasks)
        task = self._tasks[number]
        sampling = task.sampling
        if begun < self._num_cut:
            length = self._phases.integers(1, sampling.max_tokens or 1, endpoint=True)
            sampling = replace(sampling, max_tokens=int(length))
        self._num_begun += 1
        requests = make_requests(
            self._side.card,
            task.prompt,
            sampling,
            request_id=f"{id(self)}-{begun}",
            arrival_ms=self._side.clock.now_ms(),
            terms=_terms(self._side, task),
        )
        self._running[requests[0].request_id] = number, []
        return requests

    def _check(self, number: int, tokens: Sequence[int]) -> None:
        expected = self._tasks[number].expected
        if expected and tuple(tokens) != expected[: len(tokens)]:
            raise SystemExit(
                f"{self._side.name}: speculation changed the tokens of an answer; nothing is "
                "reported"
            )


def _terms(side: Side, task: Task) -> SchedulingParams:
    if not (task.prediction and side.card.max_draft_tokens):
        return DEFAULT_SCHEDULING
    speculation = SpeculationParams(is_on=False, prediction_ids=task.prediction)
    return SchedulingParams(speculation=speculation)


def answers_of(side: Side, tasks: Sequence[Task], batch: int) -> list[Task]:
    """Return `tasks` with their whole answers on a side; any that are expected are compared."""
    stream = Stream(side, tasks, min(batch, len(tasks)), ends_anywhere=False)
    while len(stream.answers) < len(tasks):
        stream.for_steps(1)
    stream.end()
    return [replace(task, expected=stream.answers[place]) for place, task in enumerate(tasks)]
