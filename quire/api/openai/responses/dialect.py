"""The conventions of the Responses API: OpenAI's keys and errors, and events with names.

An event is `event: TYPE` and one `data:` line, with the field `sequence_number` from 0. A stream
has no end marker: its last event is response.completed, response.incomplete or response.failed. An
error in a stream is an `error` event, followed by response.failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from quire.api.openai.dialect import OpenAIDialect, OpenAIFraming

# Returns the response after an error with this object; None: no event has it.
Fail = Callable[[dict[str, Any]], dict[str, Any] | None]


class ResponsesFraming(OpenAIFraming):
    """Server-sent events. fail: called with the error that ends a stream."""

    def __init__(self, fail: Fail) -> None:
        super().__init__("")
        self._fail = fail

    def event(self, number: int, payload: bytes, kind: str = "") -> bytes:
        """Return one event; its number is added to the object of `payload`."""
        return b'event: %b\ndata: %b,"sequence_number":%d}\n\n' % (
            kind.encode(),
            payload[:-1],
            number - 1,
        )

    def error(self, number: int, payload: bytes, kind: str = "error") -> bytes:
        """Return the `error` event, and response.failed."""
        error = msgspec.json.decode(payload)["error"]
        found = {"type": kind, **{name: error[name] for name in ("code", "message", "param")}}
        events = self.event(number, msgspec.json.encode(found), kind)
        response = self._fail(error)
        if response is None:
            return events
        failed = msgspec.json.encode({"type": "response.failed", "response": response})
        return events + self.event(number + 1, failed, "response.failed")

    def end(self, number: int) -> bytes:
        """Return nothing: the last event is the end."""
        return b""


class ResponsesDialect(OpenAIDialect):
    """See the top of this file. fail: as of ResponsesFraming, for the streams of one request."""

    def __init__(self, fail: Fail = lambda error: None) -> None:
        self._fail = fail

    def framing(self, request_id: str) -> ResponsesFraming:
        """Return the framing of one stream."""
        return ResponsesFraming(self._fail)


RESPONSES_DIALECT = ResponsesDialect()
