"""Cascade: a small model answers what it can, a large one the rest.

Rules (length, tools, the operator's expressions) send hard requests to the large model at once.
A whole answer of the small model is judged once it is complete: by the mean log-probability of its
tokens, by whether its JSON is complete, by a refusal or a cut. A stream is judged only if it may
be held until it is complete, since what was delivered cannot be taken back. Knows no replica.
Expressions come from the configuration and never from a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.router.route_file import CascadeTable
from quire.router.routed_request import RoutedRequest

_JUDGED = ("/v1/chat/completions", "/v1/completions")
_MAX_SEARCHED_CHARS = 16_384
_encode = msgspec.json.Encoder().encode


class Cascade:
    """One name with a small and a large model."""

    def __init__(self, name: str, table: CascadeTable) -> None:
        self.name = name
        self.small, self.large = table.small, table.large
        self._table = table
        self._patterns = [re.compile(one) for one in table.large_patterns]

    def rule(self, request: RoutedRequest) -> str:
        """Return the rule by which the large model answers at once; "" for none."""
        if request.prompt_tokens > self._table.max_prompt_tokens:
            return "long_prompt"
        if self._table.tools == "large" and request.fields.get("tools"):
            return "tools"
        if self._patterns:
            text = _prompt_text(request.fields)
            if any(pattern.search(text) for pattern in self._patterns):
                return "pattern"
        return ""

    def judge(self, request: RoutedRequest) -> Judge | None:
        """Return what judges the small model's answer; None where it is not judged.

        Asks for the log-probabilities that the judge needs.
        """
        table = self._table
        if request.path not in _JUDGED or not table.escalate:
            return None
        if request.is_stream and (request.why_not or not table.judge_streams):
            return None
        adds = "low-confidence" in table.escalate and not _asks_logprobs(request.fields)
        judge = Judge(table, request, hides_logprobs=adds)
        if adds:
            request.change("logprobs", True if request.path.endswith("chat/completions") else 0)
        return judge


class Judge:
    """Judges one answer. hides_logprobs: the client did not ask for them."""

    def __init__(
        self, table: CascadeTable, request: RoutedRequest, *, hides_logprobs: bool
    ) -> None:
        self._table = table
        self._hides_logprobs = hides_logprobs
        self._given = request.fields.get("logprobs")
        self._wants_json = _wants_json(request.fields)

    def undo(self, request: RoutedRequest) -> None:
        """Ask for what the client asked for."""
        if self._hides_logprobs:
            request.change("logprobs", self._given)

    def verdict(self, body: bytes) -> tuple[str, bytes]:
        """Return why the large model must answer, "" where it need not, and the client's body."""
        answer = _object(body)
        choices = _choices(answer)
        reasons = [why for one in choices if (why := self._why(one))]
        if reasons or not choices or not self._hides_logprobs:
            return (reasons[0] if reasons else ""), body
        for one in choices:
            one["logprobs"] = None
        return "", _encode(answer)

    def stream_verdict(self, events: bytes) -> str:
        """Return why the large model must answer instead of a whole stream; "" if it need not."""
        text, known, finish, message = "", list[Any](), None, dict[str, Any]()
        for block in events.split(b"\n\n"):
            for choice in _choices(_object(block[block.find(b"data: ") + 6 :])):
                delta = choice.get("delta")
                delta = delta if isinstance(delta, dict) else {}
                piece = delta.get("content", choice.get("text"))
                text += piece if isinstance(piece, str) else ""
                known += [{"logprob": one} for one in _logprobs(choice.get("logprobs"))]
                finish = choice.get("finish_reason") or finish
                message |= {key: delta[key] for key in ("refusal", "tool_calls") if delta.get(key)}
        whole = {"message": {**message, "content": text}, "logprobs": {"content": known}}
        return self._why({**whole, "finish_reason": finish})

    def shown_events(self, events: bytes) -> bytes:
        """Return events for the client: without what only the router has asked for."""
        if not self._hides_logprobs:
            return events
        shown = []
        for block in events.split(b"\n\n"):
            start = block.find(b"data: {")
            event = _object(block[start + 6 :]) if start >= 0 else None
            if choices := _choices(event):
                for one in choices:
                    one["logprobs"] = None
                block = block[: start + 6] + _encode(event)
            shown.append(block)
        return b"\n\n".join(shown)

    def _why(self, choice: Mapping[str, Any]) -> str:
        escalate, finish = self._table.escalate, choice.get("finish_reason")
        message = choice.get("message")
        message = message if isinstance(message, dict) else {}
        if "refusal" in escalate and (message.get("refusal") or finish == "content_filter"):
            return "refusal"
        if "length" in escalate and finish == "length":
            return "length"
        text = message.get("content", choice.get("text"))
        needs_json = self._wants_json and not message.get("tool_calls")
        if "failed-grammar" in escalate and needs_json and not _is_json(text):
            return "failed-grammar"
        if "low-confidence" in escalate:
            known = _logprobs(choice.get("logprobs"))
            if known and sum(known) / len(known) < self._table.min_mean_logprob:
                return "low-confidence"
        return ""


def _object(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _choices(answer: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer; none of what is no answer, which is passed on as it is."""
    found = answer.get("choices") if isinstance(answer, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _asks_logprobs(fields: Mapping[str, Any]) -> bool:
    return fields.get("logprobs") not in (None, False)


def _wants_json(fields: Mapping[str, Any]) -> bool:
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema"):
        return True
    asked = fields.get("structured_outputs")
    return isinstance(asked, dict) and ("json" in asked or "json_object" in asked)


def _is_json(text: Any) -> bool:
    if not isinstance(text, str):
        return False
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return False
    return True


def _logprobs(found: Any) -> Sequence[float]:
    """Return the log-probabilities of a choice, in the form of chats or of completions."""
    if not isinstance(found, dict):
        return ()
    content = found.get("content")
    given = (
        [one.get("logprob") for one in content if isinstance(one, dict)]
        if isinstance(content, list)
        else found.get("token_logprobs")
    )
    return [one for one in given or () if isinstance(one, int | float)]


def _prompt_text(fields: Mapping[str, Any]) -> str:
    """Return the text that expressions are searched in: the newest user message, or the prompt."""
    messages = fields.get("messages")
    found: Any = fields.get("prompt", fields.get("input"))
    if isinstance(messages, list):
        of_user = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        found = of_user[-1].get("content") if of_user else ""
    if isinstance(found, list):
        parts = [one.get("text") if isinstance(one, dict) else one for one in found]
        found = "\n".join(one for one in parts if isinstance(one, str))
    return found[-_MAX_SEARCHED_CHARS:] if isinstance(found, str) else ""
