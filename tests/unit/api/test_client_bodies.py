"""Default request bodies of other programs are answered unchanged."""

from __future__ import annotations

import asyncio
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
    listed = reply.headers["x-quire-ignored-fields"].split(", ")
    assert listed == [name for name in ("truncation_length", "num_ctx") if name in body]


@pytest.mark.parametrize("name", AI_SDK)
def test_the_ai_sdk_s_bodies_pass(name: str) -> None:
    answering = engine()
    reply = post("/v1/chat/completions", AI_SDK[name], answering)
    assert reply.status == 200, reply.body
    assert len(answering.asked) == 1
