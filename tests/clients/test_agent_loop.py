"""A coding agent's loop through Anthropic's client, with counted reads of the prompt cache.

40 turns, 60 tools, parallel calls, a system prompt of 100 KB; tools, system and the last two
messages of the user end cached prefixes, as agents mark them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.scripts import BOX_TEMPLATE
from tests.serve.running_server import RunningServer
from tests.tiny_models import write_tiny_llama

anthropic = pytest.importorskip("anthropic")

NUM_TURNS, NUM_TOOLS, SYSTEM_BYTES, BLOCK = 40, 60, 100_000, 16
HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
# Positions of 128 KiB in one small layer: a prompt of this size is computed in seconds.
SHAPE: Any = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 131_072,
}


def tools() -> list[dict[str, Any]]:
    """Return 60 tools; the last ends a cached prefix."""
    schema = {
        "type": "object",
        "properties": {"path": {"enum": ["a.py", "b.py"]}},
        "required": ["path"],
        "additionalProperties": False,
    }
    listed: list[dict[str, Any]] = [
        {"name": f"tool_{at:02}", "description": f"Runs command {at}.", "input_schema": schema}
        for at in range(NUM_TOOLS)
    ]
    listed[-1]["cache_control"] = HOUR
    return listed


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with breakpoints at the last two of the user."""
    places = [at for at, said in enumerate(messages) if said["role"] == "user"][-2:]
    shown = []
    for at, said in enumerate(messages):
        content = [dict(block) for block in said["content"]]
        if at in places:
            content[-1]["cache_control"] = MINUTES
        shown.append({"role": said["role"], "content": content})
    return shown


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("agent")
    model = write_tiny_llama(folder / "model", seed=5, **SHAPE)
    template = folder / "hermes.jinja"
    template.write_text(BOX_TEMPLATE)
    flags = ("--chat-template", str(template), "--threads", "2", "--cache-pin-share", "0.9")
    memory = ("--kv-cache-memory", "48MiB", "--max-num-seqs", "4")
    with RunningServer(model, *flags, *memory) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_an_agents_turns_read_all_that_came_before(server: RunningServer, client: Any) -> None:
    line = "The file of line {} in the code of the tests is the one that the tool reads.\n"
    system_text, at = "", 0
    while len(system_text) < SYSTEM_BYTES:
        system_text, at = system_text + line.format(at), at + 1
    system = [{"type": "text", "text": system_text, "cache_control": HOUR}]
    model = server.get("/v1/models")[1]["data"][0]["id"]
    asked: Any = {
        "model": model,
        "system": system,
        "tools": tools(),
        "tool_choice": {"type": "any"},
        "max_tokens": 160,
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Run the tests."}]}
    ]
    num_calls, num_before = 0, 0
    for turn in range(NUM_TURNS):
        answer = client.messages.create(
            **asked, messages=marked(messages), extra_body={"seed": turn}
        )
        usage = answer.usage
        read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        total = usage.input_tokens + read + made
        split = usage.cache_creation
        assert made == split.ephemeral_5m_input_tokens + split.ephemeral_1h_input_tokens
        if turn == 0:
            assert read == 0
            assert split.ephemeral_1h_input_tokens > SYSTEM_BYTES // 4
            assert total - made < 2 * BLOCK
        else:
            # All full blocks of the prompt before, which the last breakpoint pinned.
            assert num_before - BLOCK < read <= total
            assert split.ephemeral_1h_input_tokens == 0
            assert usage.input_tokens < 2 * BLOCK
        num_before = total
        calls = [block for block in answer.content if block.type == "tool_use"]
        num_calls += len(calls)
        content: list[Any] = [block.to_dict() for block in answer.content]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"ok {turn}"}
            for call in calls
        ]
        for call in calls:
            assert json.dumps(call.input)
        messages.append({"role": "assistant", "content": content})
        results.append({"type": "text", "text": f"Go on with step {turn}."})
        messages.append({"role": "user", "content": results})
    assert num_calls >= NUM_TURNS
    pinned = server.metric("quire_pinned_blocks")
    assert pinned >= num_before // BLOCK
    assert server.metric("quire_ended_pins_total") == 0
