"""Texts that are too long to fit are rejected before tokenization, with both numbers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quire.api.generation.text_bounds import max_text_bytes
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

MIB = 1 << 20


class Counting(ByteTokenizer):
    """A tokenizer that records the lengths of its input. A text's length gives no lower bound."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return [97] * 8

    def min_num_tokens(self, text: str) -> int:
        return 0


def ask(path: str, body: dict[str, Any], context: int = 64) -> tuple[Reply, list[int]]:
    engine = FakeEngine(card=replace(CARD, max_model_len=context))
    engine.tokenizer = tokenizer = Counting()

    async def exchange() -> Reply:
        site = Site(engine)
        reply = await site.post(path, body)
        site.server_state.thread_pools.close()
        return reply

    return asyncio.run(exchange()), tokenizer.lengths


def of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * (MIB + 1)}),
        ("/tokenize", {"prompt": "é" * (MIB // 2 + 1)}),
        ("/tokenize", of("x" * MIB)),
        ("/v1/completions", {"prompt": "x" * (MIB + 1)}),
        ("/v1/completions", {"prompt": "x" * (MIB + 1), "truncate_prompt_tokens": 4}),
        ("/v1/chat/completions", {**of("x" * MIB), "truncate_prompt_tokens": 4}),
    ],
)
def test_a_text_beyond_the_bound_is_rejected_unread(path: str, body: dict[str, Any]) -> None:
    reply, lengths = ask(path, body)
    param = "messages" if "messages" in body else "prompt"
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
    assert str(MIB) in reply.error["message"]
    assert "bytes; at most" in reply.error["message"]
    assert not lengths


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_a_text_at_the_bound_is_tokenized(path: str) -> None:
    reply, lengths = ask(path, {"prompt": "x" * MIB})
    assert (reply.status, lengths) == (200, [MIB])


def test_the_bound_grows_with_the_context() -> None:
    card = replace(CARD, max_model_len=MIB // 16 + 1)
    assert max_text_bytes(FakeEngine(card=card)) == MIB + 16
    reply, lengths = ask("/tokenize", {"prompt": "x" * (MIB + 16)}, context=card.max_model_len)
    assert (reply.status, lengths) == (200, [MIB + 16])


def test_a_text_that_can_never_fit_is_rejected_unread_unless_truncated() -> None:
    engine = FakeEngine()
    seen: list[int] = []

    class Known(Counting):
        def min_num_tokens(self, text: str) -> int:
            return -(-len(text) // 4)

    engine.tokenizer = tokenizer = Known()

    async def exchange() -> None:
        site = Site(engine)
        long = "x" * (4 * CARD.max_model_len)
        refused = await site.post("/v1/completions", {"prompt": long})
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert f"at least {CARD.max_model_len} tokens" in refused.error["message"]
        assert tokenizer.lengths == seen
        cut = await site.post("/v1/completions", {"prompt": long, "truncate_prompt_tokens": 3})
        assert (cut.status, tokenizer.lengths) == (200, [len(long)])
        assert len(engine.asked[0].prompt_ids) == 3

    asyncio.run(exchange())
