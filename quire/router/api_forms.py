"""ApiForm: what the router reads and writes of one HTTP API, a record for each.

The router passes bodies on as they are; what it reads of them, and what it writes itself, differs
by these records only. base/http_apis.py says which API a path has. Knows no request and no
replica. Always holds: each API of that table has a record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from quire.base.http_apis import (
    ANTHROPIC,
    ERROR_CODE_HEADER,
    LLAMA_CPP,
    MODEL_TAG,
    MODELS,
    OLLAMA,
    OPENAI,
    RESPONSES,
    any_key_headers,
    api_of,
    header_in,
    key_in,
)
from quire.router.faults import Refusal

# The code of a request with which a replica has lost two engines.
POISON = "poison_request"
# The code of a request with prompt and output that do not fit the context of the model.
TOO_LONG = "context_length_exceeded"
_TAIL_BYTES = 16_384
# The names of a field and of those around it, from the outermost.
Path = tuple[str, ...]
Headers = Sequence[tuple[bytes, bytes]]


class ErrorBody(msgspec.Struct, frozen=True):
    """The `error` of a response, in the form of any API; of Ollama's it is a message. code and kind
    are those of events: a response has its code in a header."""

    message: str = ""
    code: str | int | None = None
    kind: str | None = msgspec.field(name="type", default=None)


class ErrorEvent(msgspec.Struct, frozen=True):
    """A body with an error."""

    error: ErrorBody | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiForm:
    """What the router reads and writes of one API.

    error: the JSON of an error. event: the bytes of an error that ends a stream. overloaded: the
    status of a server without capacity, which is 503 elsewhere. prompts: fields that decide the
    prompt, in its order. texts: fields that have what the user wrote last, the first that has any
    counts. limits: fields with the number of tokens that an answer may have, each as
    a path; the first that has one counts. answers: fields with the number of answers. model_suffix:
    that a client may add to the name of a model; "" for none. usage: the names of the counts of
    prompt and output, in the last bytes of an answer. event_end: the bytes that end each event of a
    stream. has_heartbeats: something comes in streams while they have no event. seed: the path of
    its field. output_ids: the path of the field that asks for what a stream needs to be continued;
    () where its streams cannot be.
    """

    api: str
    error: Callable[[Refusal, int], Any]
    event: Callable[[Refusal, bytes], bytes] = lambda refusal, raw: b"data: %b\n\n" % raw
    overloaded: int = 503
    prompts: tuple[str, ...]
    texts: tuple[str, ...] = ("messages", "prompt", "input")
    limits: tuple[Path, ...]
    answers: tuple[str, ...] = ()
    model_suffix: str = ""
    usage: tuple[str, str]
    event_end: bytes = b"\n\n"
    has_heartbeats: bool = True
    seed: Path = ("seed",)
    output_ids: Path = ()

    def status_of(self, refusal: Refusal) -> int:
        """Return the status of a refusal."""
        return self.overloaded if refusal.status == 503 else refusal.status

    def is_overloaded(self, status: int) -> bool:
        """Return whether a replica with this status is full."""
        return status in (503, self.overloaded)

    def error_body(self, refusal: Refusal) -> bytes:
        """Return the body of an error response."""
        return msgspec.json.encode(self.error(refusal, self.status_of(refusal)))

    def error_event(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that cannot go on."""
        return self.event(refusal, self.error_body(refusal))

    def key_in(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return the key of a request: that of its API first, then of any; b"" without one."""
        return key_in(headers, any_key_headers(self.api))

    def asked_tokens(self, fields: Mapping[str, Any], default: int) -> int:
        """Return how many tokens the answer may have; `default` where it is not limited."""
        for path in self.limits:
            found = value_at(fields, path)
            if type(found) is int and found >= 0:
                return found
        return default

    def user_text(self, fields: Mapping[str, Any]) -> str:
        """Return what the user wrote last: the newest user message with text, or the prompt; ""
        where there is no text, as for token ids."""
        return next((text for name in self.texts if (text := _text_in(fields.get(name)))), "")

    def used_tokens(self, body: bytes) -> tuple[int, int] | None:
        """Return the tokens of prompt and output; None where the body reports none.

        In JSON a quote inside a text is escaped, so a text that quotes such a name is not mistaken
        for it.
        """
        prompt, output = (_count(name) for name in self.usage)
        if body.startswith(b"["):  # answers with counts of their own
            found = [list(map(int, one.findall(body))) for one in (prompt, output)]
            return (sum(found[0]), sum(found[1])) if any(found) else None
        tail = body[-_TAIL_BYTES:]
        prompts, outputs = prompt.findall(tail), output.findall(tail)
        if not prompts and not outputs and len(body) > _TAIL_BYTES:
            prompts, outputs = prompt.findall(body), output.findall(body)
        if not prompts and not outputs:
            return None
        return int(prompts[-1]) if prompts else -1, int(outputs[-1]) if outputs else 0


def value_at(fields: Mapping[str, Any], path: Path) -> Any:
    """Return the value of a field; None without it."""
    found: Any = fields
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def objects_in(found: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; none of what is no list."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def with_value(fields: Mapping[str, Any], path: Path, value: object) -> dict[str, Any]:
    """Return a copy of fields in which one has this value."""
    name, *rest = path
    if rest:
        inner = fields.get(name)
        value = with_value(inner if isinstance(inner, dict) else {}, tuple(rest), value)
    return {**fields, name: value}


def _text_in(given: Any) -> str:
    """Return the text of a prompt, or of the newest user message with any."""
    if isinstance(given, list) and any(isinstance(one, dict) and "role" in one for one in given):
        of_user = (one.get("content") for one in reversed(given) if _is_of_user(one))
        return next((text for content in of_user if (text := _text_of(content))), "")
    return _text_of(given)


def _text_of(given: Any) -> str:
    """Return a text, or those of the parts of a content."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        return ""
    parts = [one.get("text") if isinstance(one, dict) else one for one in given]
    return "\n".join(one for one in parts if isinstance(one, str))


def _is_of_user(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "user"


def error_code(headers: Headers) -> str:
    """Return the code of a replica's error, which has it in a header whatever the API; "" without
    one."""
    return header_in(headers, ERROR_CODE_HEADER).decode("latin-1")


def error_message(raw: bytes) -> str:
    """Return the message of an error, from the body of its response; "" where it has none."""
    try:
        found = _read_error(raw).error
    except msgspec.MsgspecError:
        return ""
    return found if isinstance(found, str) else found.message


def first_code(events: bytes) -> str:
    """Return the code of the error that the first event of a stream has; "" for none."""
    _, found, rest = events.partition(b"data: {")
    event, error = b"{" + rest.partition(b"\n")[0], None
    if found:
        with suppress(msgspec.MsgspecError):
            inner = _read_error(event).error
            error = inner if isinstance(inner, ErrorBody) else None
    if found and error is None:
        with suppress(msgspec.MsgspecError):  # that of Responses has the fields of an error itself
            of_event = _read_event_error(event)
            error = of_event if of_event.kind == "error" else None
    return error.code if error is not None and isinstance(error.code, str) else ""


def is_final(status: int, headers: Headers) -> bool:
    """Return whether a replica says that the request would fail again, here and elsewhere. It may
    have failed there as often as it may: `poison_request` is the error of two engines."""
    return status >= 500 and (b"x-should-retry", b"false") in headers


def may_end_engines(code: str) -> bool:
    """Return whether a final error may be `poison_request`: that, or one without a code."""
    return code in (POISON, "")


def form_of(path: str) -> ApiForm:
    """Return the form of the API that has a path."""
    return FORMS[api_of(path)]


def _openai(refusal: Refusal, status: int) -> Any:
    error = {
        "message": str(refusal),
        "type": _kind_of(status),
        "param": refusal.param,
        "code": refusal.code,
    }
    return {"error": error}


def _responses_event(refusal: Refusal, raw: bytes) -> bytes:
    error = {"code": refusal.code, "message": str(refusal), "param": refusal.param}
    return _named_event(refusal, msgspec.json.encode({"type": "error", **error}))


def _anthropic(refusal: Refusal, status: int) -> Any:
    kinds = {404: "not_found_error", 413: "request_too_large", 529: "overloaded_error"}
    kind = kinds.get(status) or ("api_error" if status >= 500 else _kind_of(status))
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def _named_event(refusal: Refusal, raw: bytes) -> bytes:
    return b"event: error\ndata: %b\n\n" % raw


def _llama_cpp(refusal: Refusal, status: int) -> Any:
    kinds = {404: "not_found_error", 429: "unavailable_error", 503: "unavailable_error"}
    kind = kinds.get(status) or _kind_of(status)
    return {"error": {"code": status, "message": str(refusal), "type": kind}}


def _kind_of(status: int) -> str:
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


@cache
def _count(name: str) -> re.Pattern[bytes]:
    return re.compile(rb'"%b": ?(\d{1,12})\b' % name.encode())


_read_error = msgspec.json.Decoder(ErrorEvent).decode
_read_event_error = msgspec.json.Decoder(ErrorBody).decode
_INCLUDES_IDS = "include_output_ids"
_OPENAI = ApiForm(
    api=OPENAI,
    error=_openai,
    prompts=("tools", "messages", "input", "prompt", "tokens"),
    limits=(
        *(("max_completion_tokens",), ("max_tokens",)),
        *(("n_predict",), ("num_predict",), ("max_new_tokens",)),
    ),
    answers=("n", "num_return_sequences", "n_cmpl", "best_of"),
    usage=("prompt_tokens", "completion_tokens"),
    output_ids=("stream_options", _INCLUDES_IDS),
)
FORMS: dict[str, ApiForm] = {
    OPENAI: _OPENAI,
    MODELS: replace(_OPENAI, api=MODELS),
    RESPONSES: replace(
        _OPENAI,
        api=RESPONSES,
        event=_responses_event,
        prompts=("instructions", "tools", "input"),
        texts=("input",),
        limits=(("max_output_tokens",),),
        answers=(),
        usage=("input_tokens", "output_tokens"),
        output_ids=(_INCLUDES_IDS,),
    ),
    ANTHROPIC: ApiForm(
        api=ANTHROPIC,
        error=_anthropic,
        event=_named_event,
        overloaded=529,
        prompts=("system", "tools", "messages"),
        limits=(("max_tokens",),),
        usage=("input_tokens", "output_tokens"),
        output_ids=(_INCLUDES_IDS,),
    ),
    OLLAMA: ApiForm(
        api=OLLAMA,
        error=lambda refusal, status: {"error": str(refusal)},
        event=lambda refusal, raw: raw + b"\n",
        prompts=("system", "tools", "messages", "context", "input", "prompt", "suffix"),
        limits=(("options", "num_predict"),),
        model_suffix=MODEL_TAG,
        usage=("prompt_eval_count", "eval_count"),
        event_end=b"\n",
        has_heartbeats=False,  # each of its lines is an object that clients read
        seed=("options", "seed"),
        output_ids=(_INCLUDES_IDS,),
    ),
    LLAMA_CPP: ApiForm(
        api=LLAMA_CPP,
        error=_llama_cpp,
        prompts=("input_extra", "input_prefix", "input_suffix", "input", "content", "prompt"),
        texts=("prompt", "input_prefix", "input", "content"),
        limits=(("n_predict",), ("max_tokens",)),
        answers=("n", "n_cmpl"),
        usage=("tokens_evaluated", "tokens_predicted"),
        output_ids=(_INCLUDES_IDS,),
    ),
}
