"""Read a JSON body in time, and run a request's work until it is done or the client disconnects.

A body's size is checked while it is read, and its work runs in the task of the request, which is
cancelled to end it. Knows no field of a body and no engine. Always holds: a parsed body is a dict
of valid Unicode without duplicate keys, NaN or Infinity; reading a large body blocks other requests
no longer than a time slice of the interpreter lock; when `run_until_disconnect` returns or raises,
the work has ended, and the engine's generators that it used are closed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from quire.api.http.errors import UnsupportedEncoding
from quire.api.http.json_bounds import excess
from quire.base.errors import BodyTooLarge, QuireError, RequestError, ShuttingDown, TimedOut
from quire.base.json_strings import overlapping
from quire.base.request_body import BODY_TIME_S, LENGTH_DIGITS, large_body, late_body
from quire.base.show import show
from quire.base.strict_json import parse_object

T = TypeVar("T")

# Larger bodies are parsed in a thread, so that the event loop continues between objects.
_SMALL_BYTES = 128 * 1024
# Maximum bytes of a refused body that are read and discarded: without that, a client that is still
# writing would see a broken connection instead of the response.
_DISCARD_BYTES = 64 * 1024 * 1024
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


class ClientDisconnected(Exception):
    """The client closed the connection; no response is needed."""


class _Late(Exception):
    """The time limit is reached."""


class Deadline:
    """The time limit of a request, from its creation. `limit_s` None: no limit."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._began_s = asyncio.get_running_loop().time()

    def left_s(self) -> float | None:
        """Return the seconds left, at least 0; None without a limit."""
        if self.limit_s is None:
            return None
        return max(0.0, self.limit_s - (asyncio.get_running_loop().time() - self._began_s))


def disconnect_of(scope: Scope, receive: Receive) -> asyncio.Future[None]:
    """Return a future that is set when the client disconnects. The body must be read before.

    connection.py provides one; other servers get a task that waits for the ASGI message.
    """
    future: asyncio.Future[None] | None = scope.get("quire.disconnected")
    return asyncio.ensure_future(_disconnected(receive)) if future is None else future


async def run_until_disconnect(
    work: Coroutine[Any, Any, T],
    disconnected: asyncio.Future[None] | None,
    *,
    over: asyncio.Future[None],
    deadline: Deadline,
    cut: asyncio.Future[QuireError] | None = None,
) -> T:
    """Return the result of `work`; cancel it on a disconnect, when `over` is set, or at the limit.

    Raises ClientDisconnected, ShuttingDown and TimedOut for these three, the error that `cut` is
    set to, else what `work` raises. disconnected: of disconnect_of; None if no client waits.
    """
    try:
        return await _until(work, disconnected, over=over, limit_s=deadline.left_s(), cut=cut)
    except _Late:
        raise TimedOut(
            f"the request ran for its whole time limit of {deadline.limit_s} s "
            "(--request-timeout); ask for fewer tokens, or try again when less is asked"
        ) from None
    finally:
        if isinstance(disconnected, asyncio.Task):
            disconnected.cancel()


async def body_in_time(
    work: Coroutine[Any, Any, T], *, stopping: asyncio.Future[None], deadline: Deadline
) -> T:
    """Return the result of reading a body, in time and while the server accepts requests.

    Raises TimedOut and ShuttingDown, else what `work` raises. A body that has arrived already is
    read without a timer, as nearly all are.
    """
    if not stopping.done():
        try:
            waits_for = work.send(None)
        except StopIteration as read:
            body: T = read.value
            return body
        work = _rest(work, waits_for)
    left_s = deadline.left_s()
    limit_s = BODY_TIME_S if left_s is None else min(left_s, BODY_TIME_S)
    try:
        return await _until(work, None, over=stopping, limit_s=limit_s)
    except _Late:
        raise TimedOut(late_body(limit_s)) from None


async def _rest(work: Coroutine[Any, Any, T], waits_for: Any) -> T:
    """Run the rest of a coroutine that has begun and waits for `waits_for`."""
    return await _steps(work, waits_for)


@coroutine
def _steps(work: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001  the coroutine handles it
                waits_for = work.throw(error)
            else:
                waits_for = work.send(sent)
    except StopIteration as done:
        result: T = done.value
        return result


async def _until(
    work: Coroutine[Any, Any, T],
    disconnected: asyncio.Future[None] | None,
    *,
    over: asyncio.Future[None],
    limit_s: float | None,
    cut: asyncio.Future[QuireError] | None = None,
) -> T:
    """Run `work` in the current task, which is cancelled to end it."""
    task = asyncio.current_task()
    assert task is not None, "coroutines run in tasks"
    cancelling, ended_by, is_over = task.cancelling(), list[BaseException](), False

    def end(why: BaseException) -> None:
        # A callback may still run when the work has ended; do not cancel the cleanup.
        if not (ended_by or is_over or task.cancelling() > cancelling):
            ended_by.append(why)
            task.cancel()

    def on_disconnect(_: object) -> None:
        end(ClientDisconnected())

    def on_over(_: object) -> None:
        end(ShuttingDown("the server is shutting down and ended this request; try again"))

    def on_cut(cut: asyncio.Future[QuireError]) -> None:
        end(cut.result())

    ends: list[tuple[asyncio.Future[Any], Callable[[Any], None]]] = [(over, on_over)]
    if cut is not None:
        ends.append((cut, on_cut))
    if disconnected is not None:
        ends.append((disconnected, on_disconnect))
    for future, on_end in ends:
        future.add_done_callback(on_end)
    timer = None
    if limit_s is not None:
        timer = asyncio.get_running_loop().call_later(limit_s, end, _Late())
    try:
        return await work
    except BaseException:
        # Cancelled by `end`, unless the task was cancelled from outside too.
        if ended_by and task.uncancel() <= cancelling:
            raise ended_by[0] from None
        raise
    finally:
        is_over = True
        if timer is not None:
            timer.cancel()
        for future, on_end in ends:
            future.remove_done_callback(on_end)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_object(request: Request, *, limit_bytes: int) -> tuple[dict[str, Any], bool]:
    """Return the JSON object of a request, and whether its body is large.

    Raises BodyTooLarge, UnsupportedEncoding, RequestError if it is not an object of strict JSON,
    and ClientDisconnected.
    """
    try:
        raw = await read_body(request, limit_bytes)
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    _check_encoding(request)
    if len(raw) <= _SMALL_BYTES:
        return parse(raw, limit_bytes=limit_bytes), False
    return await asyncio.to_thread(parse, raw, limit_bytes=limit_bytes), True


def parse(raw: bytes, *, limit_bytes: int) -> dict[str, Any]:
    """Return the object in `raw`. Raises RequestError."""
    if not raw.strip():
        raise RequestError("the request body is empty; send a JSON object")
    too_many = excess(raw) if len(raw) > _SMALL_BYTES else None  # a small one cannot hold as many
    if too_many is not None:
        raise RequestError(
            f"the request body has {too_many}; send less, or the same in several requests"
        )
    try:
        body = parse_object(raw, limit_bytes=limit_bytes, yields=True)
    except ValueError as error:
        is_no_object = str(error).startswith(("it is not ", "it is ["))
        action = "; send one JSON object in UTF-8" if is_no_object else ""
        raise RequestError(f"the request body cannot be used: {error}{action}") from error
    pieces = [raw] if len(raw) <= _SMALL_BYTES else overlapping(raw)
    if any(map(_SURROGATE_ESCAPE.search, pieces)):
        _check_strings(body)
    return body


def announced_bytes(request: Request) -> int:
    """Return the length of a body as its head has it; 0 without one."""
    length = request.headers.get("content-length", "")
    return int(length[:LENGTH_DIGITS]) if length.isascii() and length.isdigit() else 0


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the bytes of a body. Raises BodyTooLarge and ClientDisconnect."""
    num_announced = announced_bytes(request)
    if num_announced > _DISCARD_BYTES + limit_bytes:
        raise _too_large(str(num_announced), limit_bytes)
    parts, num_bytes, goes_on = list[bytes](), 0, True
    while goes_on:  # as request.stream(), without a generator
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, goes_on = message.get("body", b""), message.get("more_body", False)
        num_bytes += len(part)
        if num_bytes <= limit_bytes:
            parts.append(part)
            continue
        parts.clear()
        if num_bytes > _DISCARD_BYTES:
            raise _too_large(f"more than {num_bytes}", limit_bytes)
    if num_bytes > limit_bytes:
        raise _too_large(str(num_bytes), limit_bytes)
    return b"".join(parts)


def _check_encoding(request: Request) -> None:
    """Refuse compressed bodies: a small one could expand beyond every limit."""
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("identity", ""):
        raise UnsupportedEncoding(
            f"the request body is sent with content-encoding {show(encoding)}; only identity is "
            "read: send the JSON as it is, without compression"
        )


def _too_large(num_bytes: str, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(large_body(num_bytes, limit_bytes, "--max-body"))


def _check_strings(body: dict[str, Any]) -> None:
    """Refuse lone surrogates, which no valid text has. The error names the field."""
    for name, value in body.items():
        waiting = [name, value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, dict):
                waiting.extend(item.keys())
                waiting.extend(item.values())
            elif isinstance(item, list):
                waiting.extend(item)
            elif isinstance(item, str):
                _check_string(name, item)


def _check_string(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="backslashreplace").decode()
        raise RequestError(
            f"{shown} has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; send valid Unicode",
            param=shown,
        ) from None
