"""Read the fields of the Messages API as those of the neutral code.

`read_prompt` renders system, messages, tools and thinking; both routes use it, so that a count is
that of the message's prompt. `as_named_here` puts the names of this API into errors of the neutral
code. Always holds: a field is honoured, without effect by its nature, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.anthropic.cache_breakpoints import Breakpoint, breakpoints_of
from quire.api.anthropic.fields import OWN_NAMES
from quire.api.anthropic.history import History, history_of
from quire.api.anthropic.tool_fields import tool_offer
from quire.api.generation.begun_answer import rendered_or_refused
from quire.api.generation.chat_output import Conversation
from quire.api.generation.conversation import EFFORTS, ConversationFields
from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext
from quire.api.generation.thinking_budget import AskedBudget
from quire.api.generation.tools import ToolOffer
from quire.base.errors import InvalidParameter
from quire.base.show import show

TIERS = ("auto", "standard_only", "default")
THINKING_TYPES = ("enabled", "adaptive", "disabled")
THINKING_DISPLAYS = ("summarized", "omitted")
_BUDGET = "thinking.budget_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePrompt:
    """The rendered conversation, the tools that it offers, and where its cached prefixes end."""

    conversation: Conversation
    offer: ToolOffer | None
    fields: ConversationFields
    breakpoints: Sequence[Breakpoint]


async def read_prompt(context: RequestContext) -> MessagePrompt:
    """Check the fields that make the prompt, and render it. Raises RequestError."""
    given = context.given
    history, offer, breakpoints = await context.run_if_large(_converted, given)
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise InvalidParameter(
            f"chat_template_kwargs is {show(variables)}; an object is allowed",
            param="chat_template_kwargs",
        )
    fields = ConversationFields(
        messages=history.messages,
        effort=_effort(given),
        effort_name="output_config.effort" if "thinking" not in given else "thinking",
        continue_final_message=history.continues,
        tools=None if offer is None else offer.shown,
        variables=variables,
    )
    return MessagePrompt(
        conversation=await rendered_or_refused(context, fields),
        offer=offer,
        fields=fields,
        breakpoints=breakpoints,
    )


def _converted(
    given: Mapping[str, Any],
) -> tuple[History, ToolOffer | None, list[Breakpoint]]:
    """Return the messages, the tools and the breakpoints. Raises InvalidParameter."""
    history = history_of(given.get("system"), given.get("messages"))
    return history, tool_offer(given), breakpoints_of(given)


def sampling_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling fields under our names. Raises InvalidParameter."""
    fields = {name: value for name, value in given.items() if name != "stop_sequences"}
    if "max_tokens" not in given:
        raise InvalidParameter(
            "max_tokens is missing; give the largest number of tokens of the answer",
            param="max_tokens",
        )
    if given["max_tokens"] == 0:  # the prompt is computed, so that it is cached
        fields["prompt_logprobs"] = 0
    temperature = given.get("temperature", 0)
    if isinstance(temperature, int | float) and temperature > 1:
        raise InvalidParameter(
            f"temperature is {show(temperature)}; 0 to 1 is allowed", param="temperature"
        )
    if "stop_sequences" in given:
        if not isinstance(given["stop_sequences"], list):
            raise InvalidParameter(
                f"stop_sequences is {show(given['stop_sequences'])}; a list of texts is allowed",
                param="stop_sequences",
            )
        fields["stop"] = given["stop_sequences"]
    requested = _output_config(given).get("format")
    if requested is not None:
        fields["response_format"] = _response_format(requested)
    return fields


def wants_logprobs(given: Mapping[str, Any]) -> bool:
    """Return whether log-probabilities are wanted. Raises InvalidParameter."""
    wanted = flag(given, "logprobs")
    if wanted and given.get("stream"):
        raise InvalidParameter(
            "logprobs is true and stream is true; the events of a message have no place for "
            "log-probabilities: leave one of both out, or use /v1/chat/completions",
            param="logprobs",
        )
    return wanted


def budget_of(given: Mapping[str, Any]) -> AskedBudget | None:
    """Return the budget of `thinking`, which read_prompt has checked. Raises InvalidParameter."""
    tokens = given.get("thinking", {}).get("budget_tokens")
    if tokens is None:
        return None
    if type(tokens) is not int or tokens < 1:
        raise InvalidParameter(
            f"thinking.budget_tokens is {show(tokens)}; a number of tokens, at least 1, is allowed",
            param=_BUDGET,
        )
    if tokens >= given["max_tokens"]:
        raise InvalidParameter(
            f"thinking.budget_tokens is {show(tokens)} and max_tokens is {given['max_tokens']}, "
            "which limits reasoning and answer together; raise max_tokens, or lower it",
            param=_BUDGET,
        )
    return AskedBudget(tokens, _BUDGET)


def hides_thinking(given: Mapping[str, Any]) -> bool:
    """Return whether blocks of thinking are returned without their text. As of budget_of."""
    return bool(given.get("thinking", {}).get("display") == "omitted")


def check_metadata(given: Mapping[str, Any]) -> None:
    """Check metadata and service_tier, which have no effect."""
    tier = given.get("service_tier", TIERS[0])
    if not isinstance(tier, str) or tier not in TIERS:
        raise InvalidParameter(
            f"service_tier is {show(tier)}; {', '.join(TIERS)} are allowed: there is one tier",
            param="service_tier",
        )
    metadata = given.get("metadata", {})
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if (
        not isinstance(metadata, dict)
        or metadata.keys() - {"user_id"}
        or not isinstance(user, str | None)
    ):
        raise InvalidParameter(
            f"metadata is {show(metadata)}; an object with a user_id, a text, is allowed",
            param="metadata",
        )


def as_named_here(error: InvalidParameter, given: Mapping[str, Any]) -> InvalidParameter:
    """Return an error with the names that the fields have in this API."""
    if error.param == "response_format":
        said = str(error).replace("response_format.json_schema", "output_config.format")
        said = said.replace("response_format", "output_config.format")
        return InvalidParameter(said, param="output_config")
    name = OWN_NAMES.get(error.param or "")
    if error.param is None or name is None:
        return error
    return InvalidParameter(str(error).replace(error.param, name), param=name)


def _effort(given: Mapping[str, Any]) -> str | None:
    """Return the degree of reasoning; None leaves it to the template."""
    effort = _output_config(given).get("effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidParameter(
            f"output_config.effort is {show(effort)}; {', '.join(EFFORTS)} are allowed",
            param="output_config",
        )
    thinking = given.get("thinking")
    if thinking is None:
        return effort
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    known = kind in THINKING_TYPES and _set_keys(thinking) <= {"type", "budget_tokens", "display"}
    if not known or thinking.get("display") not in (None, *THINKING_DISPLAYS):
        raise InvalidParameter(
            f"thinking is {show(thinking)}; an object with the type {', '.join(THINKING_TYPES)} is "
            f"allowed, and a display of {' or '.join(THINKING_DISPLAYS)} (a model thinks before "
            "its answer, not between calls of tools)",
            param="thinking",
        )
    if kind == "disabled" and thinking.get("budget_tokens") is not None:
        raise InvalidParameter(
            f"thinking.budget_tokens is {show(thinking['budget_tokens'])} and thinking is "
            "disabled; leave it out",
            param="thinking",
        )
    return "none" if kind == "disabled" else effort or "medium"


def _output_config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    config = given.get("output_config", {})
    if not isinstance(config, dict) or _set_keys(config) - {"effort", "format"}:
        raise InvalidParameter(
            f"output_config is {show(config)}; an object with effort and format is allowed",
            param="output_config",
        )
    return config


def _set_keys(value: Mapping[str, Any]) -> set[str]:
    """Return the keys of an object that are not null."""
    return {key for key, inner in value.items() if inner is not None}


def _response_format(requested: Any) -> dict[str, Any]:
    """Return the format in OpenAI's form."""
    kind = requested.get("type") if isinstance(requested, dict) else None
    if kind != "json_schema" or _set_keys(requested) != {"type", "schema"}:
        raise InvalidParameter(
            f"output_config.format is {show(requested)}; "
            '{"type": "json_schema", "schema": {...}} is allowed',
            param="output_config",
        )
    return {"type": "json_schema", "json_schema": {"schema": requested["schema"]}}
