"""Answer: the attempts of one request, until the client has its answer.

A whole answer is passed on once it is complete, so it can be computed anew at any time. A stream
that has output goes on at another replica of its fingerprint, from the tokens that were delivered
(placement.py chooses it, stream_relay.py passes events on). After a final error of one replica one
other is asked, which shows whether the replica or the request is its cause. Always holds: the
client gets each byte of an answer once and in order.
"""

from __future__ import annotations

import asyncio

from quire.base.http_apis import header_in
from quire.router.answer_state import AnswerState
from quire.router.api_forms import error_code, error_message, is_final, may_end_engines
from quire.router.attempt import Attempt
from quire.router.deadlines import before_deadline
from quire.router.faults import (
    HasNoRoom,
    NoFiles,
    OtherFingerprint,
    ProcessStopped,
    Refusal,
    ReplicaFault,
)
from quire.router.hedge_race import Race
from quire.router.hedging import Hedger
from quire.router.http_client import Exchange
from quire.router.placement import Placement
from quire.router.replica import ASLEEP, Replica
from quire.router.routes import RESPONSES
from quire.router.stored_responses import created_id, home_unavailable, needed_id
from quire.router.stream_relay import DRAINS, FAILED, LEAVING, StreamRelay

# Status, headers and body.
_Response = tuple[int, list[tuple[bytes, bytes]], bytes]


class Answer:
    """The attempts of one request."""

    def __init__(self, state: AnswerState) -> None:
        self._state, parts = state, state.parts
        self._placement, self._relay = Placement(state), StreamRelay(state)
        self._fleet, self._metrics, self._features = parts.fleet, parts.metrics, parts.features
        self._admission = parts.admission
        self._request, self._client, self._choice = state.request, state.client, state.choice
        self._loop = asyncio.get_running_loop()
        self._refused: _Response | None = None
        self._final: _Response | None = None  # the first final error
        self._asks_other = False  # after a final error

    async def run(self) -> None:
        """Try replicas until one has answered."""
        try:
            await self._run()
        finally:
            self._state.continuation.end()
            self._state.leave_place()

    async def _run(self) -> None:
        request, state = self._request, self._state
        while True:
            if self._choice.needs_summary:
                await self._summarize()
            replica = await self._next()
            if replica is None:
                await self._give_up()
                return
            state.tried.add(replica)
            try:
                await self._wake(replica)
                request.waited(self._loop.time())
                with self._placement.attempt(replica) as attempt:
                    self._fleet.policy.sent(replica, state.key)
                    if await self._try(attempt):
                        return
            except ReplicaFault as fault:
                self._note(replica, fault)

    async def _next(self) -> Replica | None:
        """Return the replica of the next attempt; None where there is none."""
        if self._state.doubted is not None and not self._client.started:
            asks_other, self._asks_other = self._asks_other, False
            return self._placement.other() if asks_other else None
        async with before_deadline(self._request):
            return await self._placement.next()

    async def _wake(self, replica: Replica) -> None:
        """Wake a replica that sleeps. Raises ReplicaFault, Refusal and ClientGone."""
        sleepers = self._features.sleepers
        if sleepers is None or replica.state != ASLEEP:
            return
        with self._admission.waiting(self._request.expected_tokens):
            async with before_deadline(self._request):
                await sleepers.wake(self._fleet, replica, lambda: self._client.is_gone)
        if not replica.is_up:  # its number may be that of another one by now
            raise ReplicaFault(f"it is {replica.state}", is_suspect=False)

    async def _try(self, attempt: Attempt) -> bool:
        """Run one attempt; return whether the client has its answer. Raises ReplicaFault."""
        hedger = self._features.hedger
        may_hedge = self._state.is_fresh and self._state.doubted is None
        if hedger is not None and may_hedge and hedger.hedges(self._request):
            return await self._race(hedger, attempt)
        await attempt.send(self._request.body(), self._sent)
        return await self._take(attempt)

    def _sent(self) -> None:
        now_s = self._loop.time()
        self._request.note_sent(now_s)
        self._state.continuation.sent(now_s)

    async def _race(self, hedger: Hedger, first: Attempt) -> bool:
        """Run an attempt, and a second one where its first tokens are late; as _try."""
        race = Race(hedger, self._request, first, self._sent)
        delay_s = hedger.delay_s(first.replica, self._request, self._fleet.equals(first.replica))
        try:
            if await race.is_late(delay_s):
                spare = self._placement.spare(hedger, first.replica)
                if spare is not None:
                    return await self._hedge(race, spare)
            await race.first_alone()
        finally:
            await race.close()
        return await self._take(first)

    def _note_late(self, attempt: Attempt) -> None:
        """Learn from the loser of a race: its first token takes at least as long as was waited."""
        attempt.note_first_tokens()
        if self._request.is_stream and self._request.transfer is None:
            self._fleet.note_first_token(attempt.replica, attempt.load, attempt.age_s)

    async def _hedge(self, race: Race, replica: Replica) -> bool:
        """Send the request to a second replica as well, and pass on what begins first."""
        state = self._state
        state.tried.add(replica)
        with self._placement.attempt(replica) as second:
            self._fleet.policy.sent(replica, state.key)
            winner = await race.run(second, self._failed_in_race)
            await race.close()
            for attempt in (race.first, second):
                if attempt is not winner and attempt.replica not in state.failures.at:
                    if attempt is race.first:
                        self._note_late(attempt)
                    attempt.cancel()
                    state.tried.discard(attempt.replica)
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

    async def _take(self, attempt: Attempt) -> bool:
        """Pass on a response after its head has arrived; as _try."""
        request, client, exchange = self._request, self._client, attempt.exchange
        if exchange.status == 200:
            self._check_fingerprint(attempt)
        if exchange.status == 200 and request.is_stream and not _is_json(exchange):
            if not self._choice.judges_stream:
                await self._relay.stream(attempt)
                return True
            is_passed_on = await self._relay.judged(attempt)
            if not is_passed_on:
                self._begin_anew()
            return is_passed_on
        body = attempt.early + await exchange.body()
        status, code = exchange.status, error_code(exchange.headers)
        # 429: a client sends a new request again later; one that a replica had waits here.
        waits = client.started or self._placement.is_displaced
        has_no_room = request.form.is_overloaded(status) or (waits and status == 429)
        if has_no_room or code in LEAVING:
            self._refused = (status, exchange.headers, body)
            request.note_refused(attempt.load.began_s)
            why, is_drain = f"{attempt.replica.name} answered {status} {code}", code == DRAINS
            self._placement.refused(attempt.replica, why.rstrip(), is_drain=is_drain)
            if is_drain:  # known before the next probe
                attempt.replica.state = "draining"
            return False
        has_final_error = is_final(status, exchange.headers)
        if not has_final_error and (code in FAILED or (status >= 500 and status != 504)):
            self._refused = (status, exchange.headers, body)
            raise ReplicaFault(f"it answered {status} {code}".rstrip(), is_suspect=True)
        if has_final_error and self._doubts(attempt, code, (status, exchange.headers, body)):
            return False
        if client.started:  # it accepted the same request before
            message = error_message(body) or f"status {status}"
            raise Refusal(502, "resume_refused", f"the stream cannot go on: {message}")
        if status == 200:
            self._state.note_answer(self._loop.time())
        if self._choice.is_changed_by(status, code, body):
            self._begin_anew()
            return False
        if status == 200 and not request.route.is_free:
            self._admission.drained(request.expected_tokens, self._loop.time())
            if request.route.generates:
                attempt.has_answer()
        if has_final_error:
            attempt.cancel()
        self._read_whole(attempt.replica, status, body)
        await client.whole(status, exchange.headers, self._choice.shown(status, body))
        return True

    def _check_fingerprint(self, attempt: Attempt) -> None:
        """Have a replica checked that answers with another fingerprint than it had. Raises
        ReplicaFault where the stream had the former one."""
        found, wanted = attempt.fingerprint, self._state.fingerprint
        known = attempt.replica.fingerprint(self._request.model)
        if known and found != known:
            self._fleet.recheck_models(attempt.replica)
        if wanted and found != wanted:
            raise OtherFingerprint(found)

    def _doubts(self, attempt: Attempt, code: str, response: _Response) -> bool:
        """Return whether one other replica is asked after the first final error of a request: the
        replica may be its cause, which shows once the other answers. Where a replica has failed
        with it before, a third one would get it: none is asked. `response` is kept."""
        has_failed = self._client.started or bool(self._state.failures.reasons)
        if self._final is not None or has_failed or may_end_engines(code):
            return False
        attempt.cancel()
        self._final = response
        self._state.doubted, self._asks_other = attempt.replica, True
        return True

    async def _summarize(self) -> None:
        """Have the earlier part of a prompt that does not fit summarized. Raises Refusal."""
        self._client.added.append(await self._choice.summarize())
        self._state.read_prompt()

    def _begin_anew(self) -> None:
        """Another model is asked: whatever replicas refused before, they were not asked this."""
        self._request.begin_anew()
        self._state.key = self._request.key()
        self._state.tried.clear()
        self._placement.begin_anew()
        self._refused = self._final = self._state.doubted = None

    def _read_whole(self, replica: Replica, status: int, body: bytes) -> None:
        """Read what the router needs of a whole answer before it is passed on."""
        request, state = self._request, self._state
        if self._features.counts_usage and not request.route.is_free:
            used = request.form.used_tokens(body)
            if used is not None:
                request.used_prompt_tokens, request.used_output_tokens = used
            elif status != 200:
                request.used_prompt_tokens = request.used_output_tokens = 0
            else:
                request.used_output_tokens = request.reserved_tokens - request.prompt_tokens
        if request.path == RESPONSES and status == 200 and (id_ := created_id(body)):
            state.parts.responses.note(state.client_key, id_, replica)

    def _note(self, replica: Replica, fault: ReplicaFault) -> None:
        """Note that a replica has failed."""
        num_delivered, started = self._request.num_delivered, self._client.started
        is_refusal = isinstance(fault, HasNoRoom | NoFiles)
        is_fence = replica.state != "ready" and fault.cause in ("silence", "fence")
        if not is_refusal:
            self._metrics.faults.labels(replica.name).inc()
        if not (is_refusal or is_fence):  # that is logged once, with the number of requests
            self._fleet.log.warning(
                "replica failed with a request",
                replica=replica.name,
                reason=str(fault),
                tokens=num_delivered,
                started=started,
            )
        if isinstance(fault, ProcessStopped):  # the replica may go on, by another process
            self._state.tried.discard(replica)
        self._state.failures.note(replica, fault, num_delivered)
        self._placement.failed(fault)
        self._state.continuation.failed(fault.cause, self._loop.time(), has_output=started)

    async def _give_up(self) -> None:
        """End a request that no replica has answered. Raises Refusal."""
        client, failures = self._client, self._state.failures
        if client.started:
            raise self._broken()
        if self._state.doubted is not None and self._final is not None:
            status, headers, body = self._final
            await client.whole(status, headers, body)
            return
        if failures.are_final:
            raise Refusal(
                502,
                "replicas_failed",
                f"{failures.summary}, so it is tried no more",
                is_final=failures.blame_request,
            )
        if self._refused is not None:
            status, headers, body = self._refused
            await client.whole(status, headers, body)
            return
        if failures.reasons and self._placement.is_displaced:
            raise Refusal(
                503,
                "replica_failed",
                f"a replica failed with this request and no other is available "
                f"({failures.reasons[0]}); try again",
                retry_after_s=self._admission.retry_after_s(),
            )
        if self._state.home is not None:
            raise home_unavailable(needed_id(self._request), self._state.home)
        raise self._choice.unavailable(self._admission)

    def _broken(self) -> Refusal:
        """Return the error event of a stream that cannot go on."""
        failures = self._state.failures
        if failures.are_final:
            reason, why = "failures", failures.summary
        elif why_lost := self._state.why_lost:
            reason = "not_continuable"
            why = f"its replica failed, and it cannot be continued exactly: {why_lost}"
        elif failures.are_at_two:
            reason, why = "failures", "two replicas failed with it, and neither has returned"
        elif refusal := self._placement.why_refused:
            reason = "refused"
            why = (
                "its replica failed, and another one that gives the same answer has refused it "
                f"({refusal})"
            )
        elif (home := self._state.home) is not None:
            reason = "no_equal_replica"
            why = f"{home.name} failed, and only that one has the response that it needs"
        elif not self._state.has_events:
            reason, why = "no_equal_replica", "its replica failed, and no other one is available"
        else:
            reason = "no_equal_replica"
            why = (
                "its replica failed, and no other replica with fingerprint "
                f"{self._state.fingerprint} is available; only that one gives the same answer"
            )
        self._metrics.broken.labels(reason).inc()
        return Refusal(503, "stream_broken", f"the stream cannot go on: {why}")


def _is_json(exchange: Exchange) -> bool:
    """Return whether a response is one object, such as Ollama's to a request without a prompt."""
    return header_in(exchange.headers, b"content-type").startswith(b"application/json")
