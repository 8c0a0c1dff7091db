"""PromptSummary: the earlier part of a chat that does not fit, replaced by a summary, on request.

A request asks for it by the field `summarize_prompt`. A model of the replicas summarizes the
earlier messages piece by piece, each piece together with the summary so far, at temperature 0.
Knows no replica: requests for summaries are sent by a function that is handed in. Always holds:
system messages and the newest turns stay as they are; a summary takes at most the tokens and
requests that the operator allows; without the field nothing is summarized.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from quire.router.api_forms import TOO_LONG, error_message, objects_in
from quire.router.faults import Refusal
from quire.router.route_file import Name, SummariesTable
from quire.router.routed_request import BYTES_PER_TOKEN, RoutedRequest

FIELD = "summarize_prompt"
REPORT_FIELD = "prompt_summary"
HEADER = b"x-quire-prompt-summary"
CHAT_PATH = "/v1/chat/completions"

_SYSTEM = frozenset({"system", "developer"})
# A piece has so few characters for each token of the context that it nearly always fits; one that
# does not is halved.
_CHARS_PER_TOKEN = 3
_TASK_TOKENS = 160
_MIN_PIECE_CHARS = 64
# Fields of a request that hold for its summary too.
_KEPT_FIELDS = (
    "cache_salt",
    "deadline_ms",
    "isolate_cache",
    "priority",
    "prompt_cache_key",
    "user",
)
_TASK = (
    "Summarize the conversation below for an assistant that continues it and sees only your "
    "summary. Keep facts, names, numbers, decisions, results of tools and open questions. Write in "
    "the language of the conversation. Do not answer it, and add nothing to it."
)
_SUMMARY_BEGINS = "Summary of our conversation so far:\n"
_ACKNOWLEDGED = "Understood. I continue from this summary."
_EVENT = b"data: {"

# Sends a chat to the replicas; returns status, error code and body of the answer.
Ask = Callable[[Mapping[str, Any]], Awaitable[tuple[int, str, bytes]]]


class _Given(Struct, forbid_unknown_fields=True):
    """The field as an object."""

    model: Name = ""
    max_tokens: Annotated[int, Meta(ge=16, le=2**20)] = 0
    keep_turns: Annotated[int, Meta(ge=1, le=10_000)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryOrder:
    """What a request asks for. keep_turns: the newest user messages that stay as they are, each
    with what follows it."""

    model: str
    max_tokens: int
    keep_turns: int


class _Parts(NamedTuple):
    """The messages of a chat. kept: its newest turns."""

    system: list[dict[str, Any]]
    earlier: list[dict[str, Any]]
    kept: list[dict[str, Any]]


def read_order(request: RoutedRequest, table: SummariesTable | None) -> SummaryOrder | None:
    """Take the field out of a request; None where it asks for no summary. Raises Refusal."""
    if FIELD not in request.fields:
        return None
    given = request.fields[FIELD]
    request.change(FIELD, None)
    if given is None or given is False:
        return None
    if table is None:
        raise _invalid(
            f"{FIELD} is given and this router summarizes no prompts; leave it out, send a shorter "
            "prompt, or add [summaries] to the file of the router (--config)"
        )
    if request.path != CHAT_PATH:
        raise _invalid(
            f"{FIELD} is a field of {CHAT_PATH} only, since messages show what is earlier; leave "
            f"it out of {request.path}"
        )
    if request.fields.get("truncate_prompt_tokens") is not None:
        raise _invalid(
            f"{FIELD} and truncate_prompt_tokens are both given; a prompt is either summarized or "
            "cut: leave one of them out"
        )
    try:
        asked = _Given() if given is True else msgspec.convert(given, _Given)
    except msgspec.ValidationError as error:
        raise _invalid(
            f"{FIELD}: {error}; true or an object with model, max_tokens (from 16) and keep_turns "
            "(from 1) is allowed"
        ) from error
    if asked.max_tokens > table.max_tokens:
        raise _invalid(
            f"{FIELD}.max_tokens is {asked.max_tokens}; at most {table.max_tokens} (max-tokens of "
            "[summaries]) are allowed"
        )
    order = SummaryOrder(
        model=asked.model or table.model,
        max_tokens=asked.max_tokens or table.max_tokens,
        keep_turns=asked.keep_turns,
    )
    request.reserved_tokens += request.prompt_tokens + order.max_tokens
    return order


class PromptSummary:
    """The summary of one request's prompt. context_tokens: of the model that summarizes; 0 where it
    is not known. num_messages, num_requests, prompt_tokens, output_tokens, finish_reason: of the
    summary, once there is one."""

    def __init__(
        self, table: SummariesTable, order: SummaryOrder, ask: Ask, context_tokens: int
    ) -> None:
        self._table = table
        self._order = order
        self._ask = ask
        self._context_tokens = context_tokens
        self.num_messages = self.num_requests = 0
        self.prompt_tokens = self.output_tokens = 0
        self.finish_reason = ""
        self._text = ""
        self._is_line_start = True  # of the next piece of a stream

    async def shorten(self, request: RoutedRequest, why: str) -> None:
        """Replace the earlier messages of a request by a summary. Raises Refusal.

        why: what the replica said about the length of the prompt.
        """
        kept = self._order.keep_turns
        parts = _parts(request.fields.get("messages"), kept)
        if not parts.earlier:
            turns = "turn" if kept == 1 else f"{kept} turns"
            raise _too_long(
                f"{why}; and there is nothing to summarize: system messages and the newest "
                f"{turns} stay as they are. Send fewer or shorter ones"
            )
        text = "\n\n".join(map(_line, parts.earlier))
        tokens = len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN
        if tokens > self._table.max_prompt_tokens:
            raise _too_long(
                f"{why}; and its earlier part has about {tokens} tokens, of which at most "
                f"{self._table.max_prompt_tokens} are summarized (max-prompt-tokens of "
                "[summaries]). Send less of the conversation"
            )
        self.num_messages = len(parts.earlier)
        self._text = await self._summarized(request, text)
        summary = [
            {"role": "user", "content": _SUMMARY_BEGINS + self._text},
            {"role": "assistant", "content": _ACKNOWLEDGED},
        ]
        request.use_messages([*parts.system, *summary, *parts.kept])

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The header that says what was summarized, as JSON of ASCII characters."""
        return HEADER, json.dumps(self._report(), separators=(",", ":")).encode()

    def shown(self, body: bytes) -> bytes:
        """Return a whole answer with the report."""
        at = body.find(b"{") + 1
        return self._added(body, at) if at and b":" in body else body

    def shown_event(self, events: bytes) -> bytes | None:
        """Return events with the report in the first of them; None where there is none yet.

        A piece of a stream may begin within an event, with a text that looks like another one. An
        event begins a line, and a text has no line that is not escaped.
        """
        before = b"\n" if self._is_line_start else b""
        if events:
            self._is_line_start = events.endswith(b"\n")
        found = (before + events).find(b"\n" + _EVENT)
        at = found + 1 - len(before)
        if found < 0 or events.startswith(b'data: {"error"', at):
            return None
        return self._added(events, at + len(_EVENT))

    def _added(self, raw: bytes, at: int) -> bytes:
        report = msgspec.json.encode({**self._report(), "text": self._text})
        return b'%b"%b":%b,%b' % (raw[:at], REPORT_FIELD.encode(), report, raw[at:])

    def _report(self) -> dict[str, Any]:
        return {
            "model": self._order.model,
            "messages": self.num_messages,
            "requests": self.num_requests,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.output_tokens,
                "total_tokens": self.prompt_tokens + self.output_tokens,
            },
        }

    async def _summarized(self, request: RoutedRequest, text: str) -> str:
        """Return the summary of a text. Raises Refusal."""
        summary, at, size = "", 0, self._first_size(text)
        while at < len(text):
            self._check_requests(math.ceil((len(text) - at) / size))
            piece = _piece(text, at, size)
            try:
                status, code, body = await self._ask(self._fields(request, summary, piece))
            except Refusal as refusal:
                raise self._failed(str(refusal), refusal.status, refusal) from refusal
            if status == 400 and code == TOO_LONG:
                size = len(piece) // 2
                if size < _MIN_PIECE_CHARS:
                    raise self._failed(
                        f"a piece of {len(piece)} characters is too long for it", status
                    )
                continue
            if status != 200:
                said = error_message(body)
                raise self._failed(f"it answered {status}{said and f': {said}'}", status)
            summary = self._read(request, body)
            at += len(piece)
        return summary

    def _first_size(self, text: str) -> int:
        """Return the characters of a piece beside the summary so far and the next one."""
        if not self._context_tokens:
            return len(text)
        room = self._context_tokens - 2 * self._order.max_tokens - _TASK_TOKENS
        if room * _CHARS_PER_TOKEN < _MIN_PIECE_CHARS:
            raise self._failed(
                f"its context of {self._context_tokens} tokens has no room beside summaries of "
                f"{self._order.max_tokens} tokens; set {FIELD}.max_tokens lower, or name a model "
                "with a longer context",
                400,
            )
        return min(room * _CHARS_PER_TOKEN, len(text))

    def _check_requests(self, num_left: int) -> None:
        most = self._table.max_requests
        if self.num_requests + num_left > most:
            raise _too_long(
                f"the prompt does not fit, and its summary would take "
                f"{self.num_requests + num_left} requests of model {self._order.model!r}, of which "
                f"at most {most} are allowed (max-requests of [summaries]). Send less of the "
                "conversation, or name a model with a longer context"
            )

    def _fields(self, request: RoutedRequest, summary: str, piece: str) -> dict[str, Any]:
        request.waited(asyncio.get_running_loop().time())
        before = f"\n\nSummary of what came before:\n{summary}" if summary else ""
        content = f"{_TASK}{before}\n\nConversation:\n{piece}\n\nSummary:"
        kept = {name: request.fields[name] for name in _KEPT_FIELDS if name in request.fields}
        return {
            **kept,
            "model": self._order.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._order.max_tokens,
            "temperature": 0,
            "seed": 0,
            "reasoning_effort": "none",
        }

    def _read(self, request: RoutedRequest, body: bytes) -> str:
        """Return the summary in an answer, and count what it took. Raises Refusal."""
        used = request.form.used_tokens(body)
        prompt_tokens, output_tokens = used if used is not None else (0, self._order.max_tokens)
        self.num_requests += 1
        self.prompt_tokens += max(prompt_tokens, 0)
        self.output_tokens += output_tokens
        request.replaced_tokens += max(prompt_tokens, 0) + output_tokens
        try:
            choice = msgspec.json.decode(body)["choices"][0]
            content = choice["message"]["content"]
            self.finish_reason = str(choice.get("finish_reason") or "")
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError):
            content = None
        if not isinstance(content, str) or not content.strip():
            raise self._failed("its answer has no text", 502)
        return content.strip()

    def _failed(self, why: str, status: int, cause: Refusal | None = None) -> Refusal:
        """Return the refusal of a summary. status: of what the summarizing model answered."""
        text = (
            f"the prompt does not fit, and it could not be summarized by model "
            f"{self._order.model!r}: {why}"
        )
        if 400 <= status < 500 and status != 429:
            return Refusal(400, "summary_failed", text, param=FIELD)
        after_s = None if cause is None else cause.retry_after_s
        return Refusal(503, "summary_failed", text, param=FIELD, retry_after_s=after_s)


def _parts(messages: Any, keep_turns: int) -> _Parts:
    """Divide messages; all of them are kept where they are no list of objects."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return _Parts([], [], messages)
    of_user = [at for at, one in enumerate(messages) if one.get("role") == "user"]
    start = of_user[-keep_turns] if len(of_user) >= keep_turns else 0
    system = [one for one in messages[:start] if one.get("role") in _SYSTEM]
    earlier = [one for one in messages[:start] if one.get("role") not in _SYSTEM]
    return _Parts(system, earlier, messages[start:])


def _line(message: Mapping[str, Any]) -> str:
    """Return a message as a line of the conversation."""
    role = message.get("role")
    texts = [_text(message.get("content")), *map(_call, objects_in(message.get("tool_calls")))]
    if isinstance(one := message.get("function_call"), dict):
        texts.append(_call({"function": one}))
    return f"{role if isinstance(role, str) else 'user'}: " + "\n".join(filter(None, texts))


def _text(content: Any) -> str:
    """Return the text of a content; parts of other kinds by their names."""
    if isinstance(content, str):
        return content
    parts = []
    for one in objects_in(content):
        text = one.get("text", one.get("refusal"))
        parts.append(text if isinstance(text, str) else f"[{one.get('type')}]")
    return "\n".join(parts)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return f"[calls {function.get('name')} with {function.get('arguments')}]"


def _piece(text: str, at: int, size: int) -> str:
    """Return at most `size` characters from `at` on, up to the end of a message, line or word."""
    piece = text[at : at + size]
    if at + size < len(text):
        for mark in ("\n\n", "\n", " "):
            end = piece.rfind(mark)
            if end > size // 2:
                return piece[: end + len(mark)]
    return piece


def _invalid(message: str) -> Refusal:
    return Refusal(400, "invalid_value", message, param=FIELD)


def _too_long(message: str) -> Refusal:
    return Refusal(400, "context_length_exceeded", message, param="messages")
