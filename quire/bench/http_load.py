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
from urllib.parse import urlsplit

from quire.base.errors import SettingError, WorkerError
from quire.bench.workloads import RequestSpec
from quire.obs.timing import RequestTimes

_MAX_LINE_BYTES = 1 << 20
_MAX_REFUSAL_BYTES = 200


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
    """Host and port of a server; path is the prefix of every route."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None


def address_of(url: str) -> Address:
    """Parse an http:// or https:// URL. Raises SettingError for anything else."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"{url!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise SettingError(f"{url!r} is not an http:// or https:// address")
    secure = parts.scheme == "https"
    return Address(
        host=host,
        port=port or (443 if secure else 80),
        path=parts.path.rstrip("/"),
        tls=ssl.create_default_context() if secure else None,
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
            f"{target.url} lists no models ({error!r}); is a server running there? "
            "Name a model with --model where it lists none"
        ) from error


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
    """The server answered with something else than requested."""


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
    address = address_of(target.url)
    version = "" if address.path.endswith("/v1") else "/v1"
    return exchange(address, method, version + path, body, api_key=target.api_key)


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
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
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
            raise Refused(f"HTTP {status}: {refusal.decode(errors='replace').strip()}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


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
