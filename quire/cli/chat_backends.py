"""Chat backends: a model in this process, or one behind an OpenAI-compatible URL.

Both implement ChatBackend. `stream_answer` blocks and passes on text as it arrives; Ctrl-C during
it stops the answer (the request is aborted or the connection closed) and raises KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from quire.base.errors import (
    OverloadedError,
    QuireError,
    RequestError,
    StepRowError,
    TokenizerError,
    UnknownModel,
    WorkerError,
)
from quire.base.server_url import (
    key_headers,
    key_refused_text,
    server_url,
    unreachable_text,
)
from quire.cli.options import sampling_flags_in_errors

if TYPE_CHECKING:
    from quire.engine.library.async_llm import AsyncLLM

Message = Mapping[str, str]
_TIMEOUT_S = 600.0
_MAX_ERROR_BYTES = 100_000


class ChatBackend(Protocol):
    """Answer conversations. name: the model's name."""

    name: str

    def stream_answer(self, messages: Sequence[Message], write: Callable[[str], None]) -> None: ...

    def close(self) -> None: ...


class LocalBackend:
    """Run a model in this process.

    Raises what AsyncLLM raises, and TokenizerError for a model without a usable chat template.
    """

    def __init__(
        self, model: str, settings: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> None:
        from quire.engine.library.async_llm import (
            AsyncLLM,  # NumPy and the kernels: a remote chat needs none
        )

        self._runner = asyncio.Runner()
        self._llm: AsyncLLM = AsyncLLM(model, **settings)
        try:
            self._runner.run(self._llm.start())
            client = self._llm.client
            self.name = client.card.name
            with sampling_flags_in_errors():
                self._sampling = client.default_sampling().changed(**sampling)
            if client.template is None:
                raise TokenizerError(
                    f"{self.name} has no chat template; use `quire complete`, put a "
                    "chat_template.jinja in its directory, or give one with --chat-template"
                )
            client.template.check_usable()
        except BaseException:
            self.close()
            raise

    def stream_answer(self, messages: Sequence[Message], write: Callable[[str], None]) -> None:
        """Stream the answer. Raises RequestError if the messages cannot be served."""
        self._runner.run(self._stream_answer(messages, write))

    def close(self) -> None:
        """Stop the engine."""
        self._runner.run(self._llm.close())
        self._runner.close()

    async def _stream_answer(
        self, messages: Sequence[Message], write: Callable[[str], None]
    ) -> None:
        async with aclosing(self._llm.chat(messages, self._sampling)) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise StepRowError(delta.error)
                write(delta.text)


class RemoteBackend:
    """Use a model of an OpenAI-compatible server. `model` empty: the first the server lists.

    Raises WorkerError if no such server answers.
    """

    def __init__(
        self, url: str, *, model: str, api_key: str | None, sampling: Mapping[str, Any]
    ) -> None:
        address = self._address = server_url(url)
        self._path = address.path if address.path.endswith("/v1") else address.path + "/v1"
        self._shown_url = address.shown
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            **key_headers(api_key),
        }
        self._sampling = dict(sampling)
        self.name = model or self._first_model()

    def stream_answer(self, messages: Sequence[Message], write: Callable[[str], None]) -> None:
        """Stream the answer. Raises RequestError, OverloadedError or WorkerError."""
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            **self._sampling,
        }
        with self._response("POST", "/chat/completions", body) as response:
            for event in self._events(response):
                for choice in event.get("choices") or ():
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        write(text)

    def close(self) -> None:
        """Do nothing: connections are closed after each request."""

    def _first_model(self) -> str:
        with self._response("GET", "/models", None) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise WorkerError(
                    f"{self._shown_url} lists no models; name one with MODEL"
                ) from error

    @contextmanager
    def _response(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        """Yield a response with status 200. Raises what `_refusal` returns for others."""
        address = self._address
        kind = http.client.HTTPSConnection if address.is_secure else http.client.HTTPConnection
        with closing(kind(address.host, address.port, timeout=_TIMEOUT_S)) as connection:
            try:
                content = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, content, self._headers)
                response = connection.getresponse()
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise WorkerError(unreachable_text(self._shown_url, error)) from error
            with response:  # it owns a connection that the server closes after it
                if response.status != 200:
                    raise self._refusal(response)
                yield response

    def _refusal(self, response: http.client.HTTPResponse) -> QuireError:
        raw = response.read(_MAX_ERROR_BYTES).decode(errors="replace")
        try:
            message = str(json.loads(raw)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = f"{self._shown_url} answers {response.status} {response.reason}"
        if response.status == 401:
            has_key = "Authorization" in self._headers
            text = key_refused_text(self._shown_url, has_key=has_key)
            return RequestError(f"{text} (the server's words: {message})")
        if response.status == 404:
            return UnknownModel(message)
        if response.status in (429, 503):
            return OverloadedError(message)
        return RequestError(message) if response.status < 500 else WorkerError(message)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
        try:
            for line in response:
                field, _, value = line.decode(errors="replace").partition(":")
                if field != "data":
                    continue
                if value.strip() == "[DONE]":
                    return
                yield self._event(value)
        except (OSError, http.client.HTTPException) as error:
            raise WorkerError(
                f"{self._shown_url} closed the stream early ({error!r}); try again"
            ) from error
        raise WorkerError(
            f"{self._shown_url} closed the stream before the end of its answer; try again"
        )

    def _event(self, value: str) -> dict[str, Any]:
        try:
            event = json.loads(value)
        except ValueError as error:
            raise WorkerError(f"{self._shown_url} sent {value[:80]!r}, not JSON") from error
        if not isinstance(event, dict):
            raise WorkerError(f"{self._shown_url} sent {value[:80]!r}, not an object")
        if event.get("error"):
            detail = event["error"]
            message = detail.get("message") if isinstance(detail, dict) else detail
            raise StepRowError(f"the answer failed: {message}")
        return event
