"""PromptAdmission: the prompts of one request are refused together, or all are computed.

The engine admits each prompt by itself, so it may refuse some of many while others run. A refused
prompt waits here until another one has begun or ended, and is sent again: a request is not refused
halfway. The request is refused if a prompt is refused while no other one of the request is sent,
and before any of it is computed. Knows no engine. Always holds: prompts are sent again one at a
time, in the order of their refusals.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from quire.base.errors import OverloadedError, TenantLimit

T = TypeVar("T")

# Interval of tries where other requests have taken the room of a prompt that ended.
_RETRY_S = 0.25
# Refusals for lack of room; others, such as a deadline that would be missed, are final.
_FULL = (OverloadedError, TenantLimit)


class PromptAdmission:
    """Admit the prompts of one request together."""

    def __init__(self) -> None:
        self._num_sent = 0  # and neither refused nor ended
        self._has_begun = False
        self._refused: deque[asyncio.Event] = deque()

    async def run(self, send: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """Yield the items of one prompt, which `send` sends.

        Raises what `send` raises; refusals for lack of room only before the engine has admitted a
        prompt of the request.
        """
        has_begun = False
        while True:
            refusal: OverloadedError | None = None
            self._num_sent += 1
            try:
                async with aclosing(send()) as items:
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
            await self._wait(refusal)

    async def _wait(self, refusal: OverloadedError) -> None:
        """Wait until the prompt may be sent again.

        Raises the refusal if no other prompt is being sent and none has begun.
        """
        if self._num_sent:
            turn = asyncio.Event()
            self._refused.append(turn)
            await turn.wait()
        elif self._has_begun:
            await asyncio.sleep(_RETRY_S)
        else:
            raise refusal

    def _wake_next(self) -> None:
        if self._refused:
            self._refused.popleft().set()
