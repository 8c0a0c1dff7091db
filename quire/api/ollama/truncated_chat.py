"""The newest messages of a chat that fit the context, unless a request has `truncate: false`.

Knows no template and no tokens. Always holds: system messages and the last message are kept; what
is kept of the others begins with a message of the user, so that no result is without its call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from quire.api.generation.text_bounds import TOO_LONG

Message = dict[str, Any]


async def newest_messages(
    messages: list[Message],
    check_fits: Callable[[list[Message], int], Awaitable[None]],
    *,
    room: int,
) -> tuple[list[Message], int]:
    """Return all messages if they fit, else as many of the newest as fit; and how many come before
    the first of these, of which only system messages are kept.

    check_fits: raises one of TOO_LONG if messages leave less than so many tokens to the answer.
    """
    try:
        await check_fits(messages, 1)
    except TOO_LONG as error:
        too_long = error
    else:
        return messages, 0
    begins = [at for at, message in enumerate(messages) if at and message["role"] == "user"]
    low, high = 0, len(begins)
    while low < high:
        middle = (low + high) // 2
        try:
            await check_fits(_from(messages, begins[middle]), room)
            high = middle
        except TOO_LONG as error:
            too_long, low = error, middle + 1
    if low == len(begins):
        raise too_long
    return _from(messages, begins[low]), begins[low]


def _from(messages: Sequence[Message], begin: int) -> list[Message]:
    kept = [message for message in messages[:begin] if message["role"] == "system"]
    return [*kept, *messages[begin:]]
