"""`quire serve --data-parallel-size 2`: one answer from any engine, also when one dies."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.engine.library.llm import LLM
from tests.serve.running_server import RunningServer, alive, engines_of, kill
from tests.serve.test_supervised_engine import CASES as ALL_CASES
from tests.serve.test_supervised_engine import MODEL, PLAIN, Streams, normal

CASES = ALL_CASES[1::2]
FLAGS = ("--data-parallel-size", "2", "--threads", "2", "--kv-cache-memory", "8MiB")


def streamed(server: RunningServer, path: str, body: dict[str, Any]) -> bytes:
    streams = Streams(server, [(path, body)])
    return streams.join()[0]


def cached_tokens(server: RunningServer, prompt: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    usage = server.post("/v1/completions", body)[1]["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_requests_share_engines_and_survive_the_death_of_one() -> None:
    with RunningServer(MODEL, *FLAGS) as server:
        pids = engines_of(server)
        assert len(pids) == 2
        alone = [streamed(server, path, body) for path, body in CASES]
        # Where the beginning of a prompt was computed, it is found again.
        stories = [f"{number} dogs and {number} cats " * 30 for number in range(4)]
        first = [cached_tokens(server, story) for story in stories]
        again = [cached_tokens(server, story) for story in stories]
        assert all(found > before + 100 for found, before in zip(again, first, strict=True))
        status, report = server.get("/admin/cache")
        assert status in (200, 404), report
        assert server.metric("quire_kv_blocks") > 0
        streams = Streams(server, CASES)
        streams.until_begun(600)
        kill(pids[0])
        for (path, body), got, wanted in zip(CASES, streams.join(), alone, strict=True):
            assert normal(got) == normal(wanted), (path, body, got[-300:])
        assert server.get("/health")[0] == 200
        assert "an engine died" in server.stderr()
        assert normal(streamed(server, *CASES[0])) == normal(alone[0])
        kill(pids[1])
        assert server.exit_code() == 1
        assert not any(map(alive, pids))


def test_with_restarts_both_engines_come_back() -> None:
    flags = ("--restart-engine", "--restart-limit", "5")
    with RunningServer(MODEL, *FLAGS, *flags) as server:
        alone = [streamed(server, path, body) for path, body in CASES[:3]]
        streams = Streams(server, CASES[:3])
        streams.until_begun(600)
        for pid in engines_of(server):
            kill(pid)
        for got, wanted in zip(streams.join(), alone, strict=True):
            assert normal(got) == normal(wanted), got[-300:]
        server.until(lambda: len(engines_of(server)) == 2, "two engines")
        assert server.metric("quire_engine_restarts_total") == 2
        assert server.post("/v1/completions", PLAIN)[0] == 200


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--api-processes", "2"), "several engines have one API process"),
        (("--tensor-parallel-size", "2", "--threads", "3"), "the engines and their ranks"),
        (("--threads", "1"), "divided over the engines"),
        (("--record-plans", "x"), "record-plans is given"),
    ],
)
def test_what_cannot_be_combined_is_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        RunningServer(MODEL, "--data-parallel-size", "2", *flags)


def test_the_library_has_one_engine() -> None:
    with pytest.raises(SettingError, match="only quire serve starts several engines"):
        LLM(data_parallel_size=2)
