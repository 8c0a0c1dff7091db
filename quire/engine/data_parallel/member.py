"""Member: one engine of several, as routing policies see it, with what it has open.

Knows no process and no message. Always holds: what a request has added to the counts of an engine
is taken away when it ends there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from quire.base.engine_stats import EngineStats
from quire.engine.client.engine_client import EngineClient
from quire.engine.data_parallel.routing_state import OpenCounts, RoutingState
from quire.engine.supervised.supervised_engine import SupervisedEngine
from quire.engine.supervised.supervised_request import Life
from quire.routing.engine_silence import EngineSilence
from quire.routing.policy import RouteKey

MemberEngine = EngineClient | SupervisedEngine


@dataclass(slots=True)
class OpenRequest:
    """One request at an engine. tokens: that it still expects, of the prompt until it has output.
    ahead_tokens: that the engine had to compute before it; came_ms: when it was sent."""

    tokens: int
    prompt_tokens: int
    new_tokens: int
    ahead_tokens: int
    came_ms: float


@dataclass(slots=True, eq=False)
class Member:
    """One engine (a Replica of quire/routing/policy.py).

    requests: that this process has open there. has_ended: its counters are among those of the past.
    silence: of the engine's process; is_silent: that is stopped, so that its requests go on
    elsewhere until it sends something.
    """

    number: int
    engine: MemberEngine
    life: Life
    routing: RoutingState
    has_ended: bool = False
    is_silent: bool = False
    requests: dict[str, OpenRequest] = field(default_factory=dict)
    silence: EngineSilence = field(default_factory=EngineSilence)

    @property
    def name(self) -> str:
        """Its number, in words."""
        return f"engine {self.number}"

    @property
    def sleeps(self) -> int:
        """How often it has slept."""
        return self.engine.num_sleeps if isinstance(self.engine, SupervisedEngine) else 0

    @property
    def backlog_tokens(self) -> int:
        """See Replica: for all processes, as the other counts."""
        return self.routing.counts(self.number).tokens

    @property
    def queued_tokens(self) -> int:
        """See Replica."""
        return self.routing.counts(self.number).new_tokens

    @property
    def expected_tokens(self) -> int:
        """See Replica."""
        counts = self.routing.counts(self.number)
        return counts.tokens - counts.prompt_tokens

    @property
    def loads(self) -> Collection[Any]:
        """As many as it has requests."""
        return range(self.routing.counts(self.number).requests)

    def begin(self, request_id: str, key: RouteKey, new_tokens: int, now_ms: float) -> None:
        """Count an open request. new_tokens: of its prompt, what is not cached."""
        self.requests[request_id] = OpenRequest(
            key.tokens, key.prompt_tokens, new_tokens, self.queued_tokens, now_ms
        )
        self.routing.add(self.number, OpenCounts(key.tokens, 1, key.prompt_tokens, new_tokens))

    def gave_output(self, request_id: str) -> OpenRequest:
        """Count the prompt of a request no more; return the request as it was before. Twice is
        once."""
        request = self.requests[request_id]
        prompt, new = request.prompt_tokens, request.new_tokens
        before = OpenRequest(request.tokens, prompt, new, request.ahead_tokens, request.came_ms)
        request.tokens -= prompt
        request.prompt_tokens = request.new_tokens = 0
        self.routing.add(self.number, OpenCounts(-prompt, 0, -prompt, -new))
        return before

    def reduce(self, request_id: str, tokens: int) -> None:
        """Note that `tokens` of expected output are computed."""
        request = self.requests[request_id]
        done = min(tokens, request.tokens)
        request.tokens -= done
        self.routing.add(self.number, OpenCounts(-done))

    def end(self, request_id: str) -> None:
        """Count it no more."""
        last = self.requests.pop(request_id)
        less = OpenCounts(-last.tokens, -1, -last.prompt_tokens, -last.new_tokens)
        self.routing.add(self.number, less)

    def stats(self) -> EngineStats:
        """Return its counters and gauges; none while it is gone."""
        stats = self.engine.stats
        return EngineStats(restarts_total=stats.restarts_total) if self.has_ended else stats

    def look(self) -> bool:
        """Note how long the engine's process has sent nothing; return whether it is stopped."""
        health = self.engine.health()
        self.silence.report(health.silent_ms / 1000 if health.pending else 0.0)
        return self.silence.known_s > self.silence.usual_s
