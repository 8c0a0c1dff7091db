"""A client of scripted replicas, and of routers before them.

Knows HTTP and no part of quire. Always holds: a time is returned only for a stream that has all of
its tokens in order, and its end.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable

PROMPT_TOKENS = 64


async def first_token_s(
    port: int,
    num_tokens: int,
    prompt: list[int] | None = None,
    on_first: Callable[[], Awaitable[object]] | None = None,
) -> float:
    """Stream one answer; return the time to its first token. Raises SystemExit if it is wrong.

    on_first: awaited then.
    """
    body = {
        "tokens": prompt or [1] * PROMPT_TOKENS,
        "max_tokens": num_tokens,
        "stream": True,
        "seed": 1,
    }
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start_s = time.monotonic()
    writer.write(
        b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    first_s, answer = 0.0, bytearray()
    while piece := await reader.read(65536):
        answer += piece
        if not first_s and b'"token":' in answer:
            first_s = time.monotonic() - start_s
            if on_first is not None:
                await on_first()
        if b"data: [DONE]" in answer[-len(piece) - 16 :]:
            break
    writer.close()
    found = [int(number) for number in re.findall(rb'"token":(\d+)', answer)]
    if found != list(range(num_tokens)) or b"[DONE]" not in answer:
        start, end = bytes(answer[:300]), bytes(answer[-300:])
        raise SystemExit(f"a stream was wrong: {start!r} ... {end!r}")
    return first_s
