"""VirtualRouter: sends the requests of a fleet to simulated engines, as `quire route` does.

The policies are those of quire/routing, and when a movable engine changes its role is decided by
the same rule as in quire/router/role_balance.py. Open tokens are counted as the router counts them:
of what it has sent, less what it has seen coming back. Knows engines by what they put out. Always
holds: what the router does at a time depends on what engines had put out by then.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from quire.base.errors import SettingError
from quire.base.kv_transfer import KVTransfer
from quire.base.records import StepOutputs
from quire.routing.least_tokens import LeastTokens
from quire.routing.policy import RouteKey, RoutingPolicy
from quire.routing.prefix_history import MAX_BLOCKS, PrefixHistory
from quire.routing.role_shortage import RoleShortage, Side
from quire.routing.round_robin import RoundRobin
from quire.routing.warm_cache import WarmCache
from quire.sim.engines import SimEngine
from quire.sim.load import RequestDefaults, TraceRequest

# As the router's settings (quire/router/settings.py) and its requests have them.
HISTORY_BLOCKS, USUAL_TOKENS = 65_536, 256
NAMED_TOKENS = 64  # of a block in the history, as the router estimates it
LOOKS = 10  # at the load, in the time for which a side has to be short
ROUTINGS: dict[str, Callable[[], RoutingPolicy]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "warm-cache": lambda: WarmCache(PrefixHistory(HISTORY_BLOCKS), None),
}


def check_routing(name: str) -> None:
    """Raise SettingError for an unknown policy."""
    if name not in ROUTINGS:
        raise SettingError(f"routing is {name!r}; allowed: {', '.join(ROUTINGS)}")


@dataclass(slots=True, eq=False)
class _Load:
    """An open request of a replica. prompt, output: tokens that are still expected of each.
    new_tokens: of the prompt, what is not cached; ahead_tokens: that the replica had to compute
    before it; sent_ms: when it was sent, None where its prompt had been computed elsewhere."""

    prompt: int
    output: int
    new_tokens: int
    ahead_tokens: int
    sent_ms: float | None


@dataclass(slots=True, eq=False)
class SimReplica:
    """An engine as policies see it (a Replica of quire/routing/policy.py)."""

    engine: SimEngine
    loads: dict[str, _Load] = field(default_factory=dict)
    backlog_tokens: int = 0
    queued_tokens: int = 0
    expected_tokens: int = 0
    computed_tokens: int = 0

    @property
    def name(self) -> str:
        """See Replica."""
        return self.engine.host

    @property
    def number(self) -> int:
        """See Replica."""
        return self.engine.number

    def begin(self, request_id: str, load: _Load) -> None:
        """Count an open request."""
        self.loads[request_id] = load
        self.backlog_tokens += load.prompt + load.output
        self.queued_tokens += load.new_tokens
        self.expected_tokens += load.output

    def progressed(self, request_id: str, num_tokens: int) -> None:
        """Note tokens of a request; with the first, its prompt is computed."""
        load = self.loads[request_id]
        output = min(num_tokens, load.output)
        done = load.prompt + output
        self.queued_tokens -= load.new_tokens
        self.expected_tokens -= output
        load.prompt, load.new_tokens, load.output = 0, 0, load.output - output
        self.backlog_tokens -= done
        self.computed_tokens += done

    def end(self, request_id: str) -> None:
        """Remove a request from the counts."""
        load = self.loads.pop(request_id)
        self.backlog_tokens -= load.prompt + load.output
        self.queued_tokens -= load.new_tokens
        self.expected_tokens -= load.output


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """How a router has prompts computed first. min_tokens: of such a prompt; latency_ms: of the
    answer of a prefill engine, until the next one has the request. hold_s: how long a side is short
    before a movable engine changes over."""

    min_tokens: int
    latency_ms: float
    hold_s: float


class VirtualRouter:
    """Sends `requests`, in order of arrival. pairs: None: it has no prompts computed first."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        defaults: RequestDefaults,
        routing: str,
        pairs: PairSpec | None = None,
    ) -> None:
        check_routing(routing)
        self._requests, self._defaults, self._pairs = requests, defaults, pairs
        self._policies = {side: ROUTINGS[routing]() for side in Side}
        self._replicas: dict[int, SimReplica] = {}
        self._sides: dict[Side, list[SimReplica]] = {side: [] for side in Side}
        self._movable: set[SimReplica] = set()
        self._draining: tuple[SimReplica, Side] | None = None
        self._shortage = RoleShortage(math.inf if pairs is None else pairs.hold_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._handing: dict[tuple[int, str], int] = {}  # which request of all, by engine and id
        self._latency_ms = 0.0 if pairs is None else pairs.latency_ms
        self._next = 0
        self._now_ms = 0.0
        self._look_ms = math.inf
        self.num_handed_over = self.num_role_changes = 0

    def add(self, engine: SimEngine, side: Side, *, is_movable: bool = False) -> None:
        """Send requests to an engine, too. is_movable: it changes its side with the load."""
        replica = SimReplica(engine)
        self._replicas[engine.number] = replica
        self._sides[side].append(replica)
        if is_movable:
            assert self._pairs is not None, "roles change where there are two"
            self._movable.add(replica)
            self._look_ms = 1e3 * self._pairs.hold_s / LOOKS

    @property
    def is_done(self) -> bool:
        """Whether all requests were sent, and none waits for its prompt."""
        return self._next == len(self._requests) and not self._events

    @property
    def next_ms(self) -> float:
        """When the router does something next; inf for never."""
        if self.is_done:
            return math.inf
        arrival_ms = math.inf
        if self._next < len(self._requests):
            arrival_ms = self._requests[self._next].arrival_ms
        return min(arrival_ms, self._look_ms, self._events[0][0] if self._events else math.inf)

    def advance(self) -> None:
        """Process the next event."""
        now_ms = self._now_ms = self.next_ms
        if self._events and self._events[0][0] <= now_ms:
            heapq.heappop(self._events)[2]()
        elif self._look_ms <= now_ms:
            assert self._pairs is not None, "roles change where there are two"
            self._look_ms += 1e3 * self._pairs.hold_s / LOOKS
            self._look(now_ms)
        else:
            number, self._next = self._next, self._next + 1
            self._arrived(number)

    def note_outputs(self, engine: SimEngine, outputs: StepOutputs) -> None:
        """Read what an engine has put out, once the router has come to that time."""
        if outputs.request_ids or outputs.events:
            self._at(
                engine.replay.now_ms, partial(self._read, self._replicas[engine.number], outputs)
            )

    def note_refused(self, engine: SimEngine, request_id: str) -> bool:
        """Note that an engine does not take a request; return whether another one answers it."""
        replica = self._replicas[engine.number]
        self._at(engine.replay.now_ms, partial(self._refused, replica, request_id))
        return (replica.number, request_id) in self._handing

    # ---- requests

    def _at(self, moment_ms: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment_ms, next(self._numbers), call))

    def _arrived(self, number: int) -> None:
        request, pairs = self._requests[number], self._pairs
        is_long = pairs is not None and request.prompt_tokens >= pairs.min_tokens
        if not is_long or not self._sides[Side.PREFILL]:
            self._send(number, Side.DECODE, request)
            return
        transfer = KVTransfer(transfer_id=_transfer_id(number), hand_over=True)
        self._send(number, Side.PREFILL, replace(request, output_tokens=1), transfer)

    def _send(
        self, number: int, side: Side, request: TraceRequest, transfer: KVTransfer | None = None
    ) -> None:
        policy, asked = self._policies[side], self._defaults.max_tokens
        key = RouteKey(
            blocks=self._names(number),
            tokens=request.prompt_tokens + min(asked, USUAL_TOKENS),
            prompt_tokens=request.prompt_tokens,
        )
        replica = policy.choose(self._sides[side], key)
        is_computed = transfer is not None and not transfer.hand_over
        output = 1 if transfer is not None and transfer.hand_over else min(asked, USUAL_TOKENS)
        load = _Load(
            prompt=request.prompt_tokens,
            output=output,
            new_tokens=0 if is_computed else policy.new_tokens(replica, key),
            ahead_tokens=replica.queued_tokens,
            sent_ms=None if is_computed else self._now_ms,
        )
        policy.sent(replica, key)
        request_id = replica.engine.send(request, number, transfer)
        replica.begin(request_id, load)
        if transfer is not None and transfer.hand_over:
            self._handing[replica.number, request_id] = number

    def _names(self, number: int) -> tuple[int, ...]:
        """Return names of the blocks of a prompt, as PrefixHistory has them."""
        request = self._requests[number]
        num_names = min(request.prompt_tokens // NAMED_TOKENS, MAX_BLOCKS)
        names, name = [], 0
        for at in range(num_names):
            block = at * NAMED_TOKENS // request.block_tokens
            is_shared = block < len(request.block_ids)
            name = hash((name, at, request.block_ids[block] if is_shared else -1 - number))
            names.append(name)
        return tuple(names)

    def _read(self, replica: SimReplica, outputs: StepOutputs) -> None:
        """Take in one step of an engine."""
        for request_id in outputs.request_ids:
            self._progressed(replica, request_id, 1)
        for event in outputs.events:
            self._progressed(replica, event.request_id, len(event.token_ids))
            if event.finish_reason is not None:
                replica.end(event.request_id)
                number = self._handing.pop((replica.number, event.request_id), None)
                if number is not None:
                    self._at(self._now_ms + self._latency_ms, partial(self._go_on, number, replica))
        self._end_change()

    def _progressed(self, replica: SimReplica, request_id: str, num_tokens: int) -> None:
        """Count tokens of a request; learn from its first one how fast the replica is."""
        load = replica.loads[request_id]
        if load.prompt and load.sent_ms is not None:
            side = next((side for side in Side if replica in self._sides[side]), None)
            if side is not None:  # else it changes its role
                seconds = (self._now_ms - load.sent_ms) / 1e3
                self._policies[side].note_first_token(
                    replica, load.new_tokens, load.ahead_tokens, seconds
                )
        replica.progressed(request_id, num_tokens)

    def _go_on(self, number: int, replica: SimReplica) -> None:
        """Send a request to the engine that answers it, once its prompt is computed."""
        self.num_handed_over += 1
        source = KVTransfer(
            transfer_id=_transfer_id(number), hand_over=False, host=replica.engine.host, port=1
        )
        request = replace(self._requests[number], arrival_ms=self._now_ms)
        self._send(number, Side.DECODE, request, source)

    def _refused(self, replica: SimReplica, request_id: str) -> None:
        """Have a prompt computed where it is answered, if no prefill engine takes it."""
        replica.end(request_id)
        number = self._handing.pop((replica.number, request_id), None)
        if number is not None:
            self._send(
                number, Side.DECODE, replace(self._requests[number], arrival_ms=self._now_ms)
            )
        self._end_change()

    # ---- roles

    def _look(self, now_ms: float) -> None:
        """Measure both sides; begin a change of role."""
        self._shortage.measure(self._sides, now_ms / 1e3)
        if self._draining is not None:
            return
        short = self._shortage.short(self._sides, now_ms / 1e3)
        if short is None:
            return
        giving = self._sides[short.other]
        candidates = [one for one in giving if one in self._movable]
        if len(giving) < 2 or not candidates:
            return
        chosen = min(candidates, key=lambda one: one.backlog_tokens)
        giving.remove(chosen)
        self._policies[short.other].forget(chosen)
        self._draining = (chosen, short)
        self._shortage.begun()
        self._end_change()

    def _end_change(self) -> None:
        """Put an engine on its new side once its last request has ended."""
        if self._draining is None or self._draining[0].loads:
            return
        (replica, side), self._draining = self._draining, None
        self._sides[side].append(replica)
        self._shortage.changed()
        self.num_role_changes += 1


def _transfer_id(number: int) -> str:
    """Return the name under which the blocks of a request are handed over."""
    return number.to_bytes(16, "big").hex()
