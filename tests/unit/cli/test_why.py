"""quire why: what it asks, how it draws in 80 columns, and what it says where there is nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.timeline_view import WIDTH, drawn
from quire.obs.timeline import explain
from tests.unit.scheduler.fake_worker import make_request
from tests.unit.scheduler.harness import Harness, Setup


@pytest.fixture(scope="module")
def timeline() -> dict[str, Any]:
    """Return the timeline of a request that waits, is preempted and shares steps."""
    harness = Harness(Setup(num_blocks=6, prefix_caching=False, max_num_seqs=2))
    harness.add(make_request("first", [1] * 10, max_tokens=12))
    harness.add(make_request("asked", [2] * 4, max_tokens=12))
    harness.add(make_request("last", [3] * 4, max_tokens=2))
    harness.drain()
    reports = harness.timelines(["asked"])
    return {
        "id": "cmpl-1",
        "object": "request.timeline",
        "state": "done",
        "kept_steps": 4096,
        "streams": [{"prompt": 0} | explain(report) for report in reports],
    }


class Server:
    """Answers every request with the same body; keeps the paths and keys it was sent."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[tuple[str, str | None]] = []
        server = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append((self.path, self.headers["authorization"]))
                self.send_response(server.status)
                self.send_header("content-length", str(len(server.body)))
                self.end_headers()
                self.wfile.write(server.body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_a_timeline_is_drawn_in_80_columns_with_bars_and_causes(timeline: dict[str, Any]) -> None:
    lines = drawn(timeline)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= WIDTH
    for said in (
        "request cmpl-1 (done)",
        "queue     |",
        "prefill   |",
        "decode    |",
        "first token at",
        "preempted, waiting for a slot",
        "recomputation after a preemption",
        "preempted for another request's next token, blocks dropped",
        "prefix caching is off",
        "slowest gaps",
    ):
        assert said in text, said
    assert not any(ord(letter) > 126 for letter in text)


def test_bars_are_on_one_scale(timeline: dict[str, Any]) -> None:
    lines = drawn(timeline)
    queue, prefill, decode = (
        next(line for line in lines if line.startswith(name)).split("|")[1]
        for name in ("queue ", "prefill ", "decode ")
    )
    assert len(queue) == len(prefill) == len(decode) == 50
    assert prefill.index("=") <= decode.index("#")
    assert decode.rstrip().endswith("#")
    assert decode.endswith("#")


def test_a_running_request_and_several_streams_are_drawn(timeline: dict[str, Any]) -> None:
    stream = timeline["streams"][0]
    waiting = stream | {
        "finish_reason": None,
        "first_token_ms": None,
        "gaps": [],
        "causes": [],
        "prefill": {"ms": 0.0, "chunks": []},
        "steps_missing": True,
    }
    text = "\n".join(drawn(timeline | {"state": "open", "streams": [stream, waiting]}))
    assert "stream 0 of prompt 0" in text
    assert "still running" in text
    assert "--timeline-steps" in text


def test_it_asks_the_server_with_the_key_and_prints(
    server: Server, timeline: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.body = json.dumps(timeline).encode()
    assert main(["why", "my id/1", "--url", server.url + "/v1", "--api-key", "sk-1"]) == 0
    assert server.asked == [("/v1/requests/my%20id%2F1/timeline", "Bearer sk-1")]
    assert capsys.readouterr().out.splitlines() == drawn(timeline)
    assert main(["why", "1", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == timeline


def test_errors_of_the_server_are_passed_on(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.body = 404, b'{"error": {"message": "no timeline of it is kept"}}'
    assert main(["why", "x", "--url", server.url]) == 1
    assert "no timeline of it is kept" in capsys.readouterr().err
    server.status, server.body = 200, b'{"object": "list"}'
    assert main(["why", "x", "--url", server.url]) == 1
    assert "give the address of a server of Quire" in capsys.readouterr().err
    server.body = b"<html>"
    assert main(["why", "x", "--url", server.url]) == 1
    assert "JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["why", "x", "--url", "http://127.0.0.1:9"], 1, "give its address with --url"),
        (["why", "x", "--url", "ftp://host"], 2, "http:// or https://"),
        (["why", ""], 2, "the request id is empty"),
        (
            ["why", "http://127.0.0.1:8000"],
            2,
            "give the id of an answer, and the address with --url",
        ),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert said in capsys.readouterr().err
