"""Cascade: a small model answers what it can, a large one the rest.

Rules (length, tools, the operator's expressions) and a classifier send hard requests to the large
model at once.
A whole answer of the small model is judged once it is complete: by the mean log-probability of its
tokens, by whether its JSON is complete, by a refusal or a cut (judged_answers.py reads these of
each API). A stream is judged only if it may be held until it is complete, since what was delivered
cannot be taken back. Knows no replica.
Expressions come from the configuration and never from a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.base.http_apis import OPENAI
from quire.base.log import Log
from quire.router.api_forms import objects_in
from quire.router.classifier import read_classifier
from quire.router.judged_answers import (
    JUDGED_FORMS,
    JudgedAnswer,
    JudgedForm,
    choices_of,
    logprobs_of,
    openai_answer,
)
from quire.router.outcome_log import OutcomeLog
from quire.router.prompt_features import Features, features_of
from quire.router.route_file import CascadeTable
from quire.router.routed_request import RoutedRequest
from quire.router.routes import RESPONSES

_MAX_SEARCHED_CHARS = 16_384
# Probability above which a request is hard.
HARD_ABOVE = 0.5
# Share of hard requests that are answered by the small model, where outcomes are logged.
EXPLORE = 0.02
# Of an answer: refusals are in its beginning.
_MAX_REFUSAL_CHARS = 300
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
        self._refusals = [re.compile(one) for one in table.refusal_patterns]
        self._classifier = read_classifier(table.classifier) if table.classifier else None
        self._outcomes = OutcomeLog(table.outcomes) if table.outcomes else None
        self._hard_above = HARD_ABOVE if table.hard_above is None else table.hard_above
        self._explore = EXPLORE if table.explore is None else table.explore
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
        return known is not None and known > self._hard_above

    def explores(self, request: RoutedRequest) -> bool:
        """Return whether a hard request is answered by the small model all the same, so that its
        outcome is known; each time that their share allows it."""
        if self._outcomes is None or not self._is_judged(request):
            return False
        self._unexplored += self._explore
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
        """Return what judges the small model's answer; None where it is not judged. Asks for the
        log-probabilities that the judge needs."""
        if not self._is_judged(request):
            return None
        table, form = self._table, JUDGED_FORMS[request.path]
        asked = form.ask(request.fields) if "low-confidence" in table.escalate else None
        asked_field = "" if asked is None else asked[0]
        judge = Judge(table, form, request, asked_field, self._refusals)
        if asked is not None:
            request.change(*asked)
        return judge

    def _is_judged(self, request: RoutedRequest) -> bool:
        """Return whether an answer of the small model is judged. One that needs a stored response
        is not, since only the replica that has it can answer."""
        if request.path not in JUDGED_FORMS or not self._table.escalate:
            return False
        if request.path == RESPONSES and _needs_stored(request.fields):
            return False
        if not request.is_stream:
            return True
        return self._table.judge_streams and not request.why_not and request.form.api == OPENAI


class Judge:
    """Judges one answer. asked: the field in which log-probabilities were asked for although the
    client did not; "" where it did. refusals: expressions that an answer that is none matches.
    has_seen: whether it had an answer of a known form."""

    def __init__(
        self,
        table: CascadeTable,
        form: JudgedForm,
        request: RoutedRequest,
        asked: str,
        refusals: Sequence[re.Pattern[str]],
    ) -> None:
        self._table = table
        self._form = form
        self._asked = asked
        self._refusals = refusals
        self.has_seen = True
        self._given = request.fields.get(asked)
        self._wants_json = form.wants_json(request.fields)

    def undo(self, request: RoutedRequest) -> None:
        """Ask for what the client asked for."""
        if self._asked:
            request.change(self._asked, self._given)

    def verdict(self, body: bytes) -> tuple[str, bytes]:
        """Return why the large model must answer, "" where it need not, and the client's body."""
        answer = _object(body)
        choices = self._form.read(answer)
        self.has_seen = bool(choices)
        reasons = [why for one in choices if (why := self._why(one))]
        if reasons or not choices or not self._asked:
            return (reasons[0] if reasons else ""), body
        self._form.hide(answer)
        return "", _encode(answer)

    def stream_verdict(self, events: bytes) -> str:
        """Return why the large model must answer instead of a whole stream; "" if it need not."""
        text, known, finish, message = "", list[float](), None, dict[str, Any]()
        for block in events.split(b"\n\n"):
            for choice in choices_of(_object(block[block.find(b"data: ") + 6 :])):
                delta = choice.get("delta")
                delta = delta if isinstance(delta, dict) else {}
                piece = delta.get("content", choice.get("text"))
                text += piece if isinstance(piece, str) else ""
                known += logprobs_of(choice.get("logprobs"))
                finish = choice.get("finish_reason") or finish
                message |= {key: delta[key] for key in ("refusal", "tool_calls") if delta.get(key)}
        whole = {"message": {**message, "content": text}, "logprobs": known}
        return self._why(openai_answer({**whole, "finish_reason": finish}))

    def shown_events(self, events: bytes) -> bytes:
        """Return events for the client: without what only the router has asked for."""
        if not self._asked:
            return events
        shown = list[bytes]()
        for block in events.split(b"\n\n"):
            start = block.find(b"data: {")
            event = _object(block[start + 6 :]) if start >= 0 else None
            if choices_of(event):
                self._form.hide(event)
                if _is_empty(event):  # there for its log-probabilities
                    continue
                block = block[: start + 6] + _encode(event)
            shown.append(block)
        return b"\n\n".join(shown)

    def _why(self, answer: JudgedAnswer) -> str:
        escalate = self._table.escalate
        if "refusal" in escalate and (answer.end == "refusal" or self._refuses(answer)):
            return "refusal"
        if answer.end == "length" and "length" in escalate:
            return "length"
        needs_json = self._wants_json and not answer.calls_tools
        if "failed-grammar" in escalate and needs_json and not _is_json(answer.text):
            return "failed-grammar"
        known = answer.logprobs if "low-confidence" in escalate else ()
        if known and sum(known) / len(known) < self._table.min_mean_logprob:
            return "low-confidence"
        return ""

    def _refuses(self, answer: JudgedAnswer) -> bool:
        """Return whether the text of an answer says that it is none."""
        if answer.calls_tools or not isinstance(answer.text, str):
            return False
        beginning = answer.text[:_MAX_REFUSAL_CHARS]
        return any(pattern.search(beginning) for pattern in self._refusals)


def _needs_stored(fields: Mapping[str, Any]) -> bool:
    items = objects_in(fields.get("input"))
    has_reference = any(one.get("type") == "item_reference" for one in items)
    return has_reference or bool(fields.get("previous_response_id"))


def _object(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _is_json(text: str | None) -> bool:
    if not isinstance(text, str):
        return False
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return False
    return True


def _is_empty(event: Any) -> bool:
    """Return whether an event of a stream says nothing: a server without log-probabilities to show
    does not write it."""
    if event.get("usage") is not None or event.get("error") is not None:
        return False
    for one in choices_of(event):
        delta = one.get("delta")
        if one.get("finish_reason") or one.get("text"):
            return False
        if isinstance(delta, dict) and any(delta.values()):
            return False
    return True
