"""Admission control over real sockets: too busy, too late, too long, each with Retry-After.

One server with one slot that a long answer occupies; a few of its steps must have been timed before
anything is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running_server import EventReader, RunningServer

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "the sea", "max_tokens": 32000, "ignore_eos": True, "seed": 1}
SHORT = {"prompt": "short", "max_tokens": 2}
ENOUGH_STEPS = 20


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[RunningServer]:
    flags = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--threads", "1")
    with RunningServer(tiny, *flags) as found:
        yield found


@pytest.fixture
def busy(server: RunningServer) -> Iterator[EventReader]:
    """Yield the stream that occupies the only slot."""
    with server.stream(COMPLETIONS, ENDLESS) as reader:
        for _ in range(ENOUGH_STEPS):
            reader.next()
        yield reader
        assert reader.next()["choices"], "a rejected request does not disturb the running one"
    server.until(lambda: server.metric("quire_running_requests") == 0, "idle")


def refusal(server: RunningServer, **fields: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    status, headers, raw = server.request("POST", COMPLETIONS, {**SHORT, **fields})
    return status, headers, json.loads(raw)["error"]


def test_a_full_queue_sends_retry_after(server: RunningServer, busy: EventReader) -> None:
    with server.stream(COMPLETIONS, SHORT):
        server.until(lambda: server.metric("quire_waiting_requests") == 1, "one waits")
        status, headers, error = refusal(server)
        assert (status, error["code"]) == (503, "overloaded")
        assert 1 <= int(headers["retry-after"]) <= 3600
    server.until(lambda: server.metric("quire_waiting_requests") == 0, "nobody waits")


@pytest.mark.parametrize("field", ["deadline_ms", "ttft_slo_ms"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_predicted_to_miss_its_deadline_is_rejected_before_any_compute(
    server: RunningServer, busy: EventReader, field: str, is_streamed: bool
) -> None:
    prompts = server.metric("quire_prompt_tokens_total")
    refused = server.metric("quire_refused_requests_total")
    status, _, error = refusal(server, stream=is_streamed, **{field: 1.0})
    assert (status, error["code"]) == (503, "deadline_missed")
    assert "predicted" in error["message"]
    assert "within 1 ms" in error["message"]
    assert server.metric("quire_refused_requests_total") == refused + 1
    assert server.metric("quire_prompt_tokens_total") == prompts
    assert server.metric("quire_waiting_requests") == 0


def test_a_request_with_enough_time_waits_and_is_served(server: RunningServer) -> None:
    with server.stream(COMPLETIONS, ENDLESS) as running:
        for _ in range(ENOUGH_STEPS):
            running.next()
        with server.stream(COMPLETIONS, {**SHORT, "deadline_ms": 3.1e10}) as waiting:
            server.until(lambda: server.metric("quire_waiting_requests") == 1, "it waits")
            running.close()
            assert list(waiting)[-1] == "[DONE]"


def test_an_answer_past_its_deadline_is_ended_and_frees_its_blocks(
    tiny: Path,
) -> None:
    with RunningServer(tiny, "--threads", "1") as server:  # no step timed yet
        with server.stream(COMPLETIONS, {**ENDLESS, "deadline_ms": 1000.0}) as reader:
            events = list(reader)
        assert events[-1]["error"]["code"] == "timeout"
        assert "1000 ms" in events[-1]["error"]["message"]
        assert events[0]["choices"]
        server.until(lambda: server.metric("quire_kv_blocks_used") == 0, "blocks given back")
        assert server.metric("quire_goodput_requests_total") == 0
        assert server.metric("quire_missed_objectives_total") == 1
