"""return_progress: events on how much of a prompt is computed, in the form of llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import structs

from quire.engine.output.output_stream import PromptProgress, TextDelta
from tests.unit.api.fake_engine import FakeEngine, Reply, Site


class ChunkedEngine(FakeEngine):
    """An engine that reports two prompt chunks before its first text, on request."""

    async def generate(self, *args: Any, **settings: Any) -> AsyncIterator[TextDelta]:
        begun = False
        async for delta in super().generate(*args, **settings):
            if not begun and settings["terms"].report_progress:
                begun = True
                for processed in (1, 2):
                    progress = PromptProgress(processed=processed, time_ms=processed / 2)
                    yield structs.replace(
                        delta, text="", token_ids=(), num_output_tokens=0, prompt_progress=progress
                    )
            yield delta


def post(path: str, body: dict[str, Any]) -> tuple[Reply, FakeEngine]:
    engine = ChunkedEngine("a", "b")

    async def exchange() -> Reply:
        return await Site(engine).post(path, body)

    return asyncio.run(exchange()), engine


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "seed": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "seed": 1},
        ),
        ("/generate", {"tokens": [1, 2, 3], "seed": 1}),
    ],
)
def test_progress_precedes_the_first_chunk_and_changes_no_other(
    path: str, body: dict[str, Any]
) -> None:
    streamed = {**body, "stream": True}
    reply, engine = post(path, {**streamed, "return_progress": True})
    assert reply.status == 200
    events = reply.events
    total = len(engine.asked[0].prompt_ids)
    assert all(event["choices"] == [] for event in events[:3])
    assert [event["prompt_progress"] for event in events[:3]] == [
        {"index": 0, "total": total, "cache": 2, "processed": 1, "time_ms": 0.5},
        {"index": 0, "total": total, "cache": 2, "processed": 2, "time_ms": 1.0},
        {"index": 0, "total": total, "cache": 2, "processed": total, "time_ms": 1.0},
    ]
    plain, _ = post(path, streamed)
    assert choices(events[3:]) == choices(plain.events)


def choices(events: list[Any]) -> list[Any]:
    return [event if event == "[DONE]" else event["choices"] for event in events]


def test_a_whole_answer_has_no_progress_to_report() -> None:
    reply, engine = post("/v1/completions", {"prompt": "abc", "return_progress": True})
    assert reply.status == 200
    assert not engine.asked[0].terms.report_progress
    assert "prompt_progress" not in reply.json


def test_each_prompt_of_a_request_reports_its_own() -> None:
    body = {"prompt": ["abc", "de"], "stream": True, "return_progress": True}
    reply, _ = post("/v1/completions", body)
    told = [event["prompt_progress"] for event in reply.events[:-1] if "prompt_progress" in event]
    for index, total in ((0, 3), (1, 2)):
        own = [one for one in told if one["index"] == index]
        assert [one["processed"] for one in own] == [1, 2, total]
        assert {one["total"] for one in own} == {total}


@pytest.mark.parametrize("value", [1, "true"])
def test_another_type_is_rejected(value: Any) -> None:
    for name in ("return_progress", "timings_per_token"):
        reply, _ = post("/v1/completions", {"prompt": "abc", "stream": True, name: value})
        assert (reply.status, reply.error["param"]) == (400, name)


def test_timings_per_token_are_in_every_chunk() -> None:
    body = {"prompt": "abc", "stream": True, "timings_per_token": True}
    events = post("/v1/completions", body)[0].events[:-1]
    assert [event["timings"]["predicted_n"] for event in events] == [1, 2, 2]
