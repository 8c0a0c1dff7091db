"""The request fields of the Responses API, and the fields of ours that it can carry.

Fields that add to an answer of chats (choices, token ids, timings, log-probabilities of prompts)
are left out: a response has no place for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.generation.continued_answer import CONTINUED_STREAMS
from quire.api.generation.field_set import FieldSet
from quire.api.generation.fields import SAMPLING, SCHEDULING

# What a response has no place for, or has under another name.
_NOT_CARRIED = frozenset(
    {
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
        "logprob_token_ids",
        "max_tokens",
        "return_cached_tokens_details",
    }
)
_RESPONSES = ((SAMPLING | SCHEDULING) - _NOT_CARRIED) | {
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "reasoning",
    "include",
    "truncation",
    "metadata",
    "previous_response_id",
    "conversation",
    "store",
    "background",
    "max_output_tokens",
    "top_logprobs",
    "stream",
    "stream_options",
    *CONTINUED_STREAMS,
    "chat_template_kwargs",
    "add_special_tokens",
    "include_reasoning",
    "thinking_token_budget",
    "cache_salt",
    "speculation",
    "prediction",
    "kv_transfer_params",
}
# What a response has in place of fields of other APIs.
_INSTEAD = {
    **dict.fromkeys(("system", "system_prompt"), "instructions"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": 'include: ["message.output_text.logprobs"]',
}
_INPUT = 'write it as input, such as "input": [{"role": "user", "content": "..."}]'
# Other names of fields that change the answer only.
_OF_ANSWERS = frozenset({"max_tokens", "max_completion_tokens", "logprobs"})


def _advice(name: str, body: Mapping[str, Any]) -> str | None:
    if name == "prompt" and isinstance(body.get(name), dict):
        return ": no prompts are stored here; write its text as instructions and input"
    return f"; write it as {_INSTEAD[name]}" if name in _INSTEAD else None


def _advice_of_counts(name: str, body: Mapping[str, Any]) -> str | None:
    if name in _RESPONSES or name in _OF_ANSWERS:
        return (
            ", which counts the tokens of a prompt; it belongs to POST /v1/responses and changes "
            "no prompt: leave it out"
        )
    return _advice(name, body)


RESPONSES = FieldSet(_RESPONSES, input_names="input", input_advice=_INPUT, advice=_advice)
# Fields that change the prompt, or are given beside those; of the count of its tokens.
INPUT_TOKENS = FieldSet(
    {
        "model",
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "text",
        "reasoning",
        "truncation",
        "previous_response_id",
        "conversation",
        "chat_template_kwargs",
        "add_special_tokens",
    },
    input_names="input",
    input_advice=_INPUT,
    advice=_advice_of_counts,
)
# Our names of fields that have another one here.
OWN_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# Those after the first two are parts of items that no response here has.
INCLUDABLE = (
    *(LOGPROBS, ENCRYPTED, "message.input_image.image_url"),
    *("computer_call_output.output.image_url", "file_search_call.results"),
    *("code_interpreter_call.outputs", "web_search_call.results", "web_search_call.action.sources"),
)
TRUNCATIONS = ("disabled", "auto")
