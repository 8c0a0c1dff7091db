"""JudgedForm: what the judge of a cascade reads of a whole answer, a record for each API.

Every API says why an answer ended, and reports log-probabilities where they are asked for. Knows no
cascade and no replica. Always holds: an answer of an unknown form has no parts and is passed on as
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.router.api_forms import objects_in
from quire.router.routes import RESPONSES

LOGPROBS_OF_RESPONSES = "message.output_text.logprobs"
Fields = Mapping[str, Any]


class JudgedAnswer(NamedTuple):
    """One choice of an answer. text: None where it has ids only. end: "length", "refusal" or ""."""

    text: str | None = None
    logprobs: Sequence[float] = ()
    end: str = ""
    calls_tools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedForm:
    """read: returns the choices of a decoded answer. ask: returns the field that asks for
    log-probabilities, with its value, or None where the client has asked for them. hide: takes them
    out of a decoded answer. wants_json: whether a request does."""

    read: Callable[[Any], list[JudgedAnswer]]
    ask: Callable[[Fields], tuple[str, Any] | None]
    hide: Callable[[Any], None]
    wants_json: Callable[[Fields], bool]


def choices_of(answer: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer of OpenAI's form; none of what is no answer."""
    return objects_in(_dict(answer).get("choices"))


def logprobs_of(found: Any) -> list[float]:
    """Return the log-probabilities of a choice: of chats, of completions or of token ids."""
    if isinstance(found, dict):
        found = found.get("content", found.get("token_logprobs"))
    if not isinstance(found, list):
        return []
    numbers = (one.get("logprob") if isinstance(one, dict) else one for one in found)
    return [one for one in numbers if isinstance(one, int | float)]


def openai_answer(choice: Mapping[str, Any]) -> JudgedAnswer:
    """Return a choice of OpenAI's form as the judge reads it."""
    message, finish = _dict(choice.get("message")), choice.get("finish_reason")
    is_refusal = bool(message.get("refusal")) or finish == "content_filter"
    return JudgedAnswer(
        text=message.get("content", choice.get("text")),
        logprobs=logprobs_of(choice.get("logprobs")),
        end="refusal" if is_refusal else "length" if finish == "length" else "",
        calls_tools=bool(message.get("tool_calls")),
    )


def _dict(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _read_openai(answer: Any) -> list[JudgedAnswer]:
    return [openai_answer(one) for one in choices_of(answer)]


def _hide_openai(answer: Any) -> None:
    for one in choices_of(answer):
        one["logprobs"] = None


def _hide_ids(answer: Any) -> None:
    for one in choices_of(answer):
        one.pop("logprobs", None)
        one.pop("top_logprobs", None)


def _openai_json(fields: Fields) -> bool:
    if _dict(fields.get("response_format")).get("type") in ("json_object", "json_schema"):
        return True
    asked = _dict(fields.get("structured_outputs"))
    return "json" in asked or "json_object" in asked


def _read_ollama(answer: Any) -> list[JudgedAnswer]:
    if not isinstance(answer, dict) or answer.get("done") is not True:
        return []
    message = _dict(answer.get("message"))
    return [
        JudgedAnswer(
            text=message.get("content", answer.get("response")),
            logprobs=logprobs_of(answer.get("logprobs")),
            end="length" if answer.get("done_reason") == "length" else "",
            calls_tools=bool(message.get("tool_calls")),
        )
    ]


def _hide_list(answer: Any) -> None:
    answer.pop("logprobs", None)


def _read_llama_cpp(answer: Any) -> list[JudgedAnswer]:
    return [
        JudgedAnswer(
            text=one.get("content"),
            logprobs=logprobs_of(one.get("completion_probabilities")),
            end="length" if one.get("stop_type") == "limit" else "",
        )
        for one in objects_in(answer if isinstance(answer, list) else [answer])
        if "content" in one
    ]


def _hide_llama_cpp(answer: Any) -> None:
    for one in objects_in(answer if isinstance(answer, list) else [answer]):
        one.pop("completion_probabilities", None)


def _read_messages(answer: Any) -> list[JudgedAnswer]:
    if _dict(answer).get("type") != "message":
        return []
    blocks, reason = objects_in(answer.get("content")), answer.get("stop_reason")
    return [
        JudgedAnswer(
            text="".join(str(one.get("text", "")) for one in blocks if one.get("type") == "text"),
            logprobs=logprobs_of(answer.get("logprobs")),
            end={"max_tokens": "length", "refusal": "refusal"}.get(reason, ""),
            calls_tools=any(one.get("type") == "tool_use" for one in blocks),
        )
    ]


def _parts_of(answer: Any) -> Iterator[dict[str, Any]]:
    for item in objects_in(_dict(answer).get("output")):
        if item.get("type") == "message":
            yield from objects_in(item.get("content"))


def _read_responses(answer: Any) -> list[JudgedAnswer]:
    if _dict(answer).get("status") not in ("completed", "incomplete"):
        return []  # one that is computed in the background
    parts = list(_parts_of(answer))
    why = _dict(answer.get("incomplete_details")).get("reason")
    refuses = why == "content_filter" or any(one.get("type") == "refusal" for one in parts)
    return [
        JudgedAnswer(
            text="".join(str(one.get("text", "")) for one in parts),
            logprobs=[one for part in parts for one in logprobs_of(part.get("logprobs"))],
            end="refusal" if refuses else "length" if why == "max_output_tokens" else "",
            calls_tools=any(
                one.get("type") == "function_call" for one in objects_in(answer.get("output"))
            ),
        )
    ]


def _hide_responses(answer: Any) -> None:
    for part in _parts_of(answer):
        if "logprobs" in part:
            part["logprobs"] = []


def _ask_responses(fields: Fields) -> tuple[str, Any] | None:
    given = fields.get("include")
    included = given if isinstance(given, list) else []
    if LOGPROBS_OF_RESPONSES in included:
        return None
    return "include", [*included, LOGPROBS_OF_RESPONSES]


def _ask(value: Any, *names: str) -> Callable[[Fields], tuple[str, Any] | None]:
    """Return the `ask` of an API with a field of its own; further names mean the same."""

    def ask(fields: Fields) -> tuple[str, Any] | None:
        is_asked = any(fields.get(name) not in (None, False) for name in names)
        return None if is_asked else (names[0], value)

    return ask


def _ask_llama_cpp(fields: Fields) -> tuple[str, Any] | None:
    return None if fields.get("n_probs") or fields.get("logprobs") else ("n_probs", 1)


_OLLAMA = JudgedForm(
    read=_read_ollama,
    ask=_ask(True, "logprobs"),
    hide=_hide_list,
    wants_json=lambda fields: bool(fields.get("format")),
)
_LLAMA_CPP = JudgedForm(
    read=_read_llama_cpp,
    ask=_ask_llama_cpp,
    hide=_hide_llama_cpp,
    wants_json=lambda fields: bool(fields.get("json_schema")),
)
JUDGED_FORMS: dict[str, JudgedForm] = {
    "/v1/chat/completions": JudgedForm(
        read=_read_openai, ask=_ask(True, "logprobs"), hide=_hide_openai, wants_json=_openai_json
    ),
    "/v1/completions": JudgedForm(
        read=_read_openai, ask=_ask(0, "logprobs"), hide=_hide_openai, wants_json=_openai_json
    ),
    # Answers of token ids: whether they are JSON is not seen.
    "/generate": JudgedForm(
        read=_read_openai, ask=_ask(0, "logprobs"), hide=_hide_ids, wants_json=lambda fields: False
    ),
    "/api/chat": _OLLAMA,
    "/api/generate": _OLLAMA,
    "/completion": _LLAMA_CPP,
    "/infill": _LLAMA_CPP,
    "/v1/messages": JudgedForm(
        read=_read_messages,
        ask=_ask(True, "logprobs"),
        hide=_hide_list,
        wants_json=lambda fields: bool(_dict(fields.get("output_config")).get("format")),
    ),
    RESPONSES: JudgedForm(
        read=_read_responses,
        ask=_ask_responses,
        hide=_hide_responses,
        wants_json=lambda fields: str(
            _dict(_dict(fields.get("text")).get("format")).get("type", "")
        ).startswith("json"),
    ),
}
