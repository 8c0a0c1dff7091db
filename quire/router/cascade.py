"""Cascade: a small model answers what it can, a large one the rest.

Rules (length, tools, the operator's expressions) and a classifier send hard requests to the large
model at once.
A whole answer of the small model is judged once it is complete: by the mean log-probability of its
tokens, by whether its JSON is complete, by a refusal or a cut. A stream is judged only if it may
be held until it is complete, since what was delivered cannot be taken back. Knows no replica.
Expressions come from the configuration and never from a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.base.log import Log
from quire.router.classifier import read_classifier
from quire.router.outcome_log import OutcomeLog
from quire.router.prompt_features import Features, features_of
from quire.router.route_file import CascadeTable
from quire.router.routed_request import RoutedRequest

_JUDGED = ("/v1/chat/completions", "/v1/completions")
_MAX_SEARCHED_CHARS = 16_384
_encode = msgspec.json.Encoder().encode


class Guess(NamedTuple):
    """What is known of a request before it is answered. probability: that it is hard; None without
    a classifier."""

    features: Features
    probability: float | None


class Cascade:
    """One name with a small and a large model. Raises SettingError for a classifier that cannot be
    read."""

    def __init__(self, name: str, table: CascadeTable) -> None:
        self.name = name
        self.small, self.large = table.small, table.large
        self._table = table
        self._patterns = [re.compile(one) for one in table.large_patterns]
        self._classifier = read_classifier(table.classifier) if table.classifier else None
        self._outcomes = OutcomeLog(table.outcomes) if table.outcomes else None
        self._unexplored = 0.0

    def report_to(self, log: Log) -> None:
        """Log it once where outcomes cannot be written."""
        if self._outcomes is not None:
            self._outcomes.complain = lambda what: log.warning(
                "outcomes of a cascade cannot be written", cascade=self.name, reason=what
            )

    def guess(self, request: RoutedRequest) -> Guess | None:
        """Return what the classifier says of a request; None where neither it nor a log is used."""
        if self._classifier is None and self._outcomes is None:
            return None
        found = features_of(request.user_text, request.prompt_tokens, request.fields)
        known = self._classifier
        return Guess(found, None if known is None else known.probability(found))

    def is_hard(self, guess: Guess | None) -> bool:
        """Return whether the classifier says that the large model should answer."""
        known = None if guess is None else guess.probability
        return known is not None and known > self._table.hard_above

    def explores(self, request: RoutedRequest) -> bool:
        """Return whether a hard request is answered by the small model all the same, so that its
        outcome is known; each time that their share allows it."""
        if self._outcomes is None or not self._is_judged(request):
            return False
        self._unexplored += self._table.explore
        is_due = self._unexplored >= 1.0
        self._unexplored -= is_due
        return is_due

    def note(self, guess: Guess, reason: str) -> None:
        """Log the outcome of an answer of the small model. reason: why it is replaced, "" if it is
        kept."""
        if self._outcomes is not None:
            self._outcomes.note(self.name, guess.features, reason)

    def rule(self, request: RoutedRequest) -> str:
        """Return the rule by which the large model answers at once; "" for none."""
        if request.prompt_tokens > self._table.max_prompt_tokens:
            return "long_prompt"
        if self._table.tools == "large" and request.fields.get("tools"):
            return "tools"
        if self._patterns:
            text = request.user_text[-_MAX_SEARCHED_CHARS:]
            if any(pattern.search(text) for pattern in self._patterns):
                return "pattern"
        return ""

    def judge(self, request: RoutedRequest) -> Judge | None:
        """Return what judges the small model's answer; None where it is not judged.

        Asks for the log-probabilities that the judge needs.
        """
        table = self._table
        if not self._is_judged(request):
            return None
        adds = "low-confidence" in table.escalate and not _asks_logprobs(request.fields)
        judge = Judge(table, request, hides_logprobs=adds)
        if adds:
            request.change("logprobs", True if request.path.endswith("chat/completions") else 0)
        return judge

    def _is_judged(self, request: RoutedRequest) -> bool:
        if request.path not in _JUDGED or not self._table.escalate:
            return False
        return not request.is_stream or not (request.why_not or not self._table.judge_streams)


class Judge:
    """Judges one answer. hides_logprobs: the client did not ask for them. has_seen: whether it had
    an answer of a known form."""

    def __init__(
        self, table: CascadeTable, request: RoutedRequest, *, hides_logprobs: bool
    ) -> None:
        self._table = table
        self._hides_logprobs = hides_logprobs
        self.has_seen = True
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
        self.has_seen = bool(choices)
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
