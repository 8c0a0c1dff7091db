"""What the router reads of a prompt in the form of each API: texts, token ids, and what it does
where it cannot read them."""

from __future__ import annotations

import json
from typing import Any

from quire.router.routed_request import RoutedRequest
from quire.router.tokenize_fields import tokenize_fields
from tests.cases import each_case


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@each_case(
    ("path", "fields", "text"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "a"),
        (
            "/v1/chat/completions",
            {"messages": [_said("user", "a"), _said("user", [{"type": "image_url"}, _text("b")])]},
            "b",
        ),
        ("/v1/completions", {"prompt": ["a", "b"]}, "a\nb"),
        ("/v1/completions", {"prompt": [5, 6]}, ""),
        ("/generate", {"tokens": [5, 6]}, ""),
        (
            "/v1/messages",
            {
                "system": "s",
                "messages": [
                    _said("user", [_text("a")]),
                    _said("assistant", "b"),
                    _said("user", [{"type": "tool_result", "content": "c"}]),
                ],
            },
            "a",
        ),
        ("/v1/responses", {"input": "a", "instructions": "b"}, "a"),
        (
            "/v1/responses",
            {
                "input": [
                    {"type": "message", **_said("user", [{"type": "input_text", "text": "a"}])},
                    {"type": "function_call_output", "call_id": "x", "output": "b"},
                ]
            },
            "a",
        ),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "m"}]}, ""),
        ("/api/chat", {"messages": [_said("user", "a"), _said("tool", "b")]}, "a"),
        ("/api/generate", {"prompt": "a", "system": "s"}, "a"),
        ("/completion", {"prompt": ["a", 5, "b"]}, "a\nb"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "a"),
        ("/v1/chat/completions", {"messages": 7}, ""),
        ("/v1/chat/completions", {"messages": [_said("user", [_said("user", "a")])]}, ""),
        ("/v1/chat/completions", {"messages": [_said("user", {"text": 7})]}, ""),
    ],
)
def test_what_the_user_wrote_last_is_read_of_each_api(
    path: str, fields: dict[str, Any], text: str
) -> None:
    assert RoutedRequest(path, [], json.dumps(fields).encode()).user_text == text


@each_case(
    ("path", "fields"),
    [
        ("/infill", {"input_prefix": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/completion", {"prompt": ["a", 5]}),
        ("/v1/messages", {"messages": []}),
        ("/v1/messages", {"messages": [_said("user", "a"), _said("assistant", "b")]}),
        ("/v1/messages", {"messages": [_said("user", "a"), _said("user", "b")]}),
        ("/v1/messages", {"messages": [_said("user", [{"type": "image"}])]}),
        ("/v1/messages", {"messages": [_said("user", "a")], "tools": [{}]}),
        ("/v1/messages", {"messages": [_said("user", "a")], "thinking": {"type": "enabled"}}),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "low"}}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "m"}]}),
        ("/v1/responses", {"input": [{**_said("user", "a"), "phase": "x"}]}),
        ("/v1/responses", {"input": 7}),
        ("/api/chat", {"messages": [{**_said("user", "a"), "images": ["x"]}]}),
        ("/api/chat", {"messages": [_said("user", "a")], "think": True}),
        ("/api/generate", {"prompt": "a", "context": [1]}),
        ("/api/generate", {"prompt": "a", "raw": True, "suffix": "b"}),
        ("/api/generate", {"prompt": ""}),
        ("/api/chat", {"messages": [None]}),
        ("/api/chat", {"messages": [_said("user", [7])]}),
    ],
)
def test_what_is_no_plain_conversation_is_not_looked_up(path: str, fields: dict[str, Any]) -> None:
    assert tokenize_fields(path, fields) is None


def test_a_conversation_of_texts_is_looked_up_as_a_chat() -> None:
    turns = [_said("user", "a"), _said("assistant", [_text("b")]), _said("user", [_text("c")] * 2)]
    fields = {"model": "m", "max_tokens": 5, "system": "s", "messages": turns}
    assert tokenize_fields("/v1/messages", {**fields, "tools": [], "thinking": None}) == {
        "model": "m",
        "messages": [
            _said("system", "s"),
            _said("user", "a"),
            _said("assistant", "b"),
            _said("user", [_text("c")] * 2),
        ],
    }
