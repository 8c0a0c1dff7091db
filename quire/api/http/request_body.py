"""Request bodies: bytes from a socket to one JSON object, refused early and with a reason.

The size is checked while reading. Knows nothing of what the object means. Always holds: what comes
out is a dict whose strings are valid Unicode, with no key given twice and no NaN or Infinity
literal; reading a large body does not stop others for longer than a slice of the interpreter lock.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from quire.api.http.cancellation import ClientDisconnected
from quire.api.http.errors import UnsupportedEncoding
from quire.api.http.json_bounds import excess
from quire.base.errors import BodyTooLarge, RequestError
from quire.base.show import show
from quire.base.strict_json import parse_object

# Bodies beyond this are parsed in a thread, so that the event loop goes on between its objects.
_SMALL_BYTES = 128 * 1024
# A refused body is read on for so many bytes: a client that is still writing would see a broken
# connection instead of the answer.
_DISCARD_BYTES = 64 * 1024 * 1024
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89abAB]|\\u[dD][c-fC-F]")


async def read_object(request: Request, *, limit_bytes: int) -> tuple[dict[str, Any], bool]:
    """The JSON object a request carries, and whether it is a large one.

    Raises BodyTooLarge, UnsupportedEncoding, RequestError where it is not an object of strict JSON,
    and ClientDisconnected.
    """
    try:
        raw = await _read(request, limit_bytes)
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    _check_encoding(request)
    if len(raw) <= _SMALL_BYTES:
        return parse(raw, limit_bytes=limit_bytes), False
    return await asyncio.to_thread(parse, raw, limit_bytes=limit_bytes), True


def parse(raw: bytes, *, limit_bytes: int) -> dict[str, Any]:
    """The object in `raw`. Raises RequestError saying what is wrong with it."""
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
        raise RequestError(f"the request body cannot be used: {error}") from error
    if _SURROGATE_ESCAPE.search(raw):
        _check_strings(body)
    return body


async def _read(request: Request, limit_bytes: int) -> bytes:
    told = request.headers.get("content-length", "")
    told_bytes = int(told) if told.isascii() and told.isdigit() else 0
    if told_bytes > _DISCARD_BYTES + limit_bytes:
        raise _too_large(told, limit_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
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
    """Nothing is unpacked: what is small on its way could be huge here."""
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("identity", ""):
        raise UnsupportedEncoding(
            f"the request body is sent with content-encoding {show(encoding)}; only identity is "
            "read: send the JSON as it is, without compression"
        )


def _too_large(num_bytes: str, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body has {num_bytes} bytes; at most {limit_bytes} are allowed (--max-body); "
        "send less"
    )


def _check_strings(body: dict[str, Any]) -> None:
    """Refuse lone surrogates: halves of characters that no text can hold. Names the field."""
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
