"""Replica: one server behind the router, and what the router knows of it.

Its load is what the router itself has sent there: no report of a replica is trusted for that.
Always holds: a replica that failed or was unreachable is fenced until its health and its
fingerprints were read again; requests are sent to available replicas only. A removed replica stays
removed, fenced or not: its number may be that of another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.base.server_url import ServerUrl
from quire.router.breaker import CircuitBreaker
from quire.router.faults import ReplicaFault
from quire.router.first_token_times import FirstTokenTimes

# Gaps in progress that are remembered, and the multiple of the 99th percentile that is a stall.
_NUM_GAPS = 512
_SHORTEST_GAP_S = 0.01
_STALL_MULTIPLE = 4.0
_MAX_STALL_FACTOR = 6.0
# The longest gap counts for some time by itself: where an overload has just begun, few are long.
_LONGEST_MULTIPLE, _LONGEST_COUNTS_S = 1.5, 10.0
# Without prompts to compute no step is much longer than the usual ones, once these are known: then
# so long without progress is enough.
STEADY_STALL_S = 2.0
# With many prompts to compute, such as those of a replica that has failed.
CROWDED_STALL_S = 4.0
_MIN_GAPS = 20
# A longer prompt is computed in pieces, and others overtake it.
MAX_OVERTAKEN_TOKENS = 2048
# When more requests than this were at their beginning, one failure is weak evidence against each.
MAX_BEGINNING = 8
# The state of a server without an engine: a request starts one.
ASLEEP = "asleep"
# The state of one that the discovery no longer names; it ends what it has.
REMOVED = "removed"
# States of a replica that takes requests, or has some.
_USED = frozenset({"ready", ASLEEP, "paused", "draining"})


@dataclass(slots=True, eq=False)
class Load:
    """One open request at a replica.

    tokens: of its prompt until it has output, and of the output that is still expected. cut: ends
    its exchange with a fault. began_s: when it was sent. last_s: returns when bytes arrived last.
    is_paused: returns whether silence means nothing: the client does not read, or the exchange has
    ended and only the client is waited for. has_heartbeats: bytes come before it has output, too.
    is_new: it has no output. is_whole: its output comes as a whole. is_long: it counts as a long
    prompt. prompt_tokens: of `tokens`, those to compute before it has output; new_tokens: of these,
    what is not cached. ahead_tokens: that the replica had to compute before it.
    """

    tokens: int
    cut: Callable[[ReplicaFault], None]
    began_s: float
    last_s: Callable[[], float]
    is_paused: Callable[[], bool]
    has_heartbeats: bool = True
    is_new: bool = True
    is_whole: bool = False
    is_long: bool = False
    prompt_tokens: int = 0
    new_tokens: int = 0
    ahead_tokens: int = 0


class Replica:
    """number: a bit of the masks in PrefixHistory. models: fingerprint by model name. progress_s:
    when it last computed something or was idle. busy_s: when it last said that it has requests, or
    may hold some in a pause, or computed something. said: the state that it reported last, or was
    found in, also once it is removed."""

    def __init__(self, url: ServerUrl, number: int) -> None:
        self.url = url
        self.name = url.full
        self.number = number
        self._state = self.said = "unknown"
        self.reason = "not probed yet"
        self.is_fenced = True
        self.was_used = False  # before it was fenced last
        self.models: dict[str, str] = {}
        self.model_entries: list[dict[str, Any]] = []
        self.breaker = CircuitBreaker()
        self.first_token_times = FirstTokenTimes()
        self.loads: set[Load] = set()
        self.backlog_tokens = 0
        self.queued_tokens = 0  # of prompts without output, to be computed
        self.prompt_tokens = 0  # of the same, cached ones too
        self.computed_tokens = 0  # of all requests, as far as the router has noticed
        self.num_long = 0
        self.steps_total = -1
        self.had_fewer_steps = False  # whether the last answer had fewer steps
        self.stalled_steps = -1  # steps_total when it made no progress
        self.has_stopped = False  # its whole process, when it was given up last
        self.progress_s = self.busy_s = 0.0
        self.used_s = 0.0
        self.num_beginning = 0  # when it failed last
        self.num_handed_over = 0  # requests that were open then, until the prober has seen it
        self._answered_began_s = 0.0  # when the newest request with output was sent
        self._whole: dict[Load, None] = {}  # queued ones, in the order in which they were sent
        self._gaps: deque[float] = deque(maxlen=_NUM_GAPS)
        self._longest_gap_s = self._longest_at_s = 0.0
        self.on_fenced: Callable[[Replica], None] | None = None

    @property
    def state(self) -> str:
        """As `said`, until it is removed. REMOVED is the last one."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        if state != REMOVED:
            self.said = state
        if self._state != REMOVED:
            self._state = state

    def is_available(self, now_s: float) -> bool:
        """Return whether a request may be sent."""
        return self.is_up and self.breaker.allows(now_s)

    @property
    def is_up(self) -> bool:
        """Whether it takes requests, its breaker aside."""
        return self.state in ("ready", ASLEEP) and not self.is_fenced

    def serves(self, model: str) -> bool:
        """Return whether it serves `model`; "" is any."""
        return not model or model in self.models

    def fingerprint(self, model: str) -> str:
        """Return the fingerprint of its answers; "" where it is not known."""
        return self.models.get(model) or (next(iter(self.models.values()), "") if not model else "")

    def begin(self, load: Load) -> None:
        """Count an open request."""
        self.loads.add(load)
        self.used_s = load.began_s
        self.backlog_tokens += load.tokens
        self.queued_tokens += load.new_tokens
        self.prompt_tokens += load.prompt_tokens
        self.num_long += load.is_long
        if load.is_whole:
            self._whole[load] = None
        self.breaker.began()

    def end(self, load: Load) -> None:
        """Count it no more. Twice is once."""
        if load in self.loads:
            self._leave_queue(load)
            self._whole.pop(load, None)
            self.loads.discard(load)
            self.backlog_tokens -= load.tokens
            self.computed_tokens += load.tokens if load.is_new else 0
            self.computed_prompt(load)

    def gave_output(self, load: Load) -> None:
        """Note that a request has its first tokens."""
        self._leave_queue(load)
        load.is_new = False
        self._answered(load.began_s)

    def gave_answer(self, load: Load) -> None:
        """Note that a request has its whole answer."""
        self.reduce(load, load.tokens)
        self.gave_output(load)

    def _answered(self, began_s: float) -> None:
        """Note that a request has output. Those that were sent before it have begun as well, if
        their prompts are short: whole answers do not show it, and are a queue no longer."""
        self._answered_began_s = max(self._answered_began_s, began_s)
        begun = list[Load]()
        for load in self._whole:
            if load.began_s > began_s:
                break
            if load.new_tokens <= MAX_OVERTAKEN_TOKENS:
                begun.append(load)
        for load in begun:
            del self._whole[load]
            self.reduce(load, load.prompt_tokens)
            self._leave_queue(load)

    @property
    def expected_tokens(self) -> int:
        """Tokens of expected output."""
        return self.backlog_tokens - self.prompt_tokens

    def _leave_queue(self, load: Load) -> None:
        """Count the prompt of an open request no more as one to be computed. Twice is once."""
        if load in self.loads:
            self.queued_tokens -= load.new_tokens
            self.prompt_tokens -= load.prompt_tokens
            load.new_tokens = load.prompt_tokens = 0

    def is_beginning(self, load: Load) -> bool:
        """Return whether an open request may not be past its first step: neither it nor one that
        was sent later has output. Whole answers show theirs at the end only."""
        return load.is_new and load.began_s >= self._answered_began_s

    def is_shared(self, load: Load) -> bool:
        """Return whether the last failure is weak evidence against a request that was open then: it
        was past its first step, too many others were at their beginning as well, or the process
        stopped, with the thread that no request holds up."""
        is_weak = self.num_beginning > MAX_BEGINNING or self.has_stopped
        return is_weak or not self.is_beginning(load)

    def failed(self) -> None:
        """Note which requests may be the cause, and send nothing more. Further failures before it
        was checked are the same one."""
        if not self.is_fenced:
            self.is_fenced = True
            self.num_handed_over = len(self.loads)
            self.num_beginning = sum(map(self.is_beginning, self.loads))

    def unfence(self) -> None:
        """Note that it was checked: its next failure is another one. A removed replica gets no
        requests, so that it answers is enough."""
        self.is_fenced = self.has_stopped = False

    def computed_prompt(self, load: Load) -> None:
        """Count a request no more as a long prompt. Twice is once."""
        self.num_long -= load.is_long
        load.is_long = False

    def reduce(self, load: Load, tokens: int) -> None:
        """Note that `tokens` of what was expected are computed."""
        done = min(tokens, load.tokens)
        load.tokens -= done
        self.backlog_tokens -= done
        self.computed_tokens += done

    def progressed(self, now_s: float) -> None:
        """Note that the replica computes."""
        gap_s, since_s = now_s - self.progress_s, now_s - self._longest_at_s
        if self.progress_s and gap_s > _SHORTEST_GAP_S and self.loads:
            self._gaps.append(gap_s)
            if gap_s >= self._longest_gap_s or since_s > _LONGEST_COUNTS_S:
                self._longest_gap_s, self._longest_at_s = gap_s, now_s
        elif since_s > 2 * _LONGEST_COUNTS_S:  # one that was noted would have taken its place
            self._longest_gap_s = 0.0
        self.progress_s = now_s

    @property
    def has_history(self) -> bool:
        """Whether enough of its gaps are known."""
        return len(self._gaps) >= _MIN_GAPS

    @property
    def usual_gap_s(self) -> float:
        """The 99th percentile of its gaps; 0 where none is known."""
        ordered = sorted(self._gaps)
        return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0

    def stall_s(self, min_s: float, others_gap_s: float = 0.0) -> float:
        """Return how long it may make no progress: a multiple of the usual, at least `min_s`, or
        less where no prompt is to be computed. others_gap_s: usual for the other replicas, which
        counts while its own history is short."""
        usual_s = self.usual_gap_s if self.has_history else max(self.usual_gap_s, others_gap_s)
        num_beginning = sum(map(self.is_beginning, self.loads))
        at_least_s = min_s
        if num_beginning > MAX_BEGINNING:
            at_least_s = max(min_s, min(2 * min_s, CROWDED_STALL_S))
        elif self.has_history and not num_beginning:
            at_least_s = min(min_s, STEADY_STALL_S)
        waits_s = max(
            _STALL_MULTIPLE * usual_s, _LONGEST_MULTIPLE * self._longest_gap_s, at_least_s
        )
        return min(waits_s, _MAX_STALL_FACTOR * min_s)

    def fence(self, state: str, reason: str) -> None:
        """Send nothing until it was checked again; end what is open there. A removed replica only
        ends what is open: its number may be that of another one."""
        self.was_used = self.state in _USED
        self.failed()
        self.state, self.reason = state, reason
        self.steps_total = -1
        if state != "stalled":  # one that was only slow is as slow as before
            self._gaps.clear()
            self._longest_gap_s = 0.0
        self.first_token_times = FirstTokenTimes()  # of the process that was
        is_silence = state == "stalled"
        for load in list(self.loads):
            load.cut(ReplicaFault(reason, is_suspect=True, is_silence=is_silence, cause="fence"))
        if self.on_fenced is not None and self.state != REMOVED:
            self.on_fenced(self)
