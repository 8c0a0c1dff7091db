"""The request fields of the Responses API, and the fields of ours that it can carry.

Fields that add to an answer of chats (choices, token ids, timings, log-probabilities of prompts)
are left out: a response has no place for them.
"""

from __future__ import annotations

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
    "chat_template_kwargs",
    "add_special_tokens",
    "include_reasoning",
    "thinking_token_budget",
    "cache_salt",
    "speculation",
    "prediction",
}
# What a response has in place of fields of other APIs.
_INSTEAD = {
    **dict.fromkeys(("system", "system_prompt", "instructions"), "instructions"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "thinking": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": 'include: ["message.output_text.logprobs"]',
}
RESPONSES = FieldSet(
    _RESPONSES,
    takes="input",
    how='write it as input, such as "input": [{"role": "user", "content": "..."}]',
    advice=lambda name: f"; write it as {_INSTEAD[name]}" if name in _INSTEAD else None,
)
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
    takes="input",
    how=RESPONSES.how,
    advice=RESPONSES.advice,
)
# Our names of fields that have another one here.
OWN_NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, ENCRYPTED)
TRUNCATIONS = ("disabled", "auto")
