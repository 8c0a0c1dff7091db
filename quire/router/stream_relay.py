"""StreamRelay: pass the events of a replica on to the client, and count what is computed.

Knows no other attempt: a fault ends `stream`, and another attempt goes on from what the journal of
the request has. Always holds: a delta is in the journal before the client gets it; it is passed on
as a whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections import deque

from quire.router.answer_state import AnswerState
from quire.router.api_forms import first_code
from quire.router.attempt import Attempt
from quire.router.event_blocks import Delta, EventBlocks, is_heartbeat
from quire.router.faults import ClientGone, HasNoRoom, ReplicaFault
from quire.router.routes import RESPONSES
from quire.router.stored_responses import MAX_START_BYTES, created_id

# Error codes of a replica that is ending: another can go on, and the request is not the cause.
DRAINS = "shutting_down"
LEAVING = frozenset({DRAINS, "overloaded", "queue_timeout"})
# Error codes of a replica that failed with the request.
FAILED = frozenset({"worker_error", "device_lost", "step_row_error", "internal_error"})
# The usage of a stream is in one of its last pieces.
_LAST_PIECES = 8


class StreamRelay:
    """Of one request."""

    def __init__(self, state: AnswerState) -> None:
        self._state = state
        self._request = state.request
        self._client = state.client
        self._choice = state.choice
        self._features = state.parts.features
        self._loop = asyncio.get_running_loop()
        self._stored_by: Attempt | None = None

    async def stream(self, attempt: Attempt) -> None:
        """Pass a stream on to its end. Raises ReplicaFault."""
        request, exchange = self._request, attempt.exchange
        if request.why_not:
            await self._pass_on(attempt)
            return
        blocks = EventBlocks(request.form.event_end, shows_comments=request.shows_comments)
        resumes = self._state.parts.fleet.resumes
        deltas = deque(blocks.push(attempt.early))

        def take(received: bytes) -> bool:
            """Pass on what needs no wait; return whether that is all."""
            deltas.extend(blocks.push(received))
            while deltas and not resumes.holds_events and self._pass_now(attempt, deltas[0]):
                deltas.popleft()
            return not deltas

        while deltas or await exchange.hand_over(take):
            if resumes.holds_events:
                await resumes.wait_for_sends()
            while deltas:
                if await self._pass(attempt, deltas.popleft()):
                    return
        raise _ended_early(attempt)

    async def _pass(self, attempt: Attempt, delta: Delta) -> bool:
        """Pass on a delta; return whether it is the last. Raises ReplicaFault, ClientGone."""
        request, client, exchange = self._request, self._client, attempt.exchange
        self._check_choice(delta)
        self._note(attempt, delta)
        if request.route.stores and self._stored_by is not attempt:
            self._note_response(attempt, delta)
        if not client.started:
            await client.start(200, exchange.headers)
        is_first = not self._state.has_events
        if is_first and not is_heartbeat(delta.blocks, request.form.event_end):
            self._state.note_event(attempt.fingerprint)
        shown = delta.blocks
        if self._choice.adds_event:
            shown = self._choice.shown_event(shown)
        if delta.is_last:
            self._state.continuation.has_event(self._loop.time())
            exchange.leave()
            await client.finish(shown)
            return True
        # The journal first: a client that leaves in between needs no journal.
        if delta.cursor is not None:
            request.delivered(delta.cursor)
        await client.write(shown)
        return False

    def _pass_now(self, attempt: Attempt, delta: Delta) -> bool:
        """Pass on a delta with tokens as `_pass` does, unless more is to be done; return whether it
        was. Raises ReplicaFault."""
        state, client = self._state, self._client
        is_plain = state.has_events and delta.cursor is not None and not self._choice.adds_event
        is_noted = self._stored_by is attempt or not self._request.route.stores
        if not (is_plain and is_noted and client.can_write):
            return False
        self._check_choice(delta)
        self._note(attempt, delta)
        if delta.cursor is not None:
            self._request.delivered(delta.cursor)
        client.write_now(delta.blocks)
        return True

    async def judged(self, attempt: Attempt) -> bool:
        """Hold a stream until it is complete; return whether it was passed on, and False where
        another model is to answer. The client has nothing of it before. Raises ReplicaFault."""
        request, client, exchange = self._request, self._client, attempt.exchange
        blocks = EventBlocks(request.form.event_end, shows_comments=request.shows_comments)
        held, num_tokens, is_complete, has_failed = list[bytes](), 0, False, False
        received = attempt.early or await exchange.read()
        try:
            while received:
                for delta in blocks.push(received):
                    num_tokens += self._note(attempt, delta)
                    held.append(delta.blocks)
                    is_complete = is_complete or delta.is_last
                    has_failed = has_failed or bool(delta.error)
                received = await exchange.read()
        except ClientGone:
            request.used_output_tokens = num_tokens
            raise
        if not is_complete:
            raise _ended_early(attempt)
        events = b"".join(held)
        if self._choice.is_changed_by_stream(events, num_tokens, has_failed=has_failed):
            return False
        request.num_delivered = num_tokens
        await client.start(200, exchange.headers)
        await client.finish(self._choice.shown_events(events))
        return True

    async def _pass_on(self, attempt: Attempt) -> None:
        """Stream what cannot be continued: after heartbeats alone it can be begun anew."""
        client, request, exchange = self._client, self._request, attempt.exchange
        start = b"" if request.path == RESPONSES else None
        last: deque[bytes] = deque(maxlen=_LAST_PIECES)
        counts_usage, parts = self._features.counts_usage, self._state.parts
        while received := await exchange.read():
            is_event = not is_heartbeat(received, request.form.event_end)
            if is_event:
                if not self._state.has_events:
                    _check_error(first_code(received))
                    self._state.note_event(attempt.fingerprint)
                    self._state.continuation.has_event(self._loop.time())
                if attempt.load.is_new:
                    self._leave_queue(attempt)
                attempt.replica.progressed(self._loop.time())
            if start is not None:  # the first event has the id
                start += received
                if id_ := created_id(start):
                    parts.responses.note(self._state.client_key, id_, attempt.replica)
                start = None if id_ or len(start) > MAX_START_BYTES else start
            if not client.started:
                await client.start(200, exchange.headers)
            if counts_usage and is_event:  # at least a token an event, until the usage is known
                last.append(received)
                num_events = received.count(b"\n\n") or received.count(b"\n")
                request.used_output_tokens = max(request.used_output_tokens, 0) + num_events
            await client.write(self._choice.shown_event(received))
        if not client.started:
            await client.start(200, exchange.headers)
        used = None if request.counts_apart else request.form.used_tokens(b"".join(last))
        if used is not None:
            request.used_prompt_tokens, request.used_output_tokens = used
        parts.admission.drained(request.expected_tokens, self._loop.time())
        await client.finish()

    def _check_choice(self, delta: Delta) -> None:
        """Raise ReplicaFault for an event of a choice that the answer does not have."""
        cursor = delta.cursor
        if cursor is not None and not self._request.journal.has_choice(cursor):
            raise ReplicaFault(f"it sent choice {cursor.choice}, of fewer", is_suspect=True)

    def _note(self, attempt: Attempt, delta: Delta) -> int:
        """Count the tokens of an event; return how many. Raises ReplicaFault for some errors."""
        _check_error(delta.error)
        if delta.cursor is None:
            return 0
        num_tokens = len(delta.cursor.output_ids)
        self._count(attempt, num_tokens)
        return num_tokens

    def _note_response(self, attempt: Attempt, delta: Delta) -> None:
        """Note which replica will have the response: the one that ends it."""
        id_ = created_id(delta.blocks) if delta.cursor is None else delta.cursor.answer_id
        if id_:
            self._state.parts.responses.note(self._state.client_key, id_, attempt.replica)
            self._stored_by = attempt

    def _count(self, attempt: Attempt, num_tokens: int) -> None:
        now_s, load, parts = self._loop.time(), attempt.load, self._state.parts
        if load.is_new:
            self._begin_output(attempt)
        attempt.replica.progressed(now_s)
        self._state.continuation.has_event(now_s)
        expected = self._request.output_tokens
        computed = num_tokens + max(load.tokens - expected, 0)  # with the first, the prompt
        attempt.replica.reduce(load, computed)
        parts.admission.drained(computed, now_s)
        parts.metrics.tokens.inc(num_tokens)

    def _begin_output(self, attempt: Attempt) -> None:
        """Note that a stream has its first tokens."""
        request, fleet = self._request, self._state.parts.fleet
        load, lanes = attempt.load, self._features.lanes
        if not request.num_delivered and request.transfer is None:
            fleet.note_first_token(attempt.replica, load, attempt.age_s)
        self._leave_queue(attempt)
        if not request.num_delivered:
            request.first_token_s = self._loop.time()
            attempt.note_first_tokens()
        if load.is_long:
            attempt.replica.computed_prompt(load)
            fleet.became_available()
        elif lanes is not None:
            lanes.began_short(attempt.age_s)

    def _leave_queue(self, attempt: Attempt) -> None:
        """Note that the replica has begun to answer."""
        self._state.leave_place()
        self._state.note_answer(self._loop.time())
        attempt.replica.gave_output(attempt.load)
        if attempt.replica.breaker.gave_output():
            self._state.parts.fleet.became_available()


def _check_error(code: str) -> None:
    """Raise ReplicaFault for the code of an error after which another replica can go on."""
    if code == DRAINS or code in FAILED:
        is_drain = code == DRAINS
        raise ReplicaFault(
            f"error {code}", is_suspect=not is_drain, is_drain=is_drain, cause="error"
        )
    if code in LEAVING:
        raise HasNoRoom(code)


def _ended_early(attempt: Attempt) -> ReplicaFault:
    return ReplicaFault(f"{attempt.replica.name} ended the stream early", is_suspect=True)
