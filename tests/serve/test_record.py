"""`quire record` and `quire replay` against a real server: every token is the same again."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.obs.recording import read_recording
from tests.serve import preloaded
from tests.serve.running_server import RunningServer
from tests.unit.cli.command import quire_main

ASKED: list[dict[str, Any]] = [
    {"prompt": "the sea and the stone", "max_tokens": 24, "seed": 3, "ignore_eos": True},
    {"prompt": ["the sea", "and the wind"], "n": 2, "max_tokens": 9, "temperature": 0.8, "seed": 4},
    {"prompt": "a b c", "max_tokens": 12, "temperature": 0, "logit_bias": {"40": -100}},
    {
        "prompt": "yes or no?",
        "max_tokens": 8,
        "structured_outputs": {"choice": ["yes", "no"]},
    },
    {"prompt": "the best", "max_tokens": 4, "temperature": 0.8, "seed": 6, "best_of": 2},
]


@contextmanager
def recording(server: RunningServer, file: Path, *flags: str) -> Iterator[None]:
    """Run `quire record` until Ctrl-C; it has begun when this enters."""
    reading, writing = os.pipe()
    process = preloaded.start(["record", server.url, str(file), *flags], writing, writing)
    os.close(writing)
    said = open(reading, encoding="utf-8")  # noqa: SIM115 (closed below)
    line = said.readline()
    try:
        assert line.startswith("recording "), line
        yield
        process.send_signal(signal.SIGINT)
        rest = said.read()
        assert process.wait(60) == 0, rest
        assert re.search(r"\d+ requests? (is|are) in", rest)
    finally:
        process.kill()
        process.wait()
        said.close()


@pytest.fixture(scope="module")
def recorded(shared_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with content of some requests, one of them left by its client."""
    file = tmp_path_factory.mktemp("recordings") / "content.jsonl"
    with recording(shared_server, file, "--content"):
        for body in ASKED:
            assert shared_server.post("/v1/completions", body)[0] == 200
        cut = {"prompt": "the wind", "max_tokens": 30_000, "seed": 1, "ignore_eos": True}
        with shared_server.stream("/v1/completions", cut) as reader:
            reader.next()
        shared_server.until(lambda: b'"abort"' in file.read_bytes(), "the last one is recorded")
    return file


def outcome_of(*words: str) -> tuple[int, Any]:
    done = quire_main("replay", "--json", *words)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_the_file_is_private_and_has_every_choice(recorded: Path) -> None:
    assert recorded.stat().st_mode & 0o077 == 0
    found = read_recording(recorded)
    assert found.header.content
    assert [len(one.output_tokens) for one in found.requests] == [1, 2, 2, 1, 1, 1, 1]
    assert found.requests[0].output_tokens == (24,)
    assert found.requests[0].ttft_ms is not None


def test_a_replay_to_the_server_gives_the_same_tokens(
    recorded: Path, server: RunningServer
) -> None:
    code, outcome = outcome_of(str(recorded), "--url", server.url, "--speed", "50")
    assert (code, outcome["num_errors"], outcome["num_different"]) == (0, 0, 0), outcome
    # The second prompt of a request has other noise than one that is sent alone.
    assert (outcome["num_requests"], outcome["num_compared"]) == (7, 6)
    assert outcome["same_fingerprint"]
    assert set(outcome["replayed"]["ttft_ms"]) == {"p50", "p90", "p95", "p99"}


def test_a_replay_in_this_process_gives_the_same_tokens_too(recorded: Path, tiny: Path) -> None:
    flags = ("--threads", "1", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    code, outcome = outcome_of(str(recorded), str(tiny), "--speed", "50", *flags)
    assert (code, outcome["num_compared"], outcome["num_different"]) == (0, 7, 0), outcome


def test_a_token_that_differs_is_found(
    recorded: Path, server: RunningServer, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    lines[1]["output_ids"][0][17] ^= 1
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    done = quire_main("replay", str(changed), "--url", server.url, "--max-requests", "1")
    assert done.returncode == 1
    assert "tokens: 1 of 1 requests differ\n" in done.stdout
    assert (
        "choice 0: 24 tokens were recorded, 24 came; they are equal up to token 17" in done.stdout
    )


def test_a_recording_without_content_is_replayed_with_its_lengths(
    server: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "lengths.jsonl"
    with recording(server, file):
        server.post("/v1/completions", ASKED[0])
        server.until(lambda: file.read_bytes().count(b"\n") >= 2, "it is recorded")
    assert b"output_ids" not in file.read_bytes()
    code, outcome = outcome_of(str(file), "--url", server.url)
    assert (code, outcome["output_tokens"], outcome["num_compared"]) == (0, 24, 0)
    simulated = quire_main(
        *("simulate", "--json", "--trace", str(file)),
        *("--gb-per-s", "0.5", "--gflop-per-s", "2"),
    )
    assert json.loads(simulated.stdout)["settings"]["num_requests"] == 1


def test_a_continued_request_is_recorded_as_the_whole_answer(
    server: RunningServer, tmp_path: Path
) -> None:
    asked = {**ASKED[0], "return_token_ids": True}
    ids = server.post("/v1/completions", asked)[1]["choices"][0]["token_ids"]
    file = tmp_path / "continued.jsonl"
    with recording(server, file, "--content"):
        assert server.post("/v1/completions", {**asked, "output_ids": ids[:9]})[0] == 200
        server.until(lambda: file.read_bytes().count(b"\n") >= 2, "it is recorded")
    assert read_recording(file).requests[0].output_ids == (tuple(ids),)
    code, outcome = outcome_of(str(file), "--url", server.url)
    assert (code, outcome["num_compared"], outcome["num_different"]) == (0, 1, 0), outcome


def test_embeddings_are_recorded_and_sent_again(server: RunningServer, tmp_path: Path) -> None:
    def record(file: Path, *flags: str) -> Path:
        with recording(server, file, *flags):
            assert server.post("/v1/embeddings", {"input": ["the sea", "the wind"]})[0] == 200
            server.until(lambda: file.read_bytes().count(b"\n") >= 3, "they are recorded")
        return file

    for file in (record(tmp_path / "lengths"), record(tmp_path / "content", "--content")):
        code, outcome = outcome_of(str(file), "--url", server.url)
        assert (code, outcome["num_errors"], outcome["num_different"]) == (0, 0, 0), outcome
        assert (outcome["num_requests"], outcome["output_tokens"]) == (2, 0)


_REFUSED: list[tuple[Callable[[str, Path], list[str]], int, str]] = [
    (lambda url, path: ["record", url, str(path), "--seconds", "0"], 2, "--seconds is 0.0"),
    (lambda url, path: ["record", url, str(path / "no" / "file")], 2, "cannot be written"),
    (lambda url, path: ["record", url, str(path.parent)], 2, "exists; name a new file"),
    (lambda url, path: ["record", "127.0.0.1:1", str(path)], 1, "no server answers at"),
    (lambda url, path: ["record", f"{url}/more", str(path)], 1, "does not record: HTTP 404"),
    (lambda url, path: ["replay", str(path)], 2, "cannot be read"),
]


@pytest.mark.parametrize(("words", "code", "message"), _REFUSED)
def test_what_cannot_be_done_is_refused(
    shared_server: RunningServer, tmp_path: Path, words: Any, code: int, message: str
) -> None:
    path = tmp_path / "new.jsonl"
    done = quire_main(*words(shared_server.url, path))
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert not path.exists()
