"""Sides that share an engine: what each has of its own is attached while it has its turn.

An engine is assembled with drafts. While it is empty, `attach` puts in what a side has learned or
drafts with: its drafter with proposer and control, the rows with drafts and their prices, the
state of the step-cost model, and the count of steps. Side "off" has what a scheduler has that was
made without a source of drafts: no object of speculation takes part in a step, and requests do not
speculate. Always holds: a side learns from its own steps only; no request is live when sides are
swapped; the executors, their memory and the prefix cache are those of all sides.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.speculation.sides import PausedClock, Side
from quire.engine.assembly import draft_model
from quire.engine.assembly.assemble import Engine
from quire.runner.draft_runner import DraftRunner
from quire.scheduler.speculation.draft_rows import DraftRows
from quire.speculative.draft_model import ModelProposer
from quire.speculative.drafter import Drafter


@dataclass(slots=True)
class Attached:
    """What a side has of its own. rows: None without drafts. speed: the attributes of the step-cost
    model. step: the number of the last one."""

    rows: DraftRows | None
    speed: dict[str, Any]
    step: int = 0


class SharedEngine:
    """An engine that was assembled with drafts, and that has not run yet."""

    def __init__(self, engine: Engine, clock: PausedClock) -> None:
        self._engine, self._clock = engine, clock
        self._scheduler = scheduler = engine.core.scheduler
        self._first = scheduler._drafts
        assert self._first is not None, "the engine has drafts"
        self._prices: dict[str, Any] = deepcopy(vars(scheduler.speed))
        self._extensions = scheduler._extensions
        self._now = Attached(self._first, self._prices)
        self.off = self.side("off", None)

    def side(self, name: str, make: Callable[[], Drafter] | None) -> Side:
        """Return a side that has learned nothing. make: its drafter; None: it has no drafts."""
        card, rows = self._engine.card, None
        if make is None:
            card = replace(card, max_draft_tokens=0, speculates=False)
        else:
            self._clock.resume()  # while passes are timed
            rows = self._rows(make())
            self._clock.pause()
        own = Attached(rows, deepcopy(self._prices))
        attach = partial(self._attach, own)
        core = self._engine.core
        return Side(name=name, core=core, card=card, clock=self._clock, attach=attach)

    def _rows(self, drafter: Drafter) -> DraftRows:
        """Return rows with drafts, as those that the scheduler was made with."""
        scheduler = self._scheduler
        return DraftRows(
            scheduler._limits,
            scheduler._requests,
            scheduler._batch,
            scheduler._cache,
            scheduler._tenants,
            scheduler.speed,
            drafter,
        )

    def _attach(self, own: Attached) -> None:
        if own is self._now:
            return
        scheduler, rows, in_flight = self._scheduler, own.rows, self._scheduler._requests.in_flight
        assert not scheduler.has_work, "requests are live"
        speed = vars(scheduler.speed)
        self._now.speed, self._now.step = dict(speed), in_flight.step
        speed.clear()
        speed.update(own.speed)
        in_flight.step = own.step
        scheduler._drafts = scheduler._outcomes._drafts = rows
        scheduler._extensions = tuple(
            one if one is not self._first or rows is None else rows
            for one in self._extensions
            if one is not self._first or rows is not None
        )
        self._now = own


class DraftModels:
    """Makes proposers over the executor of one draft model, which the assembly loads. shares_noise:
    see DraftRunner."""

    def __init__(self, *, shares_noise: bool) -> None:
        self._shares_noise = shares_noise

    def runner(self, executor: Any, **settings: Any) -> DraftRunner:
        """Return that of the assembly."""
        make = partial(DraftRunner, executor, shares_noise=self._shares_noise, **settings)
        self._make, self._num_slots = make, settings["num_slots"]
        return make()

    def proposer(self, model: Any, limits: Any, now_ms: Callable[[], float]) -> ModelProposer:
        """Return that of the assembly."""
        self._proposer = lambda model: ModelProposer(model, limits, now_ms)
        return self._proposer(model)

    def another(self) -> ModelProposer:
        """Return a further one, with passes timed."""
        proposer = self._proposer(self._make())
        draft_model._time_passes(proposer, self._num_slots)
        return proposer
