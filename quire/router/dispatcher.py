"""Dispatcher: send a request to a replica, and to another where that fails.

A whole answer is passed on once it is complete, so it can be computed anew at any time. A stream
that has output goes on at another replica of its fingerprint, from the tokens that were delivered.
Always holds: the client gets each byte of an answer once and in order; a request is tried on no
third replica after two failed with it; what was refused was not computed, so refusals do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from quire.router.admission import Admission
from quire.router.breaker import RetryBudget
from quire.router.client_response import HOP_BY_HOP, ClientResponse
from quire.router.event_blocks import ErrorBody, EventBlocks, error_in
from quire.router.faults import ClientGone, Refusal, ReplicaFault, StaleConnection
from quire.router.fleet import Fleet
from quire.router.http_client import Exchange
from quire.router.replica import Load, Replica
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics

MAX_FAILURES = 2
# Error codes of a replica that is ending: another can go on, and the request is not the cause.
_LEAVING = frozenset({"shutting_down", "overloaded", "queue_timeout"})
# Error codes of a replica that failed with the request.
_FAILED = frozenset({"worker_error", "device_lost", "step_row_error", "internal_error"})
_RETRY_EVERY_S = 0.25
# So long a stream waits for another replica before it goes on at the one that failed.
_RETURN_S = 1.0


HandOver = Callable[[RoutedRequest, ClientResponse], Awaitable[dict[str, Any] | None]]


class Attempt(AbstractContextManager["Attempt"]):
    """One exchange of a request with a replica, counted as load while it lasts."""

    def __init__(self, fleet: Fleet, replica: Replica, request: RoutedRequest) -> None:
        self.replica = replica
        self._fleet = fleet
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._cut_reason = ""
        self.exchange: Exchange | None = None
        began_s = self._loop.time()
        prompt = request.prompt_tokens
        self.load = Load(
            tokens=prompt + request.output_tokens,
            cut=self._cut,
            began_s=began_s,
            last_s=lambda: began_s if self.exchange is None else self.exchange.last_s,
            is_paused=lambda: self.exchange is not None and self.exchange.is_paused,
        )

    def __enter__(self) -> Attempt:
        self.replica.begin(self.load)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.exchange is not None:
            self.exchange.close()
        self.replica.end(self.load)
        if isinstance(error, ReplicaFault):
            self._fleet.suspect(self.replica)
        elif error is None:
            self.replica.breaker.succeeded()
        else:
            self.replica.breaker.gave_up()

    async def send(self, body: bytes, client: ClientResponse) -> Exchange:
        """Send the request and wait for the head of the response. Raises ReplicaFault."""
        request, pool = self._request, self._fleet.pool(self.replica)
        headers = [header for header in request.headers if header[0] not in HOP_BY_HOP]
        path = request.path.encode()
        for is_fresh in (False, True):
            exchange = await pool.send(b"POST", path, headers, body, is_fresh=is_fresh)
            self.exchange = exchange
            client.on_gone = exchange.fail
            if self._cut_reason:
                exchange.fail(ReplicaFault(self._cut_reason, is_suspect=True))
            if client.is_gone:
                raise ClientGone("the client has closed its connection")
            try:
                await exchange.head()
            except StaleConnection:
                continue
            return exchange
        raise ReplicaFault("it closes each connection", is_suspect=False)

    def _cut(self, reason: str) -> None:
        self._cut_reason = reason
        if self.exchange is not None:
            self.exchange.fail(ReplicaFault(reason, is_suspect=True))


class Dispatcher:
    """Answers requests of clients. hand_over: has a prompt computed first (prefill_pairs.py)."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: RouterMetrics,
        hand_over: HandOver | None = None,
    ) -> None:
        self._hand_over = hand_over
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._budget = RetryBudget(fleet.settings.max_retry_share)
        self._loop = asyncio.get_running_loop()

    async def answer(self, request: RoutedRequest, client: ClientResponse) -> None:
        """Answer one request. Raises Refusal and ClientGone."""
        self._budget.requested()
        if self._hand_over is not None:
            request.transfer = await self._hand_over(request, client)
        await Answer(self, request, client).run()


class Answer:
    """The attempts of one request. tried: replicas that failed with it or refused it."""

    def __init__(
        self, dispatcher: Dispatcher, request: RoutedRequest, client: ClientResponse
    ) -> None:
        self._fleet = dispatcher._fleet
        self._admission = dispatcher._admission
        self._metrics = dispatcher._metrics
        self._budget = dispatcher._budget
        self._loop = dispatcher._loop
        self._request = request
        self._client = client
        self._key = request.key()
        self._tried: set[Replica] = set()
        self._failed: list[str] = []
        self._failed_at: set[Replica] = set()
        self._resume_until_s = 0.0
        self._is_refused = False
        self._refused: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
        self._fingerprint = ""
        self._failed_s = 0.0

    async def run(self) -> None:
        """Try replicas until one has answered."""
        while True:
            replica = await self._replica()
            if replica is None:
                await self._give_up()
                return
            self._tried.add(replica)
            try:
                with Attempt(self._fleet, replica, self._request) as attempt:
                    self._fleet.policy.sent(replica, self._key)
                    if await self._try(attempt):
                        return
            except ReplicaFault as fault:
                self._note(replica, fault)

    async def _try(self, attempt: Attempt) -> bool:
        """Run one attempt; return whether the client has its answer. Raises ReplicaFault."""
        request, client = self._request, self._client
        exchange = await attempt.send(request.body(), client)
        if exchange.status == 200 and request.is_stream:
            if not self._client.started:
                self._fingerprint = attempt.replica.fingerprint(request.model)
            await self._stream(attempt, exchange)
            return True
        body = await exchange.body()
        status, code = exchange.status, error_in(body).code or ""
        if status == 503 or code in _LEAVING:
            self._refused = (status, exchange.headers, body)
            self._is_refused = True
            return False
        if code in _FAILED or (status >= 500 and status != 504):
            self._refused = (status, exchange.headers, body)
            raise ReplicaFault(f"it answered {status} {code}".rstrip(), is_suspect=True)
        if client.started:  # it accepted the same request before
            message = error_in(body).message or f"status {status}"
            raise Refusal(502, "resume_refused", f"the stream cannot go on: {message}")
        await client.whole(status, exchange.headers, body)
        return True

    async def _stream(self, attempt: Attempt, exchange: Exchange) -> None:
        request, client, replica = self._request, self._client, attempt.replica
        if request.why_not:
            await self._pass_on(attempt, exchange)
            return
        blocks = EventBlocks(shows_comments=request.shows_comments)
        while received := await exchange.read():
            for delta in blocks.push(received):
                if delta.error is not None:
                    _check_final(delta.error)
                if delta.cursor is not None:
                    self._count(attempt, len(delta.cursor.output_ids))
                if not client.started:
                    await client.start(200, exchange.headers)
                if delta.is_last:
                    await client.finish(delta.blocks)
                    return
                # The journal first: a client that leaves in between needs no journal.
                if delta.cursor is not None:
                    request.delivered(delta.cursor)
                await client.write(delta.blocks)
        raise ReplicaFault(f"{replica.name} ended the stream early", is_suspect=True)

    async def _pass_on(self, attempt: Attempt, exchange: Exchange) -> None:
        """Stream what cannot be continued."""
        client = self._client
        while received := await exchange.read():
            attempt.replica.progressed(self._loop.time())
            if not client.started:
                await client.start(200, exchange.headers)
            await client.write(received)
        if not client.started:
            await client.start(200, exchange.headers)
        await client.finish()

    def _count(self, attempt: Attempt, num_tokens: int) -> None:
        now_s, load = self._loop.time(), attempt.load
        attempt.replica.progressed(now_s)
        if self._failed_s:
            self._metrics.resume_seconds.observe(now_s - self._failed_s)
            self._failed_s = 0.0
        expected = self._request.output_tokens
        computed = num_tokens + max(load.tokens - expected, 0)  # with the first, the prompt
        attempt.replica.reduce(load, computed)
        self._admission.drained(computed, now_s)
        self._metrics.tokens.inc(num_tokens)

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
        if fault.is_suspect:
            self._failed.append(f"{replica.name}: {fault}")
        self._failed_at.add(replica)
        if self._client.started:
            now_s = self._loop.time()
            self._failed_s = self._failed_s or now_s
            self._resume_until_s = now_s + self._fleet.settings.resume_s

    async def _replica(self) -> Replica | None:
        """Return the next replica to try; None where the request ends here."""
        if len(self._failed) >= MAX_FAILURES:
            return None
        if self._client.started:
            return await self._successor()
        found = self._fleet.choose(self._key, self._request.model, exclude=self._tried)
        if found is not None and self._tried:
            if not self._budget.take():
                return None
            self._metrics.retries.labels("failed" if self._failed else "refused").inc()
        return found

    async def _successor(self) -> Replica | None:
        """Return a replica that can continue the stream; waits for one for some time."""
        request, fleet = self._request, self._fleet
        if request.why_not:
            return None
        if self._is_refused:  # the successor was full
            self._is_refused = False
            await fleet.wait_for_change(_RETRY_EVERY_S)
        while True:
            if self._client.is_gone:
                raise ClientGone("the client has closed its connection")
            now_s = self._loop.time()
            # A replica that failed is the last choice: it was fenced and checked since.
            may_return = self._failed_s and now_s - self._failed_s > _RETURN_S
            for exclude in (self._failed_at, ()) if may_return else (self._failed_at,):
                found = fleet.choose(
                    self._key, request.model, fingerprint=self._fingerprint, exclude=exclude
                )
                if found is not None:
                    self._metrics.resumed.inc()
                    return found
            if now_s >= self._resume_until_s or not fleet.has_fingerprint(
                request.model, self._fingerprint
            ):
                return None
            await fleet.wait_for_change(min(self._resume_until_s - now_s, _RETRY_EVERY_S))

    async def _give_up(self) -> None:
        """End a request that no replica has answered. Raises Refusal."""
        request, client = self._request, self._client
        if client.started:
            raise self._broken()
        if len(self._failed) >= MAX_FAILURES:
            raise Refusal(
                502,
                "replicas_failed",
                f"{len(self._failed)} replicas failed with this request, so it is tried on no "
                f"other ({'; '.join(self._failed)})",
            )
        if self._refused is not None:
            status, headers, body = self._refused
            await client.whole(status, headers, body)
            return
        if self._failed:
            raise Refusal(
                503,
                "replica_failed",
                f"a replica failed with this request and no other is available "
                f"({self._failed[0]}); try again",
                retry_after_s=self._admission.retry_after_s(),
            )
        raise self._admission.unavailable(request.model)

    def _broken(self) -> Refusal:
        """Return the error event of a stream that cannot go on."""
        request = self._request
        if len(self._failed) >= MAX_FAILURES:
            reason = "two_failures"
            why = f"two replicas failed with it ({'; '.join(self._failed)})"
        elif request.why_not:
            reason = "not_continuable"
            why = f"its replica failed, and it cannot be continued exactly: {request.why_not}"
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
        raise ReplicaFault(f"{code}: {error.message}", is_suspect=code in _FAILED)
