"""PromptAdmission: the prompts of one request are refused together, or all are computed.

The engine admits each prompt by itself, so it may refuse some of many while others run. A refused
prompt waits here until another one has begun or ended, or for a moment, since other requests leave
room as well, and is sent again: a request is not refused halfway. The request is refused if a
prompt is refused while no other one of the request is sent, and before any of it is computed; it
ends if a prompt waits, here and in the queue together, for longer than the queue's timeout. Knows
no engine. Always holds: prompts are sent again one at a time, in the order of their refusals.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from quire.base.errors import OverloadedError, QueueTimedOut, TenantLimit
from quire.base.scheduling_params import SchedulingParams

T = TypeVar("T")

# Interval of tries while no prompt of the request begins or ends.
_RETRY_S = 0.25
# Refusals for lack of room; others, such as a deadline that would be missed, are final.
_FULL = (OverloadedError, TenantLimit)


class PromptAdmission:
    """Admit the prompts of one request together. queue_timeout_s: how long a prompt may wait here;
    0: no limit."""

    def __init__(self, queue_timeout_s: float = 0.0) -> None:
        self._queue_timeout_s = queue_timeout_s
        self._num_sent = 0  # and neither refused nor ended
        self._has_begun = False
        self._refused: dict[asyncio.Event, None] = {}  # in order
        self._retry: asyncio.TimerHandle | None = None

    async def run(
        self, send: Callable[[float], AsyncGenerator[T, None]]
    ) -> AsyncGenerator[T, None]:
        """Yield the items of one prompt, which `send` sends; it is given the seconds for which the
        prompt has waited here, since the queue's timeout counts them, too.

        Raises what `send` raises; refusals for lack of room only before the engine has admitted a
        prompt of the request. Raises QueueTimedOut.
        """
        has_begun, loop = False, asyncio.get_running_loop()
        # Not since the request came: a prompt that starts once others have ended was in no queue.
        sent_s, waited_s = loop.time(), 0.0
        while True:
            refusal: OverloadedError | None = None
            self._num_sent += 1
            try:
                async with aclosing(send(waited_s)) as items:
                    async for item in items:
                        if not has_begun:
                            has_begun = self._has_begun = True
                            self._wake_next()
                        yield item
                return
            except OverloadedError as error:
                if has_begun or type(error) not in _FULL:
                    raise
                refusal = error
            finally:
                self._num_sent -= 1
                if refusal is None:
                    self._wake_next()
            assert refusal is not None, "else it has ended"
            await self._wait(refusal, sent_s)
            waited_s = loop.time() - sent_s

    async def _wait(self, refusal: OverloadedError, sent_s: float) -> None:
        """Wait until the prompt may be sent again. sent_s: when it was first sent.

        Raises the refusal if no other prompt is being sent and none has begun, and QueueTimedOut.
        """
        if not (self._num_sent or self._has_begun):
            raise refusal
        turn, limit_s = asyncio.Event(), self._queue_timeout_s
        self._refused[turn] = None
        self._retry_later()
        try:
            async with asyncio.timeout_at(sent_s + limit_s if limit_s else None):
                await turn.wait()
        except TimeoutError:
            raise QueueTimedOut(
                f"a prompt of the request found no room in the queue for {1000 * limit_s:.0f} ms, "
                "the most that is allowed here (--queue-timeout); nothing of it was computed: send "
                "fewer prompts, or try again when less is asked",
                retry_after_s=refusal.retry_after_s,
            ) from refusal
        finally:
            self._refused.pop(turn, None)

    def _wake_next(self) -> None:
        if self._refused:
            turn = next(iter(self._refused))
            del self._refused[turn]
            turn.set()

    def _retry_later(self) -> None:
        """Have a prompt sent again after a moment, as long as any waits."""
        if self._retry is None and self._refused:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(_RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._wake_next()
        self._retry_later()


def senders(
    run: Callable[[int, Any], AsyncGenerator[T, None]],
    prompts: Sequence[Any],
    terms: SchedulingParams,
) -> list[Callable[[float], AsyncGenerator[T, None]]]:
    """Return what sends each prompt with the seconds for which it has waited here."""

    def send(at: int, waited_s: float) -> AsyncGenerator[T, None]:
        waited = replace(terms, waited_ms=1000 * waited_s) if waited_s else None
        return run(at, replace(prompts[at], terms=waited))

    return [partial(send, at) for at in range(len(prompts))]
