"""RoutedRequest: what the router reads of a request, and the body that continues its stream.

The body is read for routing and failover only; whether it is valid is the replica's to say, so a
body that is no JSON object is passed on as it is. Always holds: a stream that can be continued has
a seed, drawn here if the client gave none, so any replica of the fingerprint gives the same answer.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.router.event_blocks import CursorComment
from quire.router.policies.policy import RouteKey
from quire.router.prefix_history import block_names

# Routes with streams that can be continued from output_ids.
CONTINUABLE = ("/v1/chat/completions", "/v1/completions", "/generate")
_PROMPT_FIELDS = ("system", "tools", "messages", "prompt", "tokens")
_BYTES_PER_TOKEN = 4
_USUAL_TOKENS = 256
_encode = msgspec.json.Encoder().encode


class RoutedRequest:
    """One request of a client.

    model: "" for any. is_stream: whether its answer is streamed. why_not: why its stream cannot be
    continued; "" if it can. output_ids: of the answer so far; cursor: where its stream stands.
    """

    def __init__(self, path: str, headers: list[tuple[bytes, bytes]], raw: bytes) -> None:
        self.path = path
        self.headers = headers
        self.raw = raw
        self.fields = _fields(raw)
        model = self.fields.get("model")
        self.model = model if isinstance(model, str) else ""
        self.is_stream = self.fields.get("stream") is True
        self.why_not = _why_not_continuable(path, self.fields) if self.is_stream else "it is whole"
        options = self.fields.get("stream_options")
        self._options: Mapping[str, Any] = options if isinstance(options, dict) else {}
        self.shows_comments = bool(self._options.get("include_output_ids"))
        given = None if self.why_not else self.fields.get("output_ids")
        self.output_ids = array("q", given or ())
        self.cursor: str | None = None
        self.num_delivered = 0
        self.transfer: dict[str, Any] | None = None  # of the prompt's blocks (prefill_pairs.py)
        if not self.why_not and self.fields.get("seed") is None:
            self.fields["seed"] = secrets.randbits(31)
        self.prompt_tokens = len(raw) // _BYTES_PER_TOKEN
        self.output_tokens = _expected_tokens(self.fields)

    def key(self) -> RouteKey:
        """Return what policies read."""
        prompt = b"".join(
            _encode(self.fields[name]) for name in _PROMPT_FIELDS if name in self.fields
        )
        salt = self.fields.get("cache_salt")
        scope = f"{self.model}\0{salt if isinstance(salt, str) else ''}"
        return RouteKey(
            blocks=block_names(scope, prompt),
            session=self._session(),
            tokens=self.prompt_tokens + self.output_tokens,
        )

    def body(self) -> bytes:
        """Return the body for the next replica: the client's, or one that continues the stream."""
        transfer = {} if self.transfer is None else {"kv_transfer_params": self.transfer}
        if self.why_not:
            return _encode({**self.fields, **transfer}) if transfer else self.raw
        fields = {
            **self.fields,
            **transfer,
            "stream_options": {**self._options, "include_output_ids": True},
        }
        if self.num_delivered:  # the prompt's progress was reported
            fields.pop("return_progress", None)
        if self.cursor is not None:
            fields["output_ids"] = self.output_ids.tolist()
            fields["output_cursor"] = self.cursor
            fields.pop("kv_transfer_params", None)  # another replica continues without them
        return _encode(fields)

    def delivered(self, cursor: CursorComment) -> None:
        """The client has all events up to `cursor`."""
        self.output_ids.extend(cursor.output_ids)
        self.num_delivered += len(cursor.output_ids)
        self.cursor = cursor.output_cursor

    def _session(self) -> str:
        key = self.fields.get("prompt_cache_key")
        if isinstance(key, str) and key:
            return key
        found = next((value for name, value in self.headers if name == b"x-session-id"), b"")
        return found.decode("latin-1")


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(raw)
        _encode(found)  # numbers that cannot be written again are passed on as they are
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _expected_tokens(fields: Mapping[str, Any]) -> int:
    asked = fields.get("max_completion_tokens", fields.get("max_tokens"))
    is_count = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0
    return min(asked, _USUAL_TOKENS) if is_count else _USUAL_TOKENS


def _why_not_continuable(path: str, fields: Mapping[str, Any]) -> str:
    """Return why the stream of a request cannot be continued; "" if it can."""
    if path not in CONTINUABLE:
        return f"{path} takes no output_ids"
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(type(t) is int for t in prompt):
        return f"it has {len(prompt)} prompts"
    for name in ("n", "best_of"):
        if fields.get(name) not in (None, 1):
            return f"{name} is not 1"
    for name in ("use_beam_search", "mirostat", "echo"):
        if fields.get(name):
            return f"it has {name}"
    if fields.get("prompt_logprobs") is not None:
        return "it has prompt_logprobs"
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return "its stream_options are no object"
    if options and options.get("resumable"):
        return "it has stream_options.resumable"
    given = fields.get("output_ids")
    if given is not None and not (
        isinstance(given, list) and all(type(t) is int and 0 <= t < 2**31 for t in given)
    ):
        return "its output_ids are not token ids"
    return ""
