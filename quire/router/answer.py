"""Answer: the attempts of one request, until the client has its answer.

A whole answer is passed on once it is complete, so it can be computed anew at any time. A stream
that has output goes on at another replica of its fingerprint, from the tokens that were delivered.
Always holds: the client gets each byte of an answer once and in order; a request is tried on no
third replica after two failed with it at one place (failures.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from quire.router.admission import Admission
from quire.router.api_forms import ErrorBody, read_error
from quire.router.attempt import Attempt
from quire.router.breaker import RetryBudget
from quire.router.client_response import ClientResponse
from quire.router.deadlines import before_deadline
from quire.router.event_blocks import EventBlocks
from quire.router.failures import Failures
from quire.router.faults import ClientGone, Refusal, ReplicaFault
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.hedge_race import Race
from quire.router.hedging import Hedger
from quire.router.interruption import Interruption
from quire.router.model_choice import ModelChoice
from quire.router.replica import ASLEEP, Replica
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics
from quire.router.routes import RESPONSES
from quire.router.stored_responses import (
    MAX_START_BYTES,
    StoredResponses,
    created_id,
    home_unavailable,
    needed_id,
)

# Error codes of a replica that is ending: another can go on, and the request is not the cause.
_LEAVING = frozenset({"shutting_down", "overloaded", "queue_timeout"})
# Error codes of a replica that failed with the request.
_FAILED = frozenset({"worker_error", "device_lost", "step_row_error", "internal_error"})
_RETRY_EVERY_S = 0.25
# The usage of a stream is in one of its last pieces.
_LAST_PIECES = 8
# So long a stream waits for another replica before it goes on at the one that failed.
_RETURN_S = 1.0


@dataclass(slots=True, kw_only=True)
class AnswerParts:
    """What all answers of a router use."""

    fleet: Fleet
    admission: Admission
    metrics: RouterMetrics
    features: Features
    budget: RetryBudget
    responses: StoredResponses


class Answer:
    """The attempts of one request. home: the only replica that can answer; None for any. tried:
    replicas that failed with it or refused it."""

    def __init__(
        self,
        parts: AnswerParts,
        request: RoutedRequest,
        client: ClientResponse,
        choice: ModelChoice,
        key: bytes,
        home: Replica | None,
    ) -> None:
        self._fleet = parts.fleet
        self._admission = parts.admission
        self._metrics = parts.metrics
        self._features = parts.features
        self._budget = parts.budget
        self._responses = parts.responses
        self._resumes = parts.fleet.resumes
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._client = client
        self._choice = choice
        self._client_key = key
        self._home = home
        lanes = self._features.lanes
        self._is_long = lanes is not None and lanes.is_long(request.prompt_tokens)
        self._key = request.key()
        self._tried: set[Replica] = set()
        self._failures = Failures()
        self._resume_until_s = 0.0
        self._is_refused = self._was_held = False
        self._refused: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
        self._fingerprint = ""
        self._last_s = 0.0  # when the last event of the stream came
        self._interruption: Interruption | None = None
        self._is_resuming = False  # another replica was chosen and has sent nothing yet

    async def run(self) -> None:
        """Try replicas until one has answered."""
        try:
            await self._run()
        finally:
            self._end_interruption()

    async def _run(self) -> None:
        request = self._request
        while True:
            if self._choice.needs_summary:
                await self._summarize()
            async with before_deadline(request):
                replica = await self._replica()
            if replica is None:
                await self._give_up()
                return
            self._tried.add(replica)
            try:
                sleepers = self._features.sleepers
                if sleepers is not None and replica.state == ASLEEP:
                    async with before_deadline(request):
                        await sleepers.wake(self._fleet, replica, lambda: self._client.is_gone)
                request.waited(self._loop.time())
                with self._attempt(replica) as attempt:
                    self._fleet.policy.sent(replica, self._key)
                    if await self._try(attempt):
                        return
            except ReplicaFault as fault:
                self._note(replica, fault)

    async def _try(self, attempt: Attempt) -> bool:
        """Run one attempt; return whether the client has its answer. Raises ReplicaFault."""
        hedger = self._features.hedger
        if hedger is not None and hedger.hedges(self._request) and self._is_fresh:
            return await self._race(hedger, attempt)
        await attempt.send(self._request.body(), self._sent)
        return await self._take(attempt)

    async def _race(self, hedger: Hedger, first: Attempt) -> bool:
        """Run an attempt, and a second one where its first tokens are late; as _try."""
        race = Race(hedger, self._request, first, self._request.body())
        delay_s = hedger.delay_s(first.replica, self._request, self._fleet.equals(first.replica))
        try:
            if await race.is_late(delay_s):
                spare = self._spare(hedger, first.replica)
                if spare is not None:
                    return await self._hedge(race, spare)
            await race.first_alone()
        finally:
            await race.close()
        return await self._take(first)

    async def _hedge(self, race: Race, replica: Replica) -> bool:
        """Send the request to a second replica as well, and pass on what begins first."""
        self._tried.add(replica)
        with self._attempt(replica) as second:
            self._fleet.policy.sent(replica, self._key)
            winner = await race.run(second, self._failed_in_race)
            await race.close()
            for attempt in (race.first, second):
                if attempt is not winner and attempt.replica not in self._failures.at:
                    self._note_first_tokens(attempt)  # or for how long it was waited for
                    attempt.cancel()
                    self._tried.discard(attempt.replica)
            outcome = "failed" if winner is None else "won" if winner is second else "lost"
            self._metrics.hedges.labels(outcome).inc()
            if winner is None:
                return False
            try:
                return await self._take(winner)
            except ReplicaFault as fault:
                self._failed_in_race(winner, fault)
                return False

    def _failed_in_race(self, attempt: Attempt, fault: ReplicaFault) -> None:
        """End an attempt that failed outside of its own context."""
        attempt.fail(fault)
        self._note(attempt.replica, fault)

    def _spare(self, hedger: Hedger, first: Replica) -> Replica | None:
        """Return a replica for a hedge; None where there is none or the budget is used up."""
        request, fleet = self._request, self._fleet
        found = fleet.choose(
            self._key,
            request.model,
            fingerprint=first.fingerprint(request.model),
            exclude={first, *self._tried},
            max_long=self._max_long,
        )
        if found is None:
            self._metrics.hedges.labels("no_replica").inc()
        elif not hedger.budget.take(hedger.cost_tokens(request)):
            self._metrics.hedges.labels("no_budget").inc()
            return None
        else:
            self._metrics.hedged_tokens.inc(hedger.cost_tokens(request))
        return found

    def _note_first_tokens(self, attempt: Attempt) -> None:
        """Learn how long a replica takes to the first token."""
        request, times = self._request, attempt.replica.first_token_times
        times.note(request.prompt_tokens, attempt.age_s, request.whole_tokens)

    def _begin_output(self, attempt: Attempt) -> None:
        """A stream has its first tokens."""
        load, lanes = attempt.load, self._features.lanes
        if not self._request.num_delivered and self._request.transfer is None:
            self._fleet.began(attempt.replica, load, attempt.age_s)
        attempt.replica.gave_output(load)
        if attempt.replica.breaker.gave_output():
            self._fleet.became_available()
        if not self._request.num_delivered:
            self._request.first_token_s = self._loop.time()
            self._note_first_tokens(attempt)
        if load.is_long:
            attempt.replica.computed_prompt(load)
            self._fleet.became_available()
        elif lanes is not None:
            lanes.began_short(attempt.age_s)

    async def _take(self, attempt: Attempt) -> bool:
        """Pass on a response after its head has arrived; as _try."""
        request, client, exchange = self._request, self._client, attempt.exchange
        if exchange.status == 200 and request.is_stream:
            if not client.started:
                self._fingerprint = attempt.replica.fingerprint(request.model)
            if self._choice.judges_stream:
                return await self._judged_stream(attempt)
            await self._stream(attempt)
            return True
        body = attempt.early + await exchange.body()
        status, error = exchange.status, read_error(body) or ErrorBody()
        code = error.code if isinstance(error.code, str) else ""
        if request.form.is_overloaded(status) or code in _LEAVING:
            self._refused = (status, exchange.headers, body)
            self._is_refused = True
            if code == "shutting_down":  # known before the next probe
                attempt.replica.state = "draining"
            return False
        if code in _FAILED or (status >= 500 and status != 504):
            self._refused = (status, exchange.headers, body)
            raise ReplicaFault(f"it answered {status} {code}".rstrip(), is_suspect=True)
        if client.started:  # it accepted the same request before
            message = error.message or f"status {status}"
            raise Refusal(502, "resume_refused", f"the stream cannot go on: {message}")
        if self._choice.is_changed_by(status, error, body):
            self._begin_anew()
            return False
        if status == 200 and request.route.generates:
            self._note_first_tokens(attempt)
        self._read_whole(attempt.replica, status, body)
        await client.whole(status, exchange.headers, self._choice.shown(status, body))
        return True

    async def _summarize(self) -> None:
        """Have the earlier part of a prompt that does not fit summarized. Raises Refusal."""
        request, lanes = self._request, self._features.lanes
        self._client.added.append(await self._choice.summarize())
        self._key = request.key()
        self._is_long = lanes is not None and lanes.is_long(request.prompt_tokens)

    def _begin_anew(self) -> None:
        """Another model is asked: whatever replicas refused before, they were not asked this."""
        self._key = self._request.key()
        self._tried.clear()
        self._refused = None

    def _read_whole(self, replica: Replica, status: int, body: bytes) -> None:
        """Read what the router needs of a whole answer before it is passed on."""
        request = self._request
        if self._features.counts_usage and not request.route.is_free:
            used = request.form.used_tokens(body)
            if used is not None:
                request.used_prompt_tokens, request.used_output_tokens = used
            elif status != 200:
                request.used_prompt_tokens = request.used_output_tokens = 0
            else:
                request.used_output_tokens = request.reserved_tokens - request.prompt_tokens
        if request.path == RESPONSES and status == 200 and (id_ := created_id(body)):
            self._responses.note(self._client_key, id_, replica)

    async def _stream(self, attempt: Attempt) -> None:
        request, client, replica = self._request, self._client, attempt.replica
        if request.why_not:
            await self._pass_on(attempt)
            return
        exchange = attempt.exchange
        blocks = EventBlocks(shows_comments=request.shows_comments)
        received = attempt.early or await exchange.read()
        while received:
            for delta in blocks.push(received):
                if delta.error is not None:
                    _check_final(delta.error)
                if delta.cursor is not None:
                    self._count(attempt, len(delta.cursor.output_ids))
                if not client.started:
                    await client.start(200, exchange.headers)
                shown = delta.blocks
                if self._choice.adds_event:
                    shown = self._choice.shown_event(shown)
                if delta.is_last:
                    self._has_event(self._loop.time())
                    await client.finish(shown)
                    return
                # The journal first: a client that leaves in between needs no journal.
                if delta.cursor is not None:
                    request.delivered(delta.cursor)
                await client.write(shown)
            received = await exchange.read()
        raise ReplicaFault(f"{replica.name} ended the stream early", is_suspect=True)

    async def _judged_stream(self, attempt: Attempt) -> bool:
        """Hold a stream until it is complete; as _try. The client has nothing of it before."""
        request, client, exchange = self._request, self._client, attempt.exchange
        blocks = EventBlocks(shows_comments=request.shows_comments)
        held, num_tokens, is_complete = list[bytes](), 0, False
        received = attempt.early or await exchange.read()
        while received:
            for delta in blocks.push(received):
                if delta.error is not None:
                    _check_final(delta.error)
                if delta.cursor is not None:
                    self._count(attempt, len(delta.cursor.output_ids))
                    num_tokens += len(delta.cursor.output_ids)
                held.append(delta.blocks)
                is_complete = is_complete or delta.is_last
            received = await exchange.read()
        if not is_complete:
            raise ReplicaFault(f"{attempt.replica.name} ended the stream early", is_suspect=True)
        events = b"".join(held)
        if self._choice.is_changed_by_stream(events, num_tokens):
            self._begin_anew()
            return False
        request.num_delivered = num_tokens
        await client.start(200, exchange.headers)
        await client.finish(self._choice.shown_events(events))
        return True

    async def _pass_on(self, attempt: Attempt) -> None:
        """Stream what cannot be continued."""
        client, request, exchange = self._client, self._request, attempt.exchange
        start = b"" if request.path == RESPONSES else None
        last: deque[bytes] = deque(maxlen=_LAST_PIECES)
        counts_usage = self._features.counts_usage
        while received := await exchange.read():
            attempt.replica.progressed(self._loop.time())
            if start is not None:  # the first event has the id
                start += received
                if id_ := created_id(start):
                    self._responses.note(self._client_key, id_, attempt.replica)
                start = None if id_ or len(start) > MAX_START_BYTES else start
            if not client.started:
                await client.start(200, exchange.headers)
            if counts_usage:  # at least a token an event, until the usage is known
                last.append(received)
                num_events = received.count(b"\n\n") or received.count(b"\n")
                request.used_output_tokens = max(request.used_output_tokens, 0) + num_events
            await client.write(self._choice.shown_event(received))
        if not client.started:
            await client.start(200, exchange.headers)
        if (used := request.form.used_tokens(b"".join(last))) is not None:
            request.used_prompt_tokens, request.used_output_tokens = used
        await client.finish()

    def _count(self, attempt: Attempt, num_tokens: int) -> None:
        now_s, load = self._loop.time(), attempt.load
        if load.is_new:
            self._begin_output(attempt)
        attempt.replica.progressed(now_s)
        self._has_event(now_s)
        expected = self._request.output_tokens
        computed = num_tokens + max(load.tokens - expected, 0)  # with the first, the prompt
        attempt.replica.reduce(load, computed)
        self._admission.drained(computed, now_s)
        self._metrics.tokens.inc(num_tokens)

    def _has_event(self, now_s: float) -> None:
        """An event of the stream came."""
        if self._interruption is not None:
            self._metrics.resumed_after(self._interruption, now_s)
            self._end_interruption()
        self._last_s = now_s

    def _end_interruption(self) -> None:
        """The stream goes on, or has ended without that."""
        self._interruption = None
        self._stop_resuming()

    def _stop_resuming(self) -> None:
        """Hold up no new request any more."""
        if self._is_resuming:
            self._is_resuming = False
            self._resumes.ended(self._request.model)

    def _sent(self) -> None:
        """A request that continues the stream was sent."""
        if self._interruption is not None:
            self._interruption.sent(self._loop.time())

    def _note(self, replica: Replica, fault: ReplicaFault) -> None:
        """A replica has failed."""
        self._metrics.faults.labels(replica.name).inc()
        self._fleet.log.warning(
            "replica failed with a request",
            replica=replica.name,
            reason=str(fault),
            tokens=self._request.num_delivered,
            started=self._client.started,
        )
        self._failures.note(replica, fault, self._request.num_delivered)
        now_s = self._loop.time()
        self._resume_until_s = now_s + self._fleet.settings.resume_s
        self._stop_resuming()
        if self._client.started and self._interruption is None:
            last_s = self._last_s or now_s
            self._interruption = Interruption(fault.cause, last_s=last_s, noted_s=now_s)

    async def _replica(self) -> Replica | None:
        """Return the next replica to try; None where the request ends here."""
        if self._failures.are_final:
            return None
        if self._client.started or self._failures.are_at_two:
            return await self._successor()
        if self._home is not None:
            is_able = self._home.is_available(self._loop.time())
            return self._home if is_able and self._home not in self._tried else None
        found = await self._place()
        if found is not None and self._tried:
            if not self._budget.take():
                return None
            self._metrics.retries.labels("failed" if self._failures.reasons else "refused").inc()
        return found

    async def _place(self) -> Replica | None:
        """Return an available replica; a long prompt waits for one with room."""
        model, lanes = self._request.model, self._features.lanes

        def choose() -> Replica | None:
            return self._fleet.choose(
                self._key, model, exclude=self._tried, max_long=self._max_long
            )

        if not (self._was_held or self._request.route.is_free):
            self._was_held = await self._resumes.hold(model)
        if self._fleet.settings.wait_s and not self._failures.reasons:
            await self._wait_for_first(model)
        if lanes is None or not self._is_long:
            return choose()
        return await lanes.place(
            self._fleet,
            choose,
            lambda: self._fleet.is_served(model, self._tried),
            lambda: self._client.is_gone,
        )

    async def _wait_for_first(self, model: str) -> None:
        """Wait while no replica is available, such as one that is still to be started."""
        fleet = self._fleet
        until_s = self._loop.time() + fleet.settings.wait_s
        with fleet.waiting():
            while not fleet.is_served(model) and self._choice.may_be_served():
                if self._client.is_gone:
                    raise ClientGone("the client has closed its connection")
                left_s = until_s - self._loop.time()
                if left_s <= 0:
                    return
                await fleet.wait_for_change(min(left_s, _RETRY_EVERY_S))

    @property
    def _is_fresh(self) -> bool:
        """Whether it may go to a second replica at once: no replica has failed with it."""
        return not self._client.started and not self._failures.reasons

    @property
    def _max_long(self) -> int | None:
        lanes = self._features.lanes
        return lanes.limit if lanes is not None and self._is_long else None

    def _attempt(self, replica: Replica) -> Attempt:
        found = Attempt(self._fleet, replica, self._request, self._client, is_long=self._is_long)
        self._fleet.weigh(replica, self._key, found.load)
        if self._request.brings_blocks:  # its prompt is computed
            found.load.new_tokens = 0
        return found

    async def _successor(self) -> Replica | None:
        """Return a replica that can continue the stream, or compute anew what two others failed
        with; waits for one for some time."""
        request, fleet, started = self._request, self._fleet, self._client.started
        if started and request.why_not:
            return None
        if self._is_refused:  # the successor was full
            self._is_refused = False
            await fleet.wait_for_change(_RETRY_EVERY_S)
        while True:
            if self._client.is_gone:
                raise ClientGone("the client has closed its connection")
            now_s = self._loop.time()
            if not started and now_s > self._resume_until_s:
                return None
            # A replica that failed is the last choice: it was fenced and checked since.
            barred, failed_at = self._failures.barred(fleet.replicas.values()), self._failures.at
            may_return = self._failures.are_at_two or (
                self._interruption is not None and self._interruption.resumed_s(now_s) > _RETURN_S
            )
            for exclude in (barred | failed_at, barred) if may_return else (barred | failed_at,):
                found = fleet.choose(
                    self._key,
                    request.model,
                    fingerprint=self._fingerprint,
                    exclude=exclude,
                    max_long=None if started else self._max_long,
                    spreads=started,
                )
                if found is not None:
                    metrics = self._metrics
                    (metrics.resumed if started else metrics.retries.labels("failed")).inc()
                    if started and not self._is_resuming:
                        self._is_resuming = True
                        self._resumes.began(request.model)
                    return found
            left_s = self._resume_until_s - now_s
            # Where replicas are started on demand, one that is not known yet may have it.
            is_coming = fleet.settings.wait_s > 0
            is_known = not started or fleet.has_fingerprint(request.model, self._fingerprint)
            if left_s <= 0 or not (is_coming or is_known):
                return None
            with fleet.waiting():
                await fleet.wait_for_change(min(left_s, _RETRY_EVERY_S))

    async def _give_up(self) -> None:
        """End a request that no replica has answered. Raises Refusal."""
        client = self._client
        if client.started:
            raise self._broken()
        reasons = self._failures.reasons
        if self._failures.are_final:
            raise Refusal(
                502,
                "replicas_failed",
                f"{self._failures.summary}, so it is tried no more",
            )
        if self._refused is not None:
            status, headers, body = self._refused
            await client.whole(status, headers, body)
            return
        if reasons:
            raise Refusal(
                503,
                "replica_failed",
                f"a replica failed with this request and no other is available "
                f"({reasons[0]}); try again",
                retry_after_s=self._admission.retry_after_s(),
            )
        if self._home is not None:
            raise home_unavailable(needed_id(self._request), self._home)
        raise self._choice.unavailable(self._admission)

    def _broken(self) -> Refusal:
        """Return the error event of a stream that cannot go on."""
        request = self._request
        if self._failures.are_final:
            reason, why = "failures", self._failures.summary
        elif request.why_not:
            reason = "not_continuable"
            why = f"its replica failed, and it cannot be continued exactly: {request.why_not}"
        elif self._failures.are_at_two:
            reason, why = "failures", "two replicas failed with it, and neither has returned"
        else:
            reason = "no_equal_replica"
            why = (
                f"its replica failed, and no other replica with fingerprint {self._fingerprint} is "
                "available; only that one gives the same answer"
            )
        self._metrics.broken.labels(reason).inc()
        return Refusal(503, "stream_broken", f"the stream cannot go on: {why}")


def _check_final(error: ErrorBody) -> None:
    """Raise ReplicaFault for an error after which another replica can go on."""
    code = error.code or ""
    if code in _LEAVING or code in _FAILED:
        raise ReplicaFault(f"{code}: {error.message}", is_suspect=code in _FAILED, cause="error")
