"""An open loop over HTTP: requests are sent at their arrival times, whatever is still pending.

Uses any OpenAI-compatible /v1/completions with streaming, one connection per request and only
asyncio: the client must cost little beside a server on the same machine. Prompts are token ids (or
text). A request that fails, or ends at another length than requested, is an error of that request
only.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.base.errors import WorkerError
from quire.base.server_url import (
    key_headers,
    key_refused_text,
    reason_of,
    server_url,
    unreachable_text,
)
from quire.bench.workloads import RequestSpec
from quire.obs.timing import RequestTimes

_MAX_LINE_BYTES = 1 << 20
_MAX_REFUSAL_BYTES = 8192
_MAX_SHOWN_CHARS = 400
_UNAUTHORIZED = 401


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and how to send requests to it. extra: fields added to each request's body.

    as_text: prompts are sent as words instead of token ids, for servers that take no ids; the
    number of tokens then depends on the server's tokenizer. exact: another length than requested is
    an error.
    """

    url: str
    model: str
    api_key: str = ""
    as_text: bool = False
    exact: bool = True
    timeout_s: float = 600.0
    extra: tuple[tuple[str, Any], ...] = (("ignore_eos", True),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Host and port of a server. path: the prefix of every route. shown: as errors name it."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    shown: str


def address_of(url: str) -> Address:
    """Parse an address, with or without /v1 at its end. Raises InvalidParameter."""
    parsed = server_url(url)
    return Address(
        host=parsed.host,
        port=parsed.port_number,
        path=parsed.path.removesuffix("/v1"),
        tls=ssl.create_default_context() if parsed.is_secure else None,
        shown=parsed.full,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as listed by its server; None: not listed."""

    name: str
    max_model_len: int | None = None
    vocab_size: int | None = None


async def served_model(target: Target) -> ServedModel:
    """Return the target's model, or the first listed one where the target names none.

    Raises WorkerError where the list cannot be read, or is empty and no name was given.
    """
    try:
        async with asyncio.timeout(30):
            body = b""
            async for line in _exchange(target, "GET", "/models", None):
                body += line + b"\n"
        listed = {str(one["id"]): one for one in json.loads(body)["data"]}
        name = target.model or next(iter(listed))
        entry = listed.get(name, {})
        return ServedModel(
            name=name,
            max_model_len=_count(entry.get("max_model_len")),
            vocab_size=_count(entry.get("vocab_size")),
        )
    except StopIteration:
        raise WorkerError(f"{target.url} lists no models; name one with --model") from None
    except (OSError, ValueError, LookupError, TypeError, TimeoutError, Refused) as error:
        raise WorkerError(
            why_unusable(target.url, error, has_key=bool(target.api_key))
            or f"{target.url} lists no models ({reason_of(error)}); give the address of an "
            "OpenAI-compatible server, or name a model with --model"
        ) from error


def why_unusable(url: str, error: Exception, *, has_key: bool) -> str:
    """Return the error for a server that does not answer or refuses the key, else an empty text."""
    shown = address_of(url).shown
    if isinstance(error, Refused) and error.status == _UNAUTHORIZED:
        return key_refused_text(shown, has_key=has_key)
    return unreachable_text(shown, error) if isinstance(error, OSError) else ""


def _count(value: object) -> int | None:
    """Return the value if it is a positive integer; servers may send anything."""
    return value if type(value) is int and value > 0 else None


async def open_loop(
    target: Target, specs: Sequence[RequestSpec], *, on_end: Callable[[], None] | None = None
) -> list[RequestTimes]:
    """Send each request at its arrival and return the times, in order, when all have ended.

    A request's `sent_s` is its due time, so a slow client counts against the result.
    """
    begin_s = time.perf_counter()

    async def one(spec: RequestSpec) -> RequestTimes:
        await asyncio.sleep(max(begin_s + spec.arrival_s - time.perf_counter(), 0))
        times = await _ask(target, spec, begin_s)
        if on_end is not None:
            on_end()
        return times

    return list(await asyncio.gather(*(one(spec) for spec in specs)))


class Refused(Exception):
    """The server answered with something else than requested. status: 200 for a broken stream."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


async def _ask(target: Target, spec: RequestSpec, begin_s: float) -> RequestTimes:
    first_s = last_s = 0.0
    num_tokens = num_events = 0
    error = ""
    body = {
        "model": target.model,
        "prompt": _words(spec) if target.as_text else list(spec.prompt_ids),
        "max_tokens": spec.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **dict(target.extra),
    }
    try:
        async with asyncio.timeout(target.timeout_s):
            async for event in _until_done(_exchange(target, "POST", "/completions", body)):
                now_s = time.perf_counter() - begin_s
                if event.get("error"):
                    raise Refused(f"the answer broke off: {str(event['error'])[:200]}")
                # A chunk without text is a token too, where its text is not whole yet.
                if event.get("choices") and event["choices"][0].get("finish_reason") is None:
                    num_events += 1
                    first_s = first_s or now_s
                if event.get("choices"):
                    first_s, last_s = first_s or now_s, now_s
                usage = event.get("usage") or {}
                num_tokens = int(usage.get("completion_tokens") or num_tokens)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, Refused) as problem:
        error = str(problem) or repr(problem)
    except asyncio.IncompleteReadError:
        error = "the connection broke off"
    num_tokens = num_tokens or num_events
    if not error and not num_tokens:
        error = "no token came"
    if not error and target.exact and num_tokens != spec.output_tokens:
        error = f"{num_tokens} tokens came, {spec.output_tokens} were asked for"
    return RequestTimes(
        sent_s=spec.arrival_s,
        first_s=first_s,
        last_s=last_s,
        prompt_tokens=len(spec.prompt_ids),
        output_tokens=num_tokens,
        error=error,
    )


def _words(spec: RequestSpec) -> str:
    """Return text of about as many tokens: a short number per token."""
    return " ".join(str(token_id % 1000) for token_id in spec.prompt_ids)


async def _until_done(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    async for event in events(lines):
        if event is None:
            return
        yield event
    raise Refused("the stream ended before [DONE]")


async def events(lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the objects of a stream of server-sent events; None for [DONE].

    Raises Refused for an event that is not an object, ValueError for one that is not JSON.
    """
    async for line in lines:
        field, _, value = line.partition(b":")
        if field != b"data":
            continue
        if value.strip() == b"[DONE]":
            yield None
            continue
        event = json.loads(value)
        if not isinstance(event, dict):
            raise Refused(f"{value[:80]!r} came, not an object")
        yield event


def _exchange(target: Target, method: str, path: str, body: object) -> AsyncIterator[bytes]:
    """Send one request to a route below /v1."""
    return exchange(address_of(target.url), method, f"/v1{path}", body, api_key=target.api_key)


async def exchange(
    address: Address, method: str, path: str, body: object, *, api_key: str = ""
) -> AsyncIterator[bytes]:
    """Send one request on its own connection and yield the lines of the body, without line ends.

    Raises Refused where the status is not 200, OSError where no server listens.
    """
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=address.tls, limit=_MAX_LINE_BYTES
    )
    try:
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        key = "".join(f"{name}: {value}\r\n" for name, value in key_headers(api_key).items())
        head = (
            f"{method} {address.path}{path} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            f"{key}Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        status = int((await reader.readline()).split()[1])
        chunked = False
        while (line := await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            if name.strip().lower() == "transfer-encoding":
                chunked = "chunked" in value.lower()
        refusal = b""
        async for line in _lines(reader, chunked=chunked):
            if status == 200:
                yield line.rstrip(b"\r\n")
            else:
                refusal = (refusal + line)[:_MAX_REFUSAL_BYTES]
        if status != 200:
            raise Refused(f"HTTP {status}: {_message_of(refusal)}", status)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _message_of(refusal: bytes) -> str:
    """Return the message of an error's body, or what the body begins with."""
    text = refusal.decode(errors="replace").strip()
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return text[:_MAX_SHOWN_CHARS]


async def _lines(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the lines of a body as they arrive, including an unfinished last one.

    Raises IncompleteReadError if a chunked body ends without its last chunk.
    """
    if not chunked:
        while line := await reader.readline():
            yield line
        return
    rest = b""
    while True:
        head = await reader.readline()
        if not head:
            raise asyncio.IncompleteReadError(head, None)
        size = int(head.split(b";")[0], 16)
        if not size:
            break
        rest += await reader.readexactly(size)
        await reader.readline()
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line
    if rest:
        yield rest
