"""Request fields that other servers and clients define, and what this server does with each.

One declarative table in six parts, beside the lists of samplers (sampler_order.py);
`documented()` turns it into rows for the documentation:

- SYNONYMS: other names of honoured fields with exactly the same meaning; they are renamed.
- NO_EFFECT: fields that cannot change the answer, accepted at any value of their type.
- UNSERVED: fields accepted only at values that ask for nothing, and why others are refused.
- OPTIONS: objects with such keys, as UNSERVED has fields.
- HINTS: fields that ask for less than an exact result; accepted and listed in a response header.

unknown_fields.py says what to write in place of any other name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.generation.sampler_order import ORDER_WORDS, ORDERS
from quire.base.errors import InvalidParameter
from quire.base.show import show

# The path of the honoured field: its name, and the key inside it where the field is an object.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "max_new_tokens": ("max_tokens",),
    "n_predict": ("max_tokens",),
    "num_predict": ("max_tokens",),
    "min_new_tokens": ("min_tokens",),
    "repeat_penalty": ("repetition_penalty",),
    "rep_pen": ("repetition_penalty",),
    "repetition_penalty_range": ("repeat_last_n",),
    "rep_pen_range": ("repeat_last_n",),
    "num_return_sequences": ("n",),
    "n_cmpl": ("n",),
    "sampler_seed": ("seed",),
    "random_seed": ("seed",),
    "typical": ("typical_p",),
    "typ_p": ("typical_p",),
    "top_sigma": ("top_n_sigma",),
    "nsigma": ("top_n_sigma",),
    "mirostat_mode": ("mirostat",),
    "dry_range": ("dry_penalty_last_n",),
    "dry_breakers": ("dry_sequence_breakers",),
    "stopping_strings": ("stop",),
    "stop_sequences": ("stop",),
    "add_special": ("add_special_tokens",),
    "with_pieces": ("return_token_strs",),
    "input_ids": ("tokens",),
    "guided_json": ("structured_outputs", "json"),
    "guided_json_object": ("structured_outputs", "json_object"),
    "guided_regex": ("structured_outputs", "regex"),
    "guided_choice": ("structured_outputs", "choice"),
    "guided_grammar": ("structured_outputs", "grammar"),
    "guided_whitespace_pattern": ("structured_outputs", "whitespace_pattern"),
    "structural_tag": ("structured_outputs", "structural_tag"),
    "json_schema": ("structured_outputs", "json"),
    "regex": ("structured_outputs", "regex"),
    "grammar": ("structured_outputs", "grammar"),
    "grammar_string": ("structured_outputs", "grammar"),
    "ebnf": ("structured_outputs", "grammar"),
    "enable_thinking": ("chat_template_kwargs", "enable_thinking"),
}
# Of text-generation-webui, where 0 stands for all tokens.
RANGES = ("repetition_penalty_range", "rep_pen_range")
# Values of synonyms that ask for nothing.
EMPTY_SYNONYMS: Mapping[str, tuple[Any, ...]] = {
    "guided_json_object": (False,),
    "guided_grammar": ("",),
    "grammar": ("",),
    "grammar_string": ("",),
    "ebnf": ("",),
    **dict.fromkeys(RANGES, (0, -1)),
}

# Labels, routing, tuning of another server, and parameters of samplers that are off (UNSERVED).
# The type is that of the field's own documentation.
NO_EFFECT: Mapping[str, str] = {
    "user": "string",
    "metadata": "object",
    "client_metadata": "object",
    "max_tool_calls": "number",
    "safety_identifier": "string",
    "prompt_cache_key": "string",
    "prompt_cache_retention": "string",
    "request_id": "string",
    "rid": "string",
    "session_id": "string",
    "api_type": "string",
    "api_server": "string",
    "cache_prompt": "boolean",
    "n_cache_reuse": "number",
    "n_keep": "number",
    "n_discard": "number",
    "backend_sampling": "boolean",
    "guided_decoding_backend": "string",
    "adaptive_decay": "number",
    "dynatemp_low": "number",
    "dynatemp_high": "number",
    "dynatemp_exponent": "number",
    "prompt_lookup_num_tokens": "number",
    "static_cache": "boolean",
    "smoothing_curve": "number",
    "repetition_decay": "number",
    "rep_pen_slope": "number",
    "speculative_ngram": "boolean",
    "stream_reasoning": "boolean",
    "details": "boolean",
    "return_text_in_logprobs": "boolean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """A field accepted only at values that ask for nothing, and why it is refused otherwise.

    instead: what to do; by default the field is left out.
    """

    allowed: tuple[Any, ...]
    why: str
    instead: str = "leave it out"


_TAIL_FREE = "tail-free sampling is not implemented (min_p is similar)"
_ONE_TEMPERATURE = "a request has one temperature"
_ORDER = "an order is written as samplers, with names"
_BAN_TOKENS = "write it as bad_words, or as logit_bias of -100"
# Anthropic's edit of a conversation that leaves out nothing; coding agents send it.
_KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
_TEXT_ONLY = "the model writes text only"
_OTHER_SHAPE = "the response has one format"

UNSERVED: Mapping[str, Unserved] = {
    # OpenAI
    "store": Unserved(allowed=(False,), why="answers are not stored"),
    "service_tier": Unserved(allowed=("auto", "default", "standard_only"), why="there is one tier"),
    "functions": Unserved(
        allowed=([],),
        why="functions are given as tools",
        instead='write each as an entry of tools: {"type": "function", "function": {...}}',
    ),
    "function_call": Unserved(
        allowed=("none", "auto"),
        why="tool_choice selects the function to call",
        instead='write it as tool_choice: {"type": "function", "function": {"name": "..."}}',
    ),
    "modalities": Unserved(allowed=(["text"],), why=_TEXT_ONLY),
    "audio": Unserved(allowed=(), why=_TEXT_ONLY),
    "moderation": Unserved(allowed=(), why="nothing is moderated here"),
    "web_search_options": Unserved(allowed=(), why="the server searches nothing"),
    "personality": Unserved(allowed=(), why="write the style as instructions, or as a message"),
    # vLLM
    "prompt_embeds": Unserved(allowed=(), why="prompts are text or token ids"),
    "logits_processors": Unserved(allowed=([],), why="code in requests is never run"),
    "spaces_between_special_tokens": Unserved(
        allowed=(True, False), why="special tokens are written as the tokenizer's decoder says"
    ),
    "mm_processor_kwargs": Unserved(allowed=({},), why="the model reads text only"),
    "vllm_xargs": Unserved(allowed=({},), why="write each parameter as a field of its own"),
    # SGLang
    "return_logprob": Unserved(allowed=(False,), why="write it as logprobs"),
    "separate_reasoning": Unserved(
        allowed=(True,),
        why="reasoning has a field of its own (--reasoning-parser none keeps it in the text)",
    ),
    "no_stop_trim": Unserved(allowed=(False,), why="write it as include_stop_str_in_output"),
    "return_hidden_states": Unserved(allowed=(False,), why="hidden states are not returned"),
    "return_routed_experts": Unserved(allowed=(False,), why="routed experts are not returned"),
    "return_meta_info": Unserved(allowed=(False,), why="usage has the counts and timings"),
    "lora_path": Unserved(allowed=(), why="LoRA adapters are not implemented"),
    "custom_logit_processor": Unserved(allowed=(), why="code in requests is never run"),
    # Anthropic
    "container": Unserved(allowed=(), why="code of the model is not run"),
    "mcp_servers": Unserved(allowed=([],), why="the client calls the tools"),
    "context_management": Unserved(
        allowed=([], {}, {"edits": []}, {"edits": [_KEEP_THINKING]}),
        why="the conversation is used as it was sent",
    ),
    "speed": Unserved(allowed=("standard",), why="there is one speed"),
    "diagnostics": Unserved(
        allowed=({}, {"previous_message_id": None}), why="messages are not compared"
    ),
    # llama.cpp
    "id_slot": Unserved(allowed=(-1,), why="the scheduler places requests"),
    "slot_id": Unserved(allowed=(-1,), why="the scheduler places requests"),
    "return_tokens": Unserved(allowed=(False,), why="token ids are returned by return_token_ids"),
    "post_sampling_probs": Unserved(
        allowed=(False,), why="log-probabilities are those before sampling"
    ),
    "response_fields": Unserved(allowed=([],), why=_OTHER_SHAPE),
    "n_probs": Unserved(allowed=(0,), why="write it as logprobs (chats: top_logprobs)"),
    "reasoning_format": Unserved(
        allowed=("auto", "deepseek"),
        why="reasoning has a field of its own (--reasoning-parser none keeps it in the text)",
    ),
    "reasoning_control": Unserved(
        allowed=(False,), why="running reasoning is not ended early; give thinking_token_budget"
    ),
    "parse_tool_calls": Unserved(
        allowed=(True,), why="calls are parsed (--tool-call-parser none keeps them in the text)"
    ),
    "parse_special": Unserved(
        allowed=(True,), why="special tokens in a text are those tokens, as in prompts"
    ),
    "n_indent": Unserved(allowed=(0,), why="indentation does not limit an answer"),
    "t_max_predict_ms": Unserved(allowed=(0, -1), why="write it as deadline_ms"),
    "grammar_lazy": Unserved(allowed=(False,), why="a grammar holds from the first token on"),
    "grammar_triggers": Unserved(allowed=([],), why="write it as a structural tag"),
    "preserved_tokens": Unserved(allowed=([],), why="write it as skip_special_tokens: false"),
    "image_data": Unserved(allowed=([],), why="the model reads text only"),
    "lora": Unserved(allowed=([],), why="LoRA adapters are not implemented"),
    "min_keep": Unserved(allowed=(0, 1), why="filters may leave one token"),
    "adaptive_target": Unserved(allowed=(-1, -1.0, -0.01), why="adaptive-p is not implemented"),
    # text-generation-inference, text-generation-webui, KoboldCpp, SillyTavern
    "do_sample": Unserved(allowed=(True,), why="greedy decoding is temperature: 0"),
    "watermark": Unserved(allowed=(False,), why="answers are not watermarked"),
    "trim_stop": Unserved(allowed=(True,), why="write it as include_stop_str_in_output"),
    "decoder_input_details": Unserved(allowed=(False,), why="write it as prompt_logprobs"),
    "return_full_text": Unserved(allowed=(False,), why="write it as echo"),
    "auto_max_new_tokens": Unserved(
        allowed=(False,), why="leave max_tokens out of a chat to use the rest of the context"
    ),
    "preset": Unserved(allowed=("",), why="a request has its own parameters"),
    "max_tokens_second": Unserved(allowed=(0,), why="the rate of an answer is not limited"),
    "min_length": Unserved(allowed=(0,), why="write it as min_tokens"),
    "num_beams": Unserved(allowed=(1,), why="write it as use_beam_search with best_of"),
    "skew": Unserved(allowed=(0, 0.0), why="skew sampling is not implemented"),
    "add_bos_token": Unserved(allowed=(True,), why="write it as add_special_tokens: false"),
    "ban_eos_token": Unserved(allowed=(False,), why="write it as ignore_eos"),
    "custom_token_bans": Unserved(allowed=("", []), why=_BAN_TOKENS),
    "banned_tokens": Unserved(allowed=("", []), why=_BAN_TOKENS),
    "banned_strings": Unserved(allowed=("", []), why="write it as bad_words"),
    "negative_prompt": Unserved(allowed=("",), why="classifier-free guidance is not implemented"),
    "guidance_scale": Unserved(allowed=(1, 1.0), why="classifier-free guidance is not implemented"),
    "sampler_order": Unserved(allowed=([],), why=_ORDER),
    "grammar_retain_state": Unserved(allowed=(False,), why="each answer begins its grammar"),
    "tfs": Unserved(allowed=(1, 1.0), why=_TAIL_FREE),
    "tfs_z": Unserved(allowed=(1, 1.0), why=_TAIL_FREE),
    "top_a": Unserved(allowed=(0, 0.0), why="top_a is not implemented (min_p is similar)"),
    "smoothing_factor": Unserved(allowed=(0, 0.0), why="quadratic sampling is not implemented"),
    "dynamic_temperature": Unserved(allowed=(False,), why=_ONE_TEMPERATURE),
    "dynatemp_range": Unserved(allowed=(0, 0.0), why=_ONE_TEMPERATURE),
    "penalty_alpha": Unserved(allowed=(0, 0.0), why="contrastive search is not implemented"),
    "encoder_repetition_penalty": Unserved(
        allowed=(1, 1.0), why="the prompt's tokens are not favoured"
    ),
    "include_reasoning": Unserved(
        allowed=(True, False), why="a text completion has its reasoning in the text"
    ),
}

# Prefixes are found wherever prompts begin alike, with breakpoints or without.
_LIFETIME = Unserved(allowed=("30m", "12h"), why="it is one of the lifetimes of OpenAI's cache")
# Keys of a text part's prompt_cache_breakpoint.
BREAKPOINT: Mapping[str, Unserved] = {
    "mode": Unserved(allowed=("explicit",), why="it is the mode of every breakpoint"),
    "ttl": _LIFETIME,
}
OPTIONS: Mapping[str, Mapping[str, Unserved]] = {
    "prompt_cache_options": {
        "mode": Unserved(
            allowed=("implicit", "explicit"),
            why="prefixes are found in either mode; there is no other",
        ),
        "ttl": _LIFETIME,
        "prewarm": Unserved(
            allowed=(False,),
            why="a prompt is computed with an answer only",
            instead="send the prompt with a limit of one token",
        ),
        "comparison_response_id": Unserved(
            allowed=(), why="responses are not compared; chats have return_cached_tokens_details"
        ),
    },
    "background_options": {
        "completion_window": Unserved(
            allowed=("soonest",), why="background responses begin at once; batches take 24 hours"
        ),
        "continuation_id": Unserved(allowed=(), why="write it as priority"),
    },
    "image": {"context_compression": Unserved(allowed=("auto", "disabled"), why=_TEXT_ONLY)},
    "access_programs": {"cyber": Unserved(allowed=("standard",), why="there is one program")},
}

# Values that ask for nothing; at others the name is listed in the response header.
HINTS: Mapping[str, tuple[Any, ...]] = {
    "verbosity": ("medium",),
    "reasoning": ({},),
    "thinking": (),
    "truncation_length": (),
    "num_ctx": (),
    "keep_alive": (),
    "inference_geo": (),
    "t_max_prompt_ms": (0, -1),
    "sse_ping_interval": (),
    "penalize_nl": (True,),  # penalties count line breaks too
    "speculative.n_max": (),
    "speculative.n_min": (),
    "speculative.p_min": (),
}


# Of these, the values of fields that their API restricts.
HINT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "verbosity": ("low", "medium", "high"),
    "penalize_nl": (False, True),
}


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "object": dict,
    "number": (int, float),
    "boolean": bool,
}


def take_foreign(
    others: Mapping[str, Any],
    given: dict[str, Any],
    body: Mapping[str, Any],
    honoured: frozenset[str],
    *,
    warn_unknown: bool,
) -> tuple[str, ...]:
    """Treat fields that a route does not honour, and return the names of those that are ignored.

    given: gets the values of synonyms. Raises InvalidParameter naming a field that is not served or
    not known, with its value.
    """
    ignored: list[str] = []
    synonyms: dict[str, Any] = {}
    for name, value in others.items():
        if name in SYNONYMS and SYNONYMS[name][0] in honoured:
            synonyms[name] = value
        elif name in ORDERS and "temperature" in honoured:
            given[name] = value  # checked against the parameters
        elif name in UNSERVED:
            check_unserved(name, value)
        elif name in OPTIONS:
            check_options(name, value, OPTIONS[name])
        elif name in NO_EFFECT:
            _check_type(name, value)
        elif name in HINTS:
            _check_hint(name, value)
            if not any(same_json(value, neutral) for neutral in HINTS[name]):
                ignored.append(name)
        elif warn_unknown:
            ignored.append(name)
        else:
            from quire.api.generation.unknown_fields import unknown_field  # only for refusals

            raise unknown_field(name, honoured, body)
    asks_for_all = any(same_json(synonyms.get(name), 0) for name in RANGES)
    if asks_for_all and "n_predict" not in honoured and same_json(given.get("repeat_last_n"), 0):
        del given["repeat_last_n"]  # programs send one number under all names
    for name, value in synonyms.items():
        if not any(same_json(value, empty) for empty in EMPTY_SYNONYMS.get(name, ())):
            _rename(name, value, given)
    return tuple(ignored)


def as_sent(error: InvalidParameter, body: Mapping[str, Any]) -> InvalidParameter:
    """Return an error with the synonym that the client sent in place of the field it stands for."""
    ours = error.param
    if ours is None or body.get(ours) is not None:
        return error
    for name, path in SYNONYMS.items():
        if path[0] == ours and body.get(name) is not None:
            message = str(error)
            read_as = ".".join(path)
            for known in (read_as, ours):
                if message.startswith((f"{known} ", f"{known}: ")):
                    said = f"{name} (read as {read_as}){message[len(known) :]}"
                    return InvalidParameter(said, param=name)
            return InvalidParameter(f"{name}, read as {read_as}: {message}", param=name)
    return error


def _rename(name: str, value: Any, given: dict[str, Any]) -> None:
    """Store the value of a synonym under the field that it stands for.

    Raises InvalidParameter if both are given and differ.
    """
    field, *keys = SYNONYMS[name]
    target, key = given, field
    if keys:
        inner = given.get(field, {})
        if not isinstance(inner, dict):
            return  # the check of the field itself refuses it
        target = given[field] = dict(inner)
        [key] = keys
    if not same_json(target.setdefault(key, value), value):
        raise InvalidParameter(
            f"{name} is {show(value)} and {'.'.join((field, *keys))} is {show(target[key])}; they "
            "mean the same: give one",
            param=name,
        )


def _check_type(name: str, value: Any) -> None:
    kind = NO_EFFECT[name]
    if isinstance(value, bool) != (kind == "boolean") or not isinstance(value, _TYPES[kind]):
        words = f"an {kind}" if kind == "object" else f"a {kind}"
        raise InvalidParameter(f"{name} is {show(value)}; {words} is allowed", param=name)


def _check_hint(name: str, value: Any) -> None:
    allowed = HINT_VALUES.get(name)
    if allowed is not None and not any(same_json(value, one) for one in allowed):
        words = ", ".join(one if isinstance(one, str) else show(one) for one in allowed)
        raise InvalidParameter(f"{name} is {show(value)}; {words} are allowed", param=name)


def check_unserved(name: str, value: Any) -> None:
    """Refuse a field of UNSERVED at a value that asks for something."""
    _check(name, value, UNSERVED[name], name)


def check_options(
    path: str, value: Any, keys: Mapping[str, Unserved], *, param: str | None = None
) -> None:
    """Refuse an object with other keys, or a value of one that asks for something.

    param: the field that has the object at `path`; by default the path.
    """
    param = param or path
    if not isinstance(value, dict) or value.keys() - keys.keys():
        raise InvalidParameter(
            f"{path} is {show(value)}; an object of {', '.join(keys)} is allowed", param=param
        )
    for key in value:
        if value[key] is not None:
            _check(f"{path}.{key}", value[key], keys[key], param)


def _check(path: str, value: Any, rule: Unserved, param: str) -> None:
    if any(same_json(value, allowed) for allowed in rule.allowed):
        return
    allowed = " or ".join(["null", *map(show, rule.allowed)])
    raise InvalidParameter(
        f"{path} is {show(value)}: {rule.why}; {rule.instead} ({allowed} is accepted)", param=param
    )


def same_json(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, a boolean equals no number."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def documented() -> Iterator[tuple[str, str]]:
    """Yield rows (field, treatment) of the whole table, in Markdown without pipes."""
    for name, path in SYNONYMS.items():
        yield f"`{name}`", f"read as `{'.'.join(path)}`"
    for name, kind in NO_EFFECT.items():
        yield f"`{name}`", f"any {kind}; no effect"
    for name, rule in UNSERVED.items():
        values = " or ".join(f"`{value!r}`" for value in rule.allowed) or "`null`"
        yield f"`{name}`", f"accepted at {values}; otherwise refused: {rule.why}"
    for name, keys in OPTIONS.items():
        values = "; ".join(
            f"`{key}` at {' or '.join(f'`{one!r}`' for one in rule.allowed) or '`null`'}"
            for key, rule in keys.items()
        )
        yield f"`{name}`", f"accepted with {values}; otherwise refused"
    for name in ORDERS:
        yield f"`{name}`", ORDER_WORDS[name]
    for name in HINTS:
        yield f"`{name}`", "a hint: accepted, not used, listed in `x-quire-ignored-fields`"
