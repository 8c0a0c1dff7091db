"""Default request bodies of other programs are answered unchanged."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from quire.text.chat_template import ChatTemplate
from tests.unit.api.fake_engine import CARD, CHAT_TEMPLATES, FakeEngine, Reply, Site

TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}</tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
)

# SillyTavern's text completion request to every backend, at its default settings.
SILLYTAVERN: dict[str, Any] = {
    "prompt": "Write the next reply.\nYou: Hi\nSeraphina:",
    "model": "",
    "max_new_tokens": 20,
    "max_tokens": 20,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nYou:"],
    "stop": ["\nYou:"],
    "truncation_length": 8192,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "generic",
    "api_server": "http://127.0.0.1:8000",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "stream": True,
}
# Its additional fields for a server with OpenAI's API, and for vLLM.
SILLYTAVERN_GENERIC = {
    **SILLYTAVERN,
    "rep_pen": 1.2,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.2,
    "repeat_last_n": 0,
    "n_predict": 20,
    "num_predict": 20,
    "num_ctx": 8192,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
}
SILLYTAVERN_VLLM = {
    **SILLYTAVERN,
    "api_type": "vllm",
    "n": 1,
    "ignore_eos": False,
    "spaces_between_special_tokens": True,
}

# What it adds for llama.cpp's server, with the list of samplers in its default order.
SILLYTAVERN_LLAMA_CPP = {
    **SILLYTAVERN_GENERIC,
    "api_type": "llamacpp",
    "samplers": [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
        *("temperature", "adaptive_p"),
    ],
    "logit_bias": [[7, 2.5], [" no", -1], [9, False]],
    "n_probs": 0,
    "grammar": "",
    "cache_prompt": True,
    "temperature": 1,
}
# And for text-generation-webui.
SILLYTAVERN_WEBUI = {
    **SILLYTAVERN,
    "api_type": "ooba",
    "sampler_priority": [
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "temperature"),
        *("dynamic_temperature", "quadratic_sampling", "top_n_sigma", "top_k", "top_p"),
        *("typical_p", "epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p", "adaptive_p"),
        *("mirostat", "xtc", "encoder_repetition_penalty", "no_repeat_ngram"),
    ],
    "do_sample": True,
    "guidance_scale": 1,
    "negative_prompt": "",
    "grammar_string": "",
    "temperature_last": True,
    "dynamic_temperature": False,
    "dynatemp_low": 1,
    "dynatemp_high": 1,
    "dynatemp_exponent": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
    "prompt_lookup_num_tokens": 0,
    "auto_max_new_tokens": False,
    "static_cache": False,
    "dry_sequence_breakers": '"\\n", ":", "\\"", "*"',
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
            "additionalProperties": False,
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
        "strict": True,
    },
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# Requests of the AI SDK's OpenAI-compatible and OpenAI chat providers, without undefined keys.
AI_SDK: dict[str, dict[str, Any]] = {
    "generateText": {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
    },
    "streamText with settings": {
        "model": "fake",
        "user": "someone",
        "max_tokens": 20,
        "temperature": 0,
        "top_p": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "stop": ["END"],
        "seed": 3,
        "reasoning_effort": "low",
        "verbosity": "low",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "generateObject with a schema": {
        "model": "fake",
        "messages": [{"role": "user", "content": "Name one."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": SCHEMA, "strict": True, "name": "response"},
        },
    },
    "a second step with tools": {
        "model": "fake",
        "tools": [TOOL],
        "tool_choice": "auto",
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"place":"Oslo"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "cold"},
        ],
    },
    "the OpenAI provider's": {
        "model": "fake",
        "logprobs": True,
        "top_logprobs": 2,
        "user": "someone",
        "parallel_tool_calls": True,
        "max_completion_tokens": 20,
        "store": False,
        "metadata": {"trace": "1"},
        "prediction": None,
        "reasoning_effort": "minimal",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "someone",
        "verbosity": "medium",
        "messages": [{"role": "user", "content": "Hi"}],
    },
}


# A chat of the page of llama.cpp's server, with its default settings.
LLAMA_CPP_PAGE = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "return_progress": True,
    "reasoning_format": "auto",
    "reasoning_control": False,
    "backend_sampling": False,
    "timings_per_token": True,
    "max_tokens": -1,
    "temperature": 0.8,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "typ_p": 1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
}


def engine() -> FakeEngine:
    answering = FakeEngine(card=replace(CARD, max_model_len=4096))
    answering.template = ChatTemplate({**CHAT_TEMPLATES, "default": TOOL_TEMPLATE}, variables={})
    return answering


def post(path: str, body: dict[str, Any], answering: FakeEngine) -> Reply:
    async def exchange() -> Reply:
        return await Site(answering).post(path, body)

    return asyncio.run(exchange())


@pytest.mark.parametrize("body", [SILLYTAVERN_GENERIC, SILLYTAVERN_VLLM])
def test_sillytavern_s_default_text_completion_passes(body: dict[str, Any]) -> None:
    answering = engine()
    reply = post("/v1/completions", body, answering)
    assert reply.status == 200, reply.body
    assert reply.events[-1] == "[DONE]"
    sampling = answering.asked[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (20, 0.7, 0.5)
    assert (sampling.repetition_penalty, sampling.stop) == (1.2, ("\nYou:",))
    assert sampling.dry_sequence_breakers == ("\n", ":", '"', "*")
    assert sampling.repeat_last_n is None
    listed = reply.headers["x-quire-ignored-fields"].split(", ")
    assert listed == [name for name in ("truncation_length", "num_ctx") if name in body]


def test_sillytavern_s_body_is_answered_in_llama_cpp_s_form() -> None:
    """With its window of 0 tokens the penalties are off, as in llama.cpp."""
    answering = engine()
    reply = post("/completion", {**SILLYTAVERN_LLAMA_CPP, "temperature": 0.7}, answering)
    assert reply.status == 200, reply.body
    sampling = answering.asked[0].sampling
    assert (sampling.repetition_penalty, sampling.repeat_last_n) == (1.2, 0)
    assert sampling.samplers == ("top_k", "top_p", "temperature")


def test_sillytavern_s_body_for_llama_cpp_passes_and_its_biases_hold() -> None:
    answering = engine()
    reply = post("/v1/completions", SILLYTAVERN_LLAMA_CPP, answering)
    assert reply.status == 200, reply.body
    sampling = answering.asked[0].sampling
    assert sampling.logit_bias == {7: 2.5, 9: -math.inf, **dict.fromkeys(b" no", -1.0)}


def test_a_chat_of_llama_cpp_s_page_passes() -> None:
    answering = engine()
    reply = post("/v1/chat/completions", LLAMA_CPP_PAGE, answering)
    assert (reply.status, reply.events[-1]) == (200, "[DONE]"), reply.body
    assert "x-quire-ignored-fields" not in reply.headers
    [asked] = answering.asked
    assert asked.sampling.max_tokens == answering.card.max_model_len - len(asked.prompt_ids)
    assert asked.sampling.samplers == ("top_k", "top_p", "min_p", "temperature")
    chat = {"messages": LLAMA_CPP_PAGE["messages"]}
    for same in ({"max_completion_tokens": -1}, {"n_predict": -1}, {"max_tokens": -1}):
        assert post("/v1/chat/completions", {**chat, **same}, answering).status == 200
        assert answering.asked[-1].sampling.max_tokens == asked.sampling.max_tokens
    for wrong in ({"max_tokens": -1.0}, {"max_tokens": -1, "max_completion_tokens": 5}):
        assert post("/v1/chat/completions", {**chat, **wrong}, answering).status == 400
    reply = post("/v1/chat/completions", {**chat, "reasoning_format": "none"}, answering)
    assert "--reasoning-parser none" in reply.json["error"]["message"]


def test_a_body_for_text_generation_webui_passes() -> None:
    answering = engine()
    reply = post("/v1/completions", SILLYTAVERN_WEBUI, answering)
    assert reply.status == 200, reply.body
    assert answering.asked[0].sampling.dry_sequence_breakers == ("\n", ":", '"', "*")


LLAMA_CPP_ORDER = SILLYTAVERN_LLAMA_CPP["samplers"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"samplers": ["temperature", "top_k"], "top_p": 0.9}, "does not list top_p"),
        ({"samplers": ["top_k", "typ_p"], "temperature": 0, "top_p": 0.9}, "list temperature"),
        ({"samplers": ["magic"]}, "magic"),
        ({"samplers": "kz"}, "a list is allowed"),
        ({"samplers": ["infill"]}, "infill"),
        ({"samplers": ["tfs"] * 65}, "65 entries"),
        ({"samplers": "t" * 65}, "a list is allowed"),
        ({"samplers": [], "sampler_priority": []}, "both given"),
        ({"temperature_last": 1}, "temperature_last is 1"),
        ({"sampler_priority": ["temperature", "dry"], "dry_multiplier": 0.8}, "temperature befor"),
    ],
)
def test_an_order_of_samplers_that_cannot_be_applied_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    body = {"prompt": "a", "temperature": 1, **fields}
    if fields.get("temperature") is None and "dry_multiplier" in fields:
        body["temperature"] = 0.5
    reply = post("/v1/completions", body, engine())
    assert reply.status == 400
    error = reply.json["error"]
    assert named in error["message"]
    assert error["param"] in ("samplers", "sampler_priority", "temperature_last")


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        # llama.cpp's order has the temperature last: its top_p is of other probabilities.
        (
            {"samplers": LLAMA_CPP_ORDER, "temperature": 0.7, "top_p": 0.9},
            ("top_p", "temperature"),
        ),
        ({"samplers": LLAMA_CPP_ORDER, "top_p": 0.9, "min_p": 0.1}, ("top_p", "min_p")),
        ({"samplers": "pt", "temperature": 0.7, "top_p": 0.9}, ("top_p", "temperature")),
        (
            {"temperature_last": True, "temperature": 0.7, "top_p": 0.9, "xtc_probability": 0.5},
            ("top_p", "xtc", "temperature"),
        ),
        (
            {
                "sampler_priority": SILLYTAVERN_WEBUI["sampler_priority"],
                "temperature_last": True,
                "temperature": 0.7,
                "top_k": 5,
                "min_p": 0.1,
                "typical_p": 0.9,
            },
            ("top_k", "typical_p", "min_p", "temperature"),
        ),
        ({"temperature_last": False, "temperature": 0.7, "top_p": 0.9}, ()),
        ({"temperature_last": True, "temperature": 0.7, "top_k": 9}, ()),
    ],
)
def test_steps_are_applied_in_the_order_of_a_list(
    fields: dict[str, Any], order: tuple[str, ...]
) -> None:
    answering = engine()
    reply = post("/v1/completions", {"prompt": "a", "temperature": 1, **fields}, answering)
    assert reply.status == 200, reply.body
    assert answering.asked[0].sampling.samplers == order


@pytest.mark.parametrize(
    "fields",
    [
        {"samplers": LLAMA_CPP_ORDER, "temperature": 0.7, "top_k": 40},
        {"samplers": LLAMA_CPP_ORDER, "temperature": 0, "top_p": 0.9, "min_p": 0.1},
        {"samplers": LLAMA_CPP_ORDER, "temperature": 1, "min_p": 0.1, "top_k": 5},
        {"samplers": LLAMA_CPP_ORDER, "temperature": 0.5, "top_p": 0.9, "samplers_": None},
        {"samplers": []},
    ],
)
def test_an_order_of_samplers_that_cannot_change_the_answer_is_accepted(
    fields: dict[str, Any],
) -> None:
    if "samplers_" in fields:
        fields = {**fields, "mirostat": 2, "top_p": 1}
    assert post("/v1/completions", {"prompt": "a", **fields}, engine()).status == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n_predict": -5}, "n_predict", "n_predict (read as max_tokens) is -5"),
        ({"repeat_penalty": 500}, "repeat_penalty", "(read as repetition_penalty) is 500"),
        ({"max_tokens": -5}, "max_tokens", "max_tokens is -5"),
        ({"guided_regex": 5}, "guided_regex", "structured_outputs.regex"),
    ],
)
def test_an_error_names_the_field_that_was_sent(
    body: dict[str, Any], param: str, message: str
) -> None:
    error = post("/v1/completions", {"prompt": "a", **body}, engine()).json["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("name", AI_SDK)
def test_the_ai_sdk_s_bodies_pass(name: str) -> None:
    answering = engine()
    reply = post("/v1/chat/completions", AI_SDK[name], answering)
    assert reply.status == 200, reply.body
    assert len(answering.asked) == 1
