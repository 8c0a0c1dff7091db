"""Attempt: one exchange of a request with a replica, counted as load while it lasts.

Knows no other attempt. Always holds: an attempt ends once, with a verdict for the breaker or
without one; its exchange is closed and its load is no longer counted afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from quire.base.http_apis import FINGERPRINT_HEADER, header_in
from quire.router.client_response import HOP_BY_HOP, ClientResponse
from quire.router.event_blocks import ENDED
from quire.router.faults import Blameless, ClientGone, ReplicaFault, StaleConnection
from quire.router.fleet import Fleet
from quire.router.http_client import Exchange
from quire.router.replica import Load, Replica
from quire.router.routed_request import RoutedRequest

_OUTPUT = b': {"output_ids":'


class Attempt(AbstractContextManager["Attempt"]):
    """early: what was read of the body before it is passed on. holds: `open` waits for the first
    tokens."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        request: RoutedRequest,
        client: ClientResponse,
        *,
        is_long: bool = False,
    ) -> None:
        self.replica = replica
        self._fleet = fleet
        self._request = request
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._cut_fault: ReplicaFault | None = None
        self._is_over = False
        self._exchange: Exchange | None = None
        self.early = b""
        self.holds = True
        began_s = self._loop.time()
        prompt_tokens = request.prompt_tokens + request.journal.num_known
        self.load = Load(
            tokens=prompt_tokens + request.output_tokens,
            cut=self._cut,
            began_s=began_s,
            last_s=lambda: began_s if self._exchange is None else self._exchange.last_s,
            is_paused=self._is_paused,
            has_heartbeats=request.is_stream and request.form.has_heartbeats,
            is_long=is_long,
            prompt_tokens=prompt_tokens,
            is_whole=not request.is_stream,
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
        if isinstance(error, ReplicaFault):
            self.fail(error)
        elif error is None and not self._is_over and self._has_computed:
            self._end()
            self.replica.breaker.succeeded()
        else:
            self.cancel()

    def cancel(self) -> None:
        """End without a verdict: another attempt has the answer, or the request is at fault."""
        if not self._is_over:
            self._end()
            self.replica.breaker.gave_up()

    def fail(self, fault: ReplicaFault) -> None:
        """End as failed, also where no error passes through the context."""
        if not self._is_over:
            if isinstance(fault, Blameless):
                self.replica.breaker.gave_up()
            else:
                self._fleet.suspect(self.replica)  # while this request still counts as open
            fault.is_shared = self.replica.is_shared(self.load)
            self._end()

    @property
    def exchange(self) -> Exchange:
        """The exchange, once the request was sent."""
        assert self._exchange is not None
        return self._exchange

    @property
    def has_output(self) -> bool:
        """Whether its first tokens were read."""
        return _OUTPUT in self.early

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its answer: as the answer has it, or as the replica had it last. A
        replica may have been started again since that was read."""
        found = header_in(self.exchange.headers, FINGERPRINT_HEADER).decode("latin-1")
        return found or self.replica.fingerprint(self._request.model)

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return self._loop.time() - self.load.began_s

    def has_answer(self) -> None:
        """Note that it has its whole answer."""
        self.note_first_tokens()
        self.replica.gave_answer(self.load)

    def note_first_tokens(self) -> None:
        """Learn how long the replica took to the first token, at least."""
        request, times = self._request, self.replica.first_token_times
        times.note(request.prompt_tokens, self.age_s, request.whole_tokens)

    async def send(self, body: bytes, on_sent: Callable[[], None] = lambda: None) -> Exchange:
        """Send the request and wait for the head of the response. Raises ReplicaFault.

        on_sent: called once it is sent, and again where it has to be sent again.

        Where a kept connection turns out to be closed, or a process stops before it has answered,
        the request is sent again, once.
        """
        request, pool, client = self._request, self._fleet.pool(self.replica), self._client
        headers = [header for header in request.headers if header[0] not in HOP_BY_HOP]
        stale: StaleConnection | None = None
        while True:
            self._forget_exchange()
            try:
                exchange = await pool.send(
                    request.method,
                    request.target,
                    headers,
                    body,
                    is_fresh=stale is not None,
                    is_wanted=self._is_wanted,
                )
            except ReplicaFault as fault:
                if client.is_gone:
                    raise ClientGone from fault
                if stale is None or isinstance(fault, Blameless):
                    raise
                # The server may have closed an idle connection just before its own end, or have
                # read the request and died of it: the router cannot know. So it counts against the
                # request, as the end of a connection that was not idle does. Else a request that
                # ends servers would count nothing and reach a third replica; one that is only
                # caught in a restart has one failure, and goes on at another replica.
                raise _failed_twice(stale, fault) from fault
            self._exchange = exchange
            on_sent()
            client.on_gone.add(exchange.fail)
            if self._cut_fault is not None:
                exchange.fail(self._cut_fault)
            if client.is_gone:
                raise ClientGone
            try:
                await exchange.head()
            except StaleConnection as fault:
                if stale is not None:
                    raise _failed_twice(stale, fault) from fault
                stale = fault
            else:
                return exchange

    async def open(self, body: bytes, on_sent: Callable[[], None]) -> None:
        """Send the request, and read a stream up to its first tokens while it holds. on_sent: see
        `send`. Raises ReplicaFault."""
        exchange = await self.send(body, on_sent)
        while exchange.status == 200 and self.holds and not self.has_output:
            received = await exchange.read()
            self.early += received
            if not received or ENDED in self.early:
                return

    def _end(self) -> None:
        self._is_over = True
        self._forget_exchange()
        is_long = self.load.is_long
        self.replica.end(self.load)
        if is_long:
            self._fleet.became_available()  # a place is free

    @property
    def _has_computed(self) -> bool:
        """Whether its answer shows that the replica computes: a refusal, or the count of a prompt's
        tokens, comes from a server without an engine, too."""
        exchange = self._exchange
        return exchange is not None and exchange.status == 200 and not self._request.route.is_free

    def _is_wanted(self) -> bool:
        return self._cut_fault is None and not self._client.is_gone

    def _is_paused(self) -> bool:
        """Return whether the client is what is waited for, also with all of the response here, or
        all that comes of it."""
        exchange = self._exchange
        if exchange is None:
            return self._cut_fault is not None
        return exchange.is_paused or exchange.is_complete or exchange.has_failed

    def _forget_exchange(self) -> None:
        if self._exchange is not None:
            self._client.on_gone.discard(self._exchange.fail)
            self._exchange.close()
            self._exchange = None

    def _cut(self, fault: ReplicaFault) -> None:
        self._cut_fault = self._cut_fault or fault
        if self._exchange is not None:
            self._exchange.fail(fault)


def _failed_twice(first: ReplicaFault, again: ReplicaFault) -> ReplicaFault:
    """Return the fault of a request that was sent again, and failed again."""
    return ReplicaFault(f"{first}; sent again: {again}", is_suspect=True)
