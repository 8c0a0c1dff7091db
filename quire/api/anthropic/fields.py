"""The request fields of the Messages API, and the fields of ours that it can carry.

Fields that add to an answer of OpenAI's form (choices, token ids, timings) are left out: a message
has no place for them. `logprobs` adds a list beside the content of a whole message, for programs
that judge how sure the model was, such as a router's cascade.
"""

from __future__ import annotations

from quire.api.generation.continued_answer import CONTINUED_STREAMS
from quire.api.generation.field_set import FieldSet
from quire.api.generation.fields import CHAT, SAMPLING, SCHEDULING

# Several choices, alternatives of tokens, and what has another name or form here.
_NOT_CARRIED = frozenset(
    {
        "n",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "prompt_logprobs",
        "logprob_token_ids",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_cached_tokens_details",
    }
)
# Fields that change the prompt, and the model's name.
_OF_PROMPTS = frozenset(
    {
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "cache_control",
        "chat_template_kwargs",
        "add_special_tokens",
    }
)
MESSAGES = (
    _OF_PROMPTS
    | (SAMPLING | SCHEDULING) - _NOT_CARRIED
    | {
        "stop_sequences",
        "stream",
        *CONTINUED_STREAMS,
        "logprobs",
        "metadata",
        "service_tier",
        "include_reasoning",
        "cache_salt",
        "speculation",
        "prediction",
        "kv_transfer_params",
    }
)
_MESSAGES_ONLY = CHAT | {"stop_sequences", "metadata", "service_tier"}
COUNT_TOKENS = FieldSet(
    _OF_PROMPTS,
    advice=lambda name, body: (
        ", which counts the tokens of a prompt; it belongs to POST /v1/messages and changes no "
        "prompt: leave it out"
        if name in _MESSAGES_ONLY
        else None
    ),
)
# Parameters of the query. The beta clients of Anthropic's SDKs add this one; it has no effect.
QUERY_PARAMS = frozenset({"beta"})
# Our names of fields that have another one here.
OWN_NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config",
}
