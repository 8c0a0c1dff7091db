"""RoutedRequest: what the router reads of a request, and the body that continues its stream.

The body is read for routing and failover only; whether it is valid is the replica's to say, so a
body that is no JSON object is passed on as it is. Always holds: a stream that can be continued has
a seed, drawn here if the client gave none, so any replica of the fingerprint gives the same answer.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from quire.base.http_apis import LLAMA_CPP, RESPONSES, header_in
from quire.router.api_forms import ApiForm, form_of, value_at, with_value
from quire.router.event_blocks import CursorComment
from quire.router.judged_answers import LOGPROBS_OF_RESPONSES
from quire.router.output_rate import OutputRate
from quire.router.routes import Route, route_of
from quire.router.stream_journal import StreamJournal, is_known_ids
from quire.routing.policy import RouteKey
from quire.routing.prefix_history import block_names

BYTES_PER_TOKEN = 4
# Of a path, beside letters and digits; all others are encoded.
_PATH_CHARS = "/:@!$&'()*+,;=~-._"
_USUAL_TOKENS = 256
# Shorter waits are not taken from a request's times, so that its body is passed on as it is.
_MIN_WAITED_MS = 10
_MAX_MS = 1e12
_MAX_TOKENS, _MAX_ANSWERS = 2**31, 4096
# What ends or goes on by more than the tokens so far.
_NOT_CONTINUABLE = (
    *("use_beam_search", "mirostat", "echo", "t_max_predict_ms", "n_indent", "background"),
)
_OPTIONS = "stream_options"
_encode = msgspec.json.Encoder().encode


class RoutedRequest:
    """One request of a client.

    form: of its API. names_model: whether the model can be read: it is in the path, or the body is
    an object in which it is a text or left out. model: "" for any. is_stream: whether its answer is
    streamed. why_not: why its stream cannot be continued; "" if it can. journal: what the client
    has of it. num_delivered: tokens that the client got here. output_tokens: expected, for the load
    of a replica. num_answers: to all its prompts. limit_tokens: that these may have together.
    whole_tokens: expected of whole answers; 0 for a stream. reserved_tokens: as many as it may use.
    used_prompt_tokens, used_output_tokens: as far as they are known; -1 before. replaced_tokens: of
    an answer that a cascade has replaced, and of summaries of the prompt. block_hashes: of the
    prompt's KV blocks of block_size tokens, where they are known. first_token_s: when a stream had
    its first tokens; 0 before. came_s: when it came, from which its deadline counts. sent_s: when
    it was first sent to a replica; 0 before. is_prefilled: a prefill replica has its prompt or had
    it. summarizing: what is asked for a summary of its prompt, until that is there.
    """

    def __init__(
        self,
        path: str,
        headers: list[tuple[bytes, bytes]],
        raw: bytes,
        *,
        method: bytes = b"POST",
        query: bytes = b"",
    ) -> None:
        self.path = path
        self.method = method
        self._query = query
        self._found = route_of(path)
        self.route, self.form = self._found.route, form_of(path)
        self.headers = headers
        self.raw = raw
        self.fields = _fields(raw)
        named = [self._found.model, *map(self.fields.get, self.route.model_fields)]
        model = next((one for one in named if one is not None), None)
        is_object = bool(self.fields) or self._found.model is not None
        self.names_model = is_object and isinstance(model, str | None)
        self.model = model if isinstance(model, str) else ""
        stream = self.fields.get("stream", self.route.streams)
        in_query = self.route.stream_in_query and b"stream=true" in query.split(b"&")
        self.is_stream = stream is True or in_query
        self.why_not = "it is whole"
        if self.is_stream:
            is_declined = _decline_resumable(self.form, self.fields)
            self.why_not = _why_not_continuable(path, self.route, self.form, self.fields)
            if is_declined and self.why_not:
                self.raw = _encode(self.fields)
        self.shows_comments = bool(value_at(self.fields, self.form.output_ids))
        self.journal = StreamJournal({} if self.why_not else self.fields)
        self.num_delivered = 0
        self.transfer: dict[str, Any] | None = None  # of the prompt's blocks (prefill_pairs.py)
        if not self.why_not and value_at(self.fields, self.form.seed) is None:
            self.fields = with_value(self.fields, self.form.seed, secrets.randbits(31))
        self.prompt_tokens = _prompt_tokens(self.fields, raw)
        asked = min(self.form.asked_tokens(self.fields, _USUAL_TOKENS), _MAX_TOKENS)
        self.output_tokens = min(asked, _USUAL_TOKENS) if self.route.generates else 0
        num_each = _num_answers(self.form, self.fields)
        self.num_answers = num_each * _num_prompts(self.fields.get("prompt"))
        # Events of this API count the tokens of one answer.
        self.counts_apart = self.form.api == LLAMA_CPP and self.num_answers > 1
        self.whole_tokens = 0 if self.is_stream else self.output_tokens * self.num_answers
        self.limit_tokens = asked * self.num_answers if self.route.generates else 0
        self.reserved_tokens = 0
        if not self.route.is_free:
            self.reserved_tokens = self.prompt_tokens + self.limit_tokens
        times = {name: self.fields.get(name) for name in ("deadline_ms", "ttft_slo_ms")}
        self._times_ms: dict[str, float] = {
            name: one for name, one in times.items() if one is not None and _is_time(one)
        }
        self.came_s = self.sent_s = 0.0
        self.is_prefilled = False
        self.summarizing: RoutedRequest | None = None
        self.used_prompt_tokens = self.used_output_tokens = -1
        self.replaced_tokens = 0
        self.block_hashes: Sequence[int] = ()
        self.block_size = 0
        self.first_token_s = 0.0

    @property
    def target(self) -> bytes:
        """The path and the query as replicas are asked for them."""
        path = quote(self.path, safe=_PATH_CHARS).encode()
        return path + b"?" + self._query if self._query else path

    def use_model(self, model: str) -> None:
        """Ask replicas for another model than the client named."""
        if model != self.model:
            self.model = model
            self.block_hashes = ()  # of another tokenizer
            self.transfer = None  # of another model's cache
            if self._found.model is not None:
                self.path = self._found.path_of(model)
                return
            for name in self.route.model_fields[1:]:
                self.fields.pop(name, None)
            self.change(self.route.model_fields[0], model)

    def change(self, name: str, value: object) -> None:
        """Set a field of what replicas are asked; None: leave it out."""
        self.fields.pop(name, None)
        if value is not None:
            self.fields[name] = value
        if self.why_not:
            self.raw = _encode(self.fields)

    def use_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Ask replicas with other messages than those of the client."""
        self.change("messages", messages)
        self.block_hashes = ()
        self.transfer = None
        self.prompt_tokens = len(_encode(self.fields)) // BYTES_PER_TOKEN

    @property
    def brings_blocks(self) -> bool:
        """Whether the next replica is given the blocks of the prompt; one that continues a stream
        computes them."""
        return self.transfer is not None and not self.journal.has_begun

    @property
    def deadline_s(self) -> float | None:
        """When its whole answer is wanted; None for no time."""
        wanted_ms = self._times_ms.get("deadline_ms")
        return None if wanted_ms is None else self.came_s + wanted_ms / 1000

    def note_sent(self, now_s: float) -> None:
        """Note that a replica has got it."""
        self.sent_s = self.sent_s or now_s

    def note_refused(self, began_s: float) -> None:
        """Note that a replica has refused it, which has computed nothing of it. began_s: when that
        was asked; what another one had before counts."""
        if self.sent_s >= began_s:
            self.sent_s = 0.0

    def begin_anew(self) -> None:
        """Note that another model is asked: what replicas had of it was refused, or is counted as
        replaced."""
        self.sent_s = 0.0
        self.is_prefilled = False

    def waited(self, now_s: float) -> None:
        """Take what has passed since it came from the times that replicas are given."""
        waited_ms = int((now_s - self.came_s) * 1000)
        if waited_ms >= _MIN_WAITED_MS:
            for name, wanted_ms in self._times_ms.items():
                self.change(name, max(wanted_ms - waited_ms, 1))

    def took(self, now_s: float, rate: OutputRate, *, is_left: bool) -> None:
        """Note that it has ended. is_left: its client left before it had anything of the answer; of
        a whole one, what was computed until then is estimated by `rate`."""
        past_s = now_s - self.sent_s
        if not is_left:
            output = max(self.used_output_tokens, self.num_delivered)
            rate.note(self.model, output / self.num_answers, past_s)
        elif self.sent_s and not self.is_stream:
            computed = rate.max_tokens(self.model, past_s) * self.num_answers
            self.used_output_tokens = math.ceil(min(computed, self.limit_tokens))

    def left_tokens(self, now_s: float, rate: OutputRate) -> int:
        """Return the tokens of the summary that was computed when the client left."""
        inner = self.summarizing
        if inner is None or not inner.sent_s:
            return 0
        inner.took(now_s, rate, is_left=True)
        return inner.used_tokens()

    def used_tokens(self) -> int:
        """Return the tokens that the answer took, estimated where they are not known."""
        prompt = self.used_prompt_tokens
        output = max(self.used_output_tokens, self.num_delivered)
        return (self.prompt_tokens if prompt < 0 else prompt) + output + self.replaced_tokens

    @property
    def expected_tokens(self) -> int:
        """Tokens of the prompt and of the expected output."""
        return self.prompt_tokens + self.output_tokens

    def key(self) -> RouteKey:
        """Return what policies read."""
        prompt = b"".join(
            _encode(self.fields[name]) for name in self.form.prompts if name in self.fields
        )
        salt = self.fields.get("cache_salt")
        scope = f"{self.model}\0{salt if isinstance(salt, str) else ''}"
        return RouteKey(
            blocks=block_names(scope, prompt),
            session=self.session,
            tokens=self.expected_tokens,
            prompt_tokens=self.prompt_tokens,
            hashes=self.block_hashes,
            block_size=self.block_size,
        )

    def body(self) -> bytes:
        """Return the body for the next replica: the client's, or one that continues the stream."""
        transfer = {} if self.transfer is None else {"kv_transfer_params": self.transfer}
        if self.why_not:
            return _encode({**self.fields, **transfer}) if transfer else self.raw
        fields = with_value({**self.fields, **transfer}, self.form.output_ids, True)
        if self.journal.has_begun:
            fields.pop("return_progress", None)  # the prompt's was reported
            fields |= self.journal.fields()
            fields.pop("kv_transfer_params", None)  # another replica continues without them
            fields.pop("ttft_slo_ms", None)  # its first token is delivered
        return _encode(fields)

    def delivered(self, cursor: CursorComment) -> None:
        """Note that the client has all events up to `cursor`."""
        self.journal.delivered(cursor)
        self.num_delivered = self.journal.num_delivered
        if cursor.prompt_tokens is not None:
            self.used_prompt_tokens = cursor.prompt_tokens
        if cursor.seed is not None:  # the client may have asked for any seed by a number
            self.fields = with_value(self.fields, self.form.seed, cursor.seed)

    @property
    def user_text(self) -> str:
        """Return what the user wrote last; "" where the request has no text."""
        return self.form.user_text(self.fields)

    @property
    def session(self) -> str:
        """Return the client's key for affinity; "" without one."""
        key = self.fields.get("prompt_cache_key")
        if isinstance(key, str) and key:
            return key
        return header_in(self.headers, b"x-session-id").decode("latin-1")


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(raw)
        _encode(found)  # numbers that cannot be written again are passed on as they are
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _decline_resumable(form: ApiForm, fields: dict[str, Any]) -> bool:
    """Leave out stream_options.resumable, and return whether it was there: a client has no route to
    the replica that would keep the events. The router continues the stream instead."""
    options = fields.get(_OPTIONS)
    if form.output_ids[:1] != (_OPTIONS,) or not isinstance(options, dict):
        return False
    if options.get("resumable") is not True:
        return False
    fields[_OPTIONS] = {name: one for name, one in options.items() if name != "resumable"}
    return True


def _prompt_tokens(fields: Mapping[str, Any], raw: bytes) -> int:
    """Return the tokens of the prompt: exact where they are ids, else estimated."""
    for name in ("tokens", "prompt"):
        given = fields.get(name)
        if isinstance(given, list) and given and type(given[0]) is int:
            return len(given)
    return len(raw) // BYTES_PER_TOKEN


def _is_time(given: Any) -> bool:
    return type(given) in (int, float) and 0 < given < _MAX_MS


def _num_answers(form: ApiForm, fields: Mapping[str, Any]) -> int:
    given = [one for name in form.answers if type(one := fields.get(name)) is int]
    return min(max(*given, 1, 1), _MAX_ANSWERS)


def _num_prompts(given: Any) -> int:
    """Return how many prompts a `prompt` has: a list of texts and of lists has several, one with an
    id is one prompt."""
    is_list = isinstance(given, list) and all(isinstance(one, str | list) for one in given)
    return max(len(given), 1) if is_list else 1


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _why_not_continuable(path: str, route: Route, form: ApiForm, fields: Mapping[str, Any]) -> str:
    """Return why the stream of a request cannot be continued; "" if it can."""
    if not (route.generates and form.output_ids):
        return f"{path} takes no output_ids"
    if form.api == LLAMA_CPP and (why := _why_not_one_answer(form, fields)):
        return why
    *outer, _ = form.seed
    sampling = value_at(fields, tuple(outer)) or {}
    if not isinstance(sampling, dict):
        return f"its {outer[0]} are no object"
    for name in _NOT_CONTINUABLE:
        if fields.get(name) or sampling.get(name):
            return f"it has {name}"
    if fields.get("prompt_logprobs") is not None:
        return "it has prompt_logprobs"
    if form.api == RESPONSES and LOGPROBS_OF_RESPONSES in _listed(fields.get("include")):
        return f"its include has {LOGPROBS_OF_RESPONSES}, which the last events repeat"
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return "its stream_options are no object"
    if options and options.get("resumable"):
        return "it has stream_options.resumable"
    if not is_known_ids(fields.get("output_ids")):
        return "its output_ids are not token ids"
    return ""


def _why_not_one_answer(form: ApiForm, fields: Mapping[str, Any]) -> str:
    """Return why a request of llama.cpp's form has several answers, which have no comments of where
    they stand; "" for one answer."""
    prompt = fields.get("prompt")
    if (num_prompts := _num_prompts(prompt)) > 1:
        return f"it has {num_prompts} prompts"
    name = next((one for one in form.answers if fields.get(one) not in (None, 1)), None)
    return "" if name is None else f"{name} is not 1"
