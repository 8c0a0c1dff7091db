"""SimEngine: one of several simulated engines, to which requests are sent while it runs.

Each is the real loop and scheduler on a clock of its own, with what it has outside: a shared KV
store, links to others, or neither. Knows no other engine and no router. Always holds: what is sent
is answered in order of time; requests with one content have equal tokens at every engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from quire.base.errors import QuireError
from quire.base.kv_transfer import KVTransfer
from quire.base.records import NO_INTS, Request, StepOutputs
from quire.cache.chain import FIXED_KEY
from quire.config.groups import EngineConfig
from quire.engine.assembly.scheduler_factory import make_scheduler
from quire.engine.core import EngineCore
from quire.engine.process.messages import Abort, Refused, Submit, ToEngine, fault_of
from quire.engine.transfer.handing import OWN_PREFIX
from quire.sim.clock import VirtualClock
from quire.sim.engine_ends import EngineEnds, Surroundings, report_nothing
from quire.sim.events import EngineEvents
from quire.sim.load import RequestDefaults, RequestFactory, TraceRequest
from quire.sim.machine import Machine
from quire.sim.run import Run, TraceReplay
from quire.sim.runner import PlannedOutput, PlannedOutputs, VirtualRunner

# Of all engines of a fleet, so that they find each other's blocks.
FINGERPRINT = "simulated"

OnOutputs = Callable[["SimEngine", StepOutputs], None]
OnRefused = Callable[["SimEngine", str], bool]


@dataclass(slots=True)
class Sent:
    """Requests that an engine was sent. contents: which of all requests each is; transfers: what
    each has transferred; places: of each record in these lists, by its identity."""

    requests: list[TraceRequest] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    transfers: list[KVTransfer | None] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)


class SentFactory(RequestFactory):
    """Makes the requests that one engine was sent, of all requests of a fleet."""

    def __init__(
        self, requests: Sequence[TraceRequest], defaults: RequestDefaults, sent: Sent
    ) -> None:
        super().__init__(requests, defaults)
        self._sent = sent

    def make(self, number: int, request: TraceRequest) -> Request:
        """See RequestFactory."""
        made = super().make(number, request)
        transfer = self._sent.transfers[number]
        return made if transfer is None else replace(made, transfer=transfer)

    def content_of(self, number: int) -> int:
        """See RequestFactory."""
        return self._sent.contents[number]


class LinkedReplay(TraceReplay):
    """A TraceReplay of an engine with `ends`: it takes the orders of other engines, too."""

    def __init__(
        self,
        core: EngineCore,
        clock: VirtualClock,
        sent: Sent,
        factory: SentFactory,
        ends: EngineEnds,
    ) -> None:
        super().__init__(core, clock, sent.requests, factory)
        self._ends = ends

    @property
    def has_more(self) -> bool:
        """See TraceReplay."""
        return super().has_more or self._ends.has_work()

    @property
    def next_ms(self) -> float:
        """See TraceReplay."""
        return min(super().next_ms, self._ends.next_ms())

    @property
    def result(self) -> Run:
        """See TraceReplay."""
        run = super().result
        run.stats = self._ends.in_stats(run.stats)
        return run

    def _take(self) -> bool:
        messages: list[ToEngine] = [Submit(requests=(one,)) for one in self._arrived()]
        num_arrived = len(messages)
        for message in self._ends.take(messages):
            if isinstance(message, Submit):
                for request in message.requests:
                    self._plan_own(request)
                    self._add(request)
            elif isinstance(message, Abort):
                for output in self._core.abort(message.request_ids):
                    self._shown(
                        StepOutputs(step=-1, request_ids=[], token_ids=NO_INTS, events=(output,))
                    )
        return num_arrived > 0

    def _plan_own(self, request: Request) -> None:
        """Plan the one token of a prompt that another engine has ordered."""
        if request.request_id.startswith(OWN_PREFIX):
            last = int(request.prompt_ids[-1])
            planned = PlannedOutput(len(request.prompt_ids) + 1, last)
            self._factory.planned[request.request_id] = planned

    def _add(self, request: Request) -> None:
        try:
            self._core.add((request,))
        except QuireError as error:
            self._ends.refused(Refused(request_ids=(request.request_id,), fault=fault_of(error)))
            if request.request_id.startswith(OWN_PREFIX):
                self._factory.forget(request.request_id)
            else:
                self._refuse(request.request_id, type(error).__name__)

    def _expire(self) -> None:
        for refused in self._core.expire(self._clock.now_ms()):
            self._ends.refused(refused)
            for request_id in refused.request_ids:
                self._refuse(request_id, refused.fault.kind)

    def _shown(self, outputs: StepOutputs) -> StepOutputs:
        for event in outputs.events:
            if event.request_id.startswith(OWN_PREFIX) and event.finish_reason is not None:
                self._factory.forget(event.request_id)
        shown = self._ends.seen(outputs)
        return replace(outputs, events=()) if shown is None else shown


class SimEngine:
    """One engine. host: by which others know it; on_outputs: called with the outputs of each step,
    but for those that other engines have ordered; on_refused: returns whether a request that is not
    taken here goes to another engine."""

    def __init__(
        self,
        number: int,
        requests: Sequence[TraceRequest],
        defaults: RequestDefaults,
        machine: Machine,
        config: EngineConfig,
        outside: Surroundings,
        on_outputs: OnOutputs,
        on_refused: OnRefused,
    ) -> None:
        self.number, self.host = number, str(number)
        self._sent = Sent()
        factory = SentFactory(requests, defaults, self._sent)
        num_blocks = machine.num_blocks(config)
        limits = machine.limits(config, num_blocks=num_blocks, max_model_len=defaults.max_model_len)
        clock = VirtualClock()
        events = EngineEvents(clock)
        tier = outside.tier()
        scheduler = make_scheduler(
            config,
            limits,
            num_blocks=num_blocks,
            fingerprint=FINGERPRINT,
            hash_key=FIXED_KEY,
            cost=machine.linear if limits.step_budget_ms else None,
            prices=machine.linear,
            tier=tier,
        )
        self.ends = None
        if tier is not None:
            self.ends = EngineEnds(outside, scheduler, tier, config, events)
        runner = VirtualRunner(
            clock,
            machine.stages or (machine.cost,),
            PlannedOutputs(factory.planned, num_slots=limits.max_num_seqs),
            on_plan=None if self.ends is None else self.ends.mover.note_plan,
        )
        core = EngineCore(
            scheduler,
            runner,
            plans_in_flight=limits.plans_in_flight,
            report=report_nothing,
            tier=None if self.ends is None else self.ends.blocks,
        )
        if self.ends is None:
            self.replay = TraceReplay(core, clock, self._sent.requests, factory)
        else:
            self.replay = LinkedReplay(core, clock, self._sent, factory, self.ends)
            if self.ends.side is not None:
                self.ends.side.due_ms = lambda: self.due_ms
        self.replay.busy_ms = lambda: runner.busy_ms
        self._core = core
        self.replay.on_outputs = lambda outputs: on_outputs(self, outputs)
        self.replay.on_refused = lambda request_id: on_refused(self, request_id)

    @property
    def due_ms(self) -> float:
        """When this engine goes on; up to then it is known what it has done. inf: it is idle."""
        if not self.replay.has_more:
            return math.inf
        now_ms = self.replay.now_ms
        return now_ms if self._core.has_work else max(now_ms, self.replay.next_ms)

    def send(
        self,
        request: TraceRequest,
        content: int,
        transfer: KVTransfer | None = None,
    ) -> str:
        """Send a request, which arrives at its time; return its id here.

        content: which request of all it is. Times of arrival never decrease.
        """
        sent, place = self._sent, len(self._sent.requests)
        sent.places[id(request)] = place
        sent.requests.append(request)
        sent.contents.append(content)
        sent.transfers.append(transfer)
        return str(place)

    def sent_as(self, request: TraceRequest) -> tuple[int, bool]:
        """Return which request of all one is that was sent here, and whether it is answered here.

        Otherwise another engine answers it, for which its prompt is computed here.
        """
        place = self._sent.places[id(request)]
        transfer = self._sent.transfers[place]
        return self._sent.contents[place], transfer is None or not transfer.hand_over

    def advance(self) -> None:
        """Go on by one step, one arrival or one wait."""
        self.replay.advance()
