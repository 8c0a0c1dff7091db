"""A stream of any API, with reasoning and calls, cut after any delta: the rest has its bytes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from quire.engine.output.text_delta import TextDelta
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, FakeEngine, Site
from tests.unit.api.shown_conversation import CHAT_TOOL, SCHEMA, TEMPLATE

SAID = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = CHAT_TOOL["function"]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        **SAID,
        "max_tokens": 99,
        "seed": 7,
        "include_output_ids": True,
        "tools": [{"name": "weather", "description": "Tell it.", "input_schema": SCHEMA}],
    },
    "/v1/responses": {
        "input": "hi",
        "seed": 7,
        "include_output_ids": True,
        "tools": [{"type": "function", **TOOL}],
    },
    "/api/chat": {
        **SAID,
        "model": "fake",
        "options": {"seed": 7},
        "include_output_ids": True,
        "tools": [CHAT_TOOL],
    },
    "/v1/chat/completions": {
        **SAID,
        "seed": 7,
        "tools": [CHAT_TOOL],
        "stream_options": {"include_output_ids": True, "include_usage": True},
    },
}
QWEN = [
    *("<think>", "Hm", ", ", "Ulm", "?", "</think>", "\n\n", "I ", "look", ".", "\n"),
    *("<tool_call>", '{"name": ', '"weather", ', '"argu', 'ments": ', '{"city": ', '"Ulm"}', "}"),
    *("</tool_call>", "\n", "<tool_call>", '{"name": "weather", "arguments": ', '{"city":'),
    *(' "Bonn"}}', "</tool_call>"),
]
HARMONY = [
    *("<|channel|>", "analysis", "<|message|>", "H", "m.", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>", "commentary", "<|message|>", " ", "\n", " I ", "look.", "<|end|>"),
    *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", "\n", "no."),
]
SCRIPTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "qwen": (QWEN, {}),
    "harmony": (HARMONY, {"reasoning_parser": "harmony"}),
}


class KnowingEngine(FakeEngine):
    """Leaves out what the client has, as ContinuedStream does."""

    async def generate(
        self, *arguments: Any, output_ids: Sequence[int] = (), **options: Any
    ) -> AsyncIterator[TextDelta]:
        before: list[TextDelta] = []
        async for delta in super().generate(*arguments, **options):
            if len(before) < len(output_ids):
                before.append(delta)
                continue
            known = None
            if before and len(before) == len(output_ids):
                known = structs.replace(
                    before[-1],
                    text="".join(one.text for one in before),
                    token_ids=(),
                    token_chars=tuple(chars for one in before for chars in one.token_chars),
                )
                before.append(delta)
            yield structs.replace(delta, known=known)


async def _streamed(site: Site, path: str, body: dict[str, Any]) -> list[bytes]:
    reply = await site.call("POST", path, json.dumps({**body, "stream": True}).encode())
    assert reply.status == 200, reply.body
    return reply.body.split(b"\n" if path.startswith("/api/") else b"\n\n")[:-1]


def _events(blocks: list[bytes]) -> list[bytes]:
    times = rb'"(?:completed_at|\w+_duration)":\d+'
    return [re.sub(times, b"", one) for one in blocks if not one.startswith(b":")]


@each_case("name", SCRIPTS)
@each_case("path", PATHS)
def test_the_rest_of_a_stream_has_its_bytes(path: str, name: str) -> None:
    script, settings = SCRIPTS[name]
    made = KnowingEngine(*script, card=replace(CARD, max_model_len=2048))
    made.template = ChatTemplate({"default": TEMPLATE}, variables={})

    async def story() -> None:
        site, body, output_ids = Site(made, **settings), PATHS[path], list[int]()
        blocks = await _streamed(site, path, body)
        for at, block in enumerate(blocks):
            if not block.startswith(b': {"output_ids"'):
                continue
            comment = json.loads(block[2:])
            output_ids += comment["output_ids"]
            more = {"output_ids": output_ids, "output_cursor": comment["output_cursor"]}
            rest = await _streamed(site, path, {**body, **more})
            assert _events(rest) == _events(blocks[at:]), output_ids
        assert len(output_ids) == len(script) - 1

    asyncio.run(story())
