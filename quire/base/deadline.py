"""Run a block that waits until a deadline at most, and raise an error of the caller then.

Times are those of the event loop. Knows no request. Always holds: a TimeoutError of the block
itself is passed on as it is; without a deadline a block costs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from quire.base.errors import QuireError

_UNLIMITED = nullcontext()


def until_deadline(
    deadline_s: float | None, late: Callable[[], QuireError]
) -> AbstractAsyncContextManager[None]:
    """Run a block; once the deadline has passed, end it and raise what `late` returns.

    deadline_s: by the clock of the event loop; None: without a limit.
    """
    return _UNLIMITED if deadline_s is None else _limited(deadline_s, late)


@asynccontextmanager
async def _limited(deadline_s: float, late: Callable[[], QuireError]) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise late() from None
