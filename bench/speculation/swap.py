"""Sides that share an engine: what each has of its own is attached while it has its turn.

An engine is assembled with drafts. While it is empty, `attach` puts in what a side has learned or
drafts with: its drafter with proposer and control, the rows with drafts and their prices, the
state of the step-cost model, and the count of steps. Side "off" has what a scheduler has that was
made without a source of drafts: no object of speculation takes part in a step, and requests do not
speculate. Draft heads read hidden states, so the program and the runner of their engine keep them:
without drafts a side has another runner, with the program as it is without heads, over the same
weights and KV cache. Always holds: a side learns from its own steps only; no request is live when
sides are swapped; the executors, their memory and the prefix cache are those of all sides.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bench.speculation.sides import PausedClock, Side
from quire.engine.assembly import draft_model, heads, lookup, self_draft
from quire.engine.assembly.assemble import Engine
from quire.engine.assembly.sized_model import SizedModel
from quire.engine.core import Runner
from quire.execute.native import NativeExecutor
from quire.execute.native_first_layers import NativeFirstLayers
from quire.runner.draft_head_runner import DraftHeadRunner
from quire.runner.draft_runner import DraftRunner
from quire.runner.model_runner import ModelRunner
from quire.runner.slot_tables import SlotTables
from quire.runner.tapped_runner import TappedRunner
from quire.scheduler.speculation.draft_rows import DraftRows
from quire.speculative.draft_model import ModelProposer
from quire.speculative.drafter import Drafter
from quire.speculative.eagle import EagleProposer
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.medusa import MedusaProposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.passes import ComputingProposer
from quire.speculative.proposer import Proposer
from quire.speculative.self_draft import SelfProposer

Make = Callable[..., Any]
# Attributes of a ring of hidden states that are numbers of steps, which each side counts.
RING_STEPS = ("_paused_until", "_kept_step", "_gap_step", "idle_until")


@dataclass(slots=True)
class Attached:
    """What a side has of its own. rows: None without drafts. speed: the attributes of the step-cost
    model. step: the number of the last one. ring: what the ring of hidden states knows of
    steps."""

    rows: DraftRows | None
    speed: dict[str, Any]
    runner: Runner
    step: int = 0
    ring: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RING_STEPS, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A part of an engine, and what made it of what."""

    part: Any
    make: Make
    args: tuple[Any, ...]
    settings: dict[str, Any]


class Parts:
    """Makes the proposer of an engine for the assembly, and further ones over the same executors,
    of whatever kind. shares_noise: see DraftRunner. prompt_lookup: what makes prompt lookup."""

    def __init__(self, *, shares_noise: bool = True, prompt_lookup: Make = NgramProposer) -> None:
        self._made: dict[int, Made] = {}  # by the id of the part
        self._runner = partial(DraftRunner, shares_noise=shares_noise)
        self._lookup = prompt_lookup

    def put_in_place(self) -> None:
        """Let the assembly make proposers, and what they are made of, here."""
        for module, makes in (
            (draft_model, {"DraftRunner": self._runner, "ModelProposer": ModelProposer}),
            (self_draft, {"DraftRunner": DraftRunner, "SelfProposer": SelfProposer}),
            (heads, {"SlotTables": SlotTables, "DraftHeadRunner": DraftHeadRunner}),
            (heads, {"EagleProposer": EagleProposer, "MedusaProposer": MedusaProposer}),
            (heads, {"TappedRunner": TappedRunner}),
            (lookup, {"NgramProposer": self._lookup}),
        ):
            for name, make in makes.items():
                setattr(module, name, partial(self._note, make))

    def _note(self, make: Make, *args: Any, **settings: Any) -> Any:
        part = make(*args, **settings)
        self._made[id(part)] = Made(part=part, make=make, args=args, settings=settings)
        return part

    def made(self, part: object) -> Made | None:
        """Return how the assembly has made a part; None for what was not made here."""
        return self._made.get(id(part))

    def again(self, part: Any) -> Any:
        """Return another part like `part`, of parts like those that it was made of. What was not
        made here is shared: executors with their caches, and the ring of hidden states."""
        if (made := self.made(part)) is None:
            return part
        settings = {name: self.again(value) for name, value in made.settings.items()}
        return made.make(*map(self.again, made.args), **settings)


class SharedEngine:
    """An engine that was assembled with drafts, and that has not run yet. parts: made its proposer.
    plain: the runner of sides without drafts; None: that of the engine."""

    def __init__(
        self, engine: Engine, clock: PausedClock, parts: Parts, plain: Runner | None = None
    ) -> None:
        self._engine, self._clock, self._parts = engine, clock, parts
        self._scheduler = scheduler = engine.core.scheduler
        self._first = scheduler._drafts
        assert self._first is not None, "the engine has drafts"
        self._proposer: Proposer = self._first._source.proposer  # type: ignore[attr-defined]
        self._ring: HiddenStateRing | None = getattr(self._proposer, "_ring", None)
        self._pass_times = deepcopy(getattr(self._proposer, "pass_times", None))
        self._prices: dict[str, Any] = deepcopy(vars(scheduler.speed))
        self._extensions = scheduler._extensions
        self._runner = engine.core.runner
        self._plain = plain or self._runner
        self._now = Attached(self._first, self._prices, self._runner)
        self.off = self.side("off", None)

    def side(self, name: str, make: Callable[[Proposer], Drafter] | None) -> Side:
        """Return a side that has learned nothing. make: its drafter; None: it has no drafts."""
        card, rows, runner = self._engine.card, None, self._runner
        if make is None:
            card, runner = replace(card, max_draft_tokens=0, speculates=False), self._plain
        else:
            rows = self._rows(make(self._another()))
        own = Attached(rows, deepcopy(self._prices), runner)
        attach = partial(self._attach, own)
        core = self._engine.core
        return Side(name=name, core=core, card=card, clock=self._clock, attach=attach)

    def _another(self) -> Proposer:
        """Return a further proposer, with the times of passes that the engine began with: to time
        some again would overwrite what blocks of the engine hold."""
        proposer: Proposer = self._parts.again(self._proposer)
        if isinstance(proposer, ComputingProposer):
            proposer.pass_times = deepcopy(self._pass_times)
        if isinstance(proposer, SelfProposer):
            proposer.settle = self._proposer.settle  # type: ignore[attr-defined]
        return proposer

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
        if self._ring is not None:  # its pauses end at a step of the side
            self._now.ring = {name: getattr(self._ring, name) for name in RING_STEPS}
            vars(self._ring).update(own.ring)
        scheduler._was_busy = False  # the first step follows none of another side
        scheduler._drafts = scheduler._outcomes._drafts = rows
        scheduler._extensions = tuple(
            one if one is not self._first or rows is None else rows
            for one in self._extensions
            if one is not self._first or rows is not None
        )
        self._engine.core.runner = own.runner
        self._now = own


def plain_runner(engine: Engine, parts: Parts, model: SizedModel) -> ModelRunner | None:
    """Return a runner without hidden states over the weights and the KV cache of `engine`; None
    where its own is one. model: as it is without heads."""
    made = parts.made(engine.core.runner)
    if made is None:
        return None
    [executor] = made.args
    assert isinstance(executor, NativeExecutor), "engines run on CPUs"
    untapped = NativeFirstLayers(executor, model.program, model.step_limits)
    untapped.share_cache()
    settings = {name: value for name, value in made.settings.items() if name != "taps"}
    return ModelRunner(untapped, **settings)
