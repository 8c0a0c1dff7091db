"""The prefix cache through the API: multi-turn chats, miss reasons, the report, a flush."""

from __future__ import annotations

import itertools
import string
from pathlib import Path
from typing import Any

from tests.serve.running_server import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def capital_letters(server: RunningServer) -> list[int]:
    """Return ids of tokens with a text that always tokenizes to the same tokens."""
    asked = {"prompt": string.ascii_uppercase, "add_special_tokens": False}
    ids: list[int] = server.post("/tokenize", asked)[1]["tokens"]
    assert len(ids) == 26
    return ids


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_the_next_chat_turn_finds_the_tokens_generated_in_the_last(
    server: RunningServer,
) -> None:
    fields = {"allowed_token_ids": capital_letters(server), "max_tokens": 80, "seed": 5}
    messages = [{"role": "user", "content": "a question nobody else asks"}]
    turns = []
    for turn in range(3):
        status, answer = server.post(CHAT, {**fields, "messages": messages})
        assert status == 200, answer
        turns.append(answer)
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": f"and then, {turn}?"})
    for before, after in itertools.pairwise(turns):
        known = before["usage"]["prompt_tokens"] + before["usage"]["completion_tokens"]
        # All but the last partial block, and the last token, as its KV was not computed.
        assert cached(after) >= (known - 1) // 16 * 16 > before["usage"]["prompt_tokens"]


def test_a_response_states_where_its_prompt_diverges_from_the_nearest_cached_one(
    server: RunningServer,
) -> None:
    ids = capital_letters(server)
    prompt = [ids[at * at % 26] for at in range(64)]
    asked = {"max_tokens": 1, "temperature": 0, "return_cached_tokens_details": True}
    server.post(COMPLETIONS, {"prompt": prompt, **asked})
    other = [*prompt[:41], 300, *prompt[42:]]
    _, answer = server.post(COMPLETIONS, {"prompt": other, **asked})
    assert answer["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 32,
        "cache_write_tokens": 0,
        "cached_tokens_details": {
            "pool": 32,
            "host": 0,
            "disk": 0,
            "misses": [{"reason": "first_difference", "token": 41}],
        },
    }
    _, answer = server.post(COMPLETIONS, {"prompt": prompt, **asked})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]["misses"] == [None]
    with server.stream(
        COMPLETIONS, {"prompt": other, **asked, "stream_options": {"include_usage": True}}
    ) as reader:
        usage = [event for event in reader if event != "[DONE]" and event.get("usage")][-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens_details"]["pool"] == 64


def test_the_report_lists_prefixes_by_digest_and_a_flush_removes_them(
    server: RunningServer,
) -> None:
    text = "kept by nobody else " * 12
    asked = {"prompt": text, "max_tokens": 1, "temperature": 0}
    answers = [server.post(COMPLETIONS, asked)[1] for _ in range(3)]
    status, report = server.get("/v1/cache?prefixes=1000")
    assert status == 200
    found = [(prefix["tokens"], prefix["hits"]) for prefix in report["prefixes"]]
    assert (cached(answers[1]), 2) in found
    assert all(len(prefix["digest"]) == 32 for prefix in report["prefixes"])
    assert "kept" not in str(report)
    blocks = report["blocks"]
    parts = ("used", "free_used_once", "free_used_again", "free_pinned", "free_plain")
    assert sum(blocks[part] for part in parts) == blocks["total"]
    assert report["tokens"]["found_total"]["pool"] >= 2 * cached(answers[1])

    status, flushed = server.post("/v1/cache/flush", None)
    assert (status, flushed) == (200, {"flushed_blocks": blocks["findable"]})
    assert server.get("/v1/cache")[1]["blocks"]["findable"] == 0
    _, answer = server.post(COMPLETIONS, asked)
    assert cached(answer) == 0
    assert answer["choices"][0]["text"] == answers[0]["choices"][0]["text"]


def test_another_salt_sees_no_hit_and_no_miss_reason(server: RunningServer) -> None:
    """The details of a prompt under one salt do not depend on prompts of another salt."""
    ids = capital_letters(server)
    secret = [ids[(7 * at + 3) % 26] for at in range(48)]
    unknown = [ids[(11 * at + 5) % 26] for at in range(48)]
    asked = {"max_tokens": 1, "temperature": 0, "return_cached_tokens_details": True}
    server.post(COMPLETIONS, {"prompt": secret, "cache_salt": "victim", **asked})
    usages = [
        server.post(COMPLETIONS, {"prompt": prompt, "cache_salt": salt, **asked})[1]["usage"]
        for prompt, salt in ((secret, "one"), (unknown, "two"))
    ]
    assert usages[0] == usages[1]
    details = usages[0]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0
    assert details["cached_tokens_details"]["misses"] == [{"reason": "not_seen", "token": 0}]


def test_after_a_restart_a_prefix_is_loaded_from_disk_and_reported(
    tiny: Path, tmp_path: Path
) -> None:
    tier = ("--kv-tier-path", str(tmp_path / "tier"), "--kv-tier-fetch", "always")
    flags = ("--threads", "1", *tier)
    asked = {
        "prompt": "told once, and kept on disk " * 60,
        "max_tokens": 1,
        "temperature": 0,
        "return_cached_tokens_details": True,
    }
    with RunningServer(tiny, *flags) as server:
        first = server.post(COMPLETIONS, asked)[1]
        num_blocks = first["usage"]["prompt_tokens"] // 16
        server.until(
            lambda: server.metric("quire_tier_saved_blocks_total") >= num_blocks, "all saved"
        )
    with RunningServer(tiny, *flags) as server:
        second = server.post(COMPLETIONS, asked)[1]
        report = server.get("/v1/cache")[1]
    assert _details(first) == {
        "pool": 0,
        "host": 0,
        "disk": 0,
        "misses": [{"reason": "not_seen", "token": 0}],
    }
    assert _details(second) == {"pool": 0, "host": 0, "disk": cached(second), "misses": [None]}
    assert cached(second) == num_blocks * 16
    assert report["tokens"]["found_total"] == {"pool": 0, "host": 0, "disk": cached(second)}
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def _details(answer: dict[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = answer["usage"]["prompt_tokens_details"]["cached_tokens_details"]
    return details
