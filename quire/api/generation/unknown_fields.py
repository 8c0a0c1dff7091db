"""Say what to write in place of a field that a route does not take, or which route takes it.

Entered only by requests that are refused. Knows the fields of OpenAI's API; what a route of another
says is in its FieldSet. Always holds: a message names no field that the route refuses and no route
that is not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from quire.api.generation.field_set import FieldSet
from quire.api.generation.fields import CHAT, COMPLETIONS, GENERATE
from quire.api.generation.foreign_fields import SYNONYMS
from quire.base.errors import InvalidParameter
from quire.base.show import show

# Names that mean nearly the same here. The value may need another form.
OTHER_NAMES: Mapping[str, str] = {
    "bad_words_ids": "bad_words",
    "beam_width": "use_beam_search",
    "deadline": "deadline_ms",
    "timeout": "deadline_ms",
    "ttft_slo": "ttft_slo_ms",
    "tpot_slo": "tpot_slo_ms",
    "max_output_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens",
    "max_length": "max_tokens",
}
# Fields of some routes, and what another route has in their place.
_COUNTERPARTS = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "response_format": "structured_outputs",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config",
}
# Names under which other APIs take the input.
_TEXTS = frozenset({"prompt", "input", "inputs", "text", "content", "query"})
_CONVERSATIONS = frozenset({"messages", "conversation", "history"})
_IDS = frozenset({"tokens", "ids", "token_ids", "input_ids", "prompt_token_ids"})
_INPUTS = _TEXTS | _CONVERSATIONS | _IDS
# Objects in which other APIs collect the parameters.
_WRAPPERS = frozenset(
    {"sampling_params", "parameters", "options", "generation_config", "generationConfig"}
    | {"extra_body", "params", "settings"}
)
_SYSTEM = frozenset({"system", "system_prompt", "instructions"})
# Names of the switch of reasoning.
_SWITCHES = frozenset({"think", "reasoning_mode", "thinking_mode"})
_MESSAGES = '"messages": [{"role": "user", "content": "..."}]'
# Where a field may belong, the most usual route first.
_ROUTES = (("POST /v1/chat/completions", CHAT), ("POST /v1/completions", COMPLETIONS))
_MIN_SIMILARITY = 0.75
_SUMMARIES = (
    ", but of a router (quire route) with [summaries] in its file; leave it out, or send the "
    "request to such a router"
)


def unknown_field(name: str, honoured: frozenset[str], body: Mapping[str, Any]) -> InvalidParameter:
    """Return the error for a field that a route with these fields does not take."""
    fields = honoured if isinstance(honoured, FieldSet) else FieldSet(honoured)
    if (advice := fields.advice(name, body)) is not None:
        return _error(name, f" of this request{advice}")
    if name in _INPUTS and (taken := fields.input_names):
        how = f"; {'leave it out, or ' if taken in body else ''}{fields.input_advice}"
        how *= bool(fields.input_advice)
        return _error(name, f" of this request, which takes {taken}{how}")
    if name in _INPUTS and not (honoured & _same_input(name)):
        own, where = _own_input(honoured), _elsewhere(name, honoured)
        also = "leave it out, or " if own in body else ""
        taken = f", which takes {own}" if own else ""
        return _error(name, f" of this request{taken}; {also}{where}")
    if name == "summarize_prompt":
        return _error(name, f" of a server{_SUMMARIES}")
    if (advice := _advice(name, honoured)) is not None:
        return _error(name, f" of this request; {advice}")
    near = _near(name, honoured)
    route = next((route for route, taken in _ROUTES if name in taken), "")
    where = f" of this request, but of {route}" if route else " of this request"
    hint = f"did you mean {show(near)}? " if near else ""
    return _error(
        name, f"{where}; {hint}leave it out, or start the server with --unknown-fields warn"
    )


def _error(name: str, said: str) -> InvalidParameter:
    return InvalidParameter(f"{show(name)} is not a field{said}", param=name[:64])


def _same_input(name: str) -> frozenset[str]:
    """Return the fields that take this kind of input."""
    if name in _CONVERSATIONS:
        return frozenset({"messages"})
    return frozenset({"prompt"}) if name in _TEXTS else frozenset({"tokens"})


def _own_input(honoured: frozenset[str]) -> str:
    """Return the field with the input; "" where a route names no other one in its FieldSet."""
    if "messages" in honoured and "prompt" not in honoured:
        return "messages"
    return next((name for name in ("prompt", "tokens") if name in honoured), "")


def _elsewhere(name: str, honoured: frozenset[str]) -> str:
    """Return where an input of this kind is sent."""
    if name in _CONVERSATIONS:
        return "send a conversation to POST /v1/chat/completions as messages"
    if name in _IDS:
        if honoured == COMPLETIONS:
            return "write the token ids as prompt"
        return "send token ids to POST /generate as tokens, or to POST /v1/completions as prompt"
    if _own_input(honoured) == "messages":
        return f"write it as {_MESSAGES}, or send it to POST /v1/completions as prompt"
    if honoured == GENERATE:
        return "send a text to POST /v1/completions as prompt"
    return "send a text to POST /tokenize as prompt"


def _advice(name: str, honoured: frozenset[str]) -> str | None:
    """Return what to write in place of a field of another API; None for other fields."""
    if name in _WRAPPERS and honoured >= GENERATE - {"tokens"}:
        return 'write its entries as fields of the request itself, such as "temperature": 0'
    if name in _SYSTEM and "system" in honoured:
        return "write it as system"
    if name in _SYSTEM and "messages" in honoured:
        return 'write it as the first message: {"role": "system", "content": "..."}'
    if name in _SYSTEM and "prompt" in honoured:
        return "write it at the beginning of the prompt"
    if name in _SWITCHES and "reasoning_effort" in honoured:
        return (
            'write it as reasoning_effort: "none" switches reasoning off, "low", "medium" and '
            '"high" on'
        )
    if name.startswith("speculative.") and "speculation" in honoured:
        return 'write it as speculation: "off", "auto" or {"max_draft_tokens": NUM}'
    if name == "format" and "response_format" in honoured:
        return 'write it as response_format, such as {"type": "json_object"}'
    return None


def _near(name: str, honoured: frozenset[str]) -> str:
    """Return the field that was probably meant; "" for none."""
    same = _same_input(name) if name in _INPUTS else frozenset()
    synonym = SYNONYMS.get(name, ("",))[0]
    for other in (*same, OTHER_NAMES.get(name), _COUNTERPARTS.get(name), synonym):
        if other in honoured:
            return str(other)
    plain = name[:64].lower().replace("-", "_")
    return next(iter(get_close_matches(plain, honoured, 1, _MIN_SIMILARITY)), "")
