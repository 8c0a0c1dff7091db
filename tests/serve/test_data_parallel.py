"""`quire serve --data-parallel-size 2`: one answer from any engine, also when one dies, and with
several API processes before the engines."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.base.engine_stats import EngineStats
from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.engine.assembly import drafter
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import EngineProcess
from quire.engine.client.thread_link import ThreadLink
from quire.engine.data_parallel.data_parallel_engine import DataParallelEngine
from quire.engine.data_parallel.engine_configs import engine_configs
from quire.engine.library.llm import LLM
from quire.speculative.control import FixedControl
from quire.speculative.rests import NoRests
from tests.serve.running_router import RunningRouter
from tests.serve.running_server import GIVE_UP_S, RunningServer, alive, engines_of, kill
from tests.serve.test_api_processes import (
    COMPLETIONS,
    LONG,
    Caller,
    calling,
    events_of,
    next_event,
    pid_of,
    pids_of,
)
from tests.serve.test_supervised_engine import CASES as ALL_CASES
from tests.serve.test_supervised_engine import MODEL, PLAIN, Streams, normal

CASES = ALL_CASES[1::2]
WITHOUT_TEMPLATE = [case for case in CASES if case[0] in (COMPLETIONS, "/generate")]
FLAGS = ("--data-parallel-size", "2", "--threads", "2", "--kv-cache-memory", "8MiB")
NUM_TRIES = 10


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
        # A stopped engine is silent although it has work; the watchdog would wait for a minute.
        for _ in range(NUM_TRIES):  # on a busy machine it may have answered before it is stopped
            streams = Streams(server, CASES)
            streams.until_begun(600)
            os.kill(pids[0], signal.SIGSTOP)
            for (path, body), got, wanted in zip(CASES, streams.join(), alone, strict=True):
                assert normal(got) == normal(wanted), (path, body, got[-300:])
            os.kill(pids[0], signal.SIGCONT)
            if "an engine is silent" in server.stderr():
                break
        assert "an engine is silent" in server.stderr()
        streams = Streams(server, CASES)
        streams.until_begun(600)
        kill(pids[0])
        for (path, body), got, wanted in zip(CASES, streams.join(), alone, strict=True):
            assert normal(got) == normal(wanted), (path, body, got[-300:])
        assert server.get("/health")[0] == 200
        server.until(lambda: "an engine died" in server.stderr(), "its line is logged")
        assert normal(streamed(server, *CASES[0])) == normal(alone[0])
        kill(pids[1])
        assert server.exit_code() == 1
        assert not any(map(alive, pids))


def test_with_restarts_both_engines_come_back_after_a_death_and_a_sleep() -> None:
    flags = ("--restart-engine", "--restart-limit", "5")
    with RunningServer(MODEL, *FLAGS, *flags) as server:
        alone = [streamed(server, path, body) for path, body in CASES[:3]]
        streams = Streams(server, CASES[:3])
        streams.until_begun(600)
        for pid in engines_of(server):
            kill(pid)
        for got, wanted in zip(streams.join(), alone, strict=True):
            assert normal(got) == normal(wanted), got[-300:]
        restarts = "quire_engine_restarts_total"
        server.until(lambda: server.metric(restarts) == 2, "both are counted")
        server.until(lambda: len(engines_of(server)) == 2, "two engines")
        server.until(lambda: server.get("/health")[0] == 200, "ready")
        assert server.post("/v1/completions", PLAIN)[0] == 200
        _check_sleep(server)


def _check_sleep(server: RunningServer) -> None:
    """Engines sleep only when none has work, and together; a request wakes all; counters go on."""
    body = {**PLAIN, "seed": 21}
    wanted = server.post(COMPLETIONS, body)[1]["choices"]
    for _ in range(NUM_TRIES):  # on a busy machine the answer may be whole before
        with server.stream(COMPLETIONS, {**PLAIN, "max_tokens": 400}) as reader:
            reader.next()
            status, refused = server.post("/admin/sleep", None)
        if status == 503:
            break
    assert status == 503
    assert "1 requests are open" in refused["error"]["message"]
    pids = engines_of(server)
    server.until(lambda: server.get("/admin")[1]["open_requests"] == 0, "no open request")
    steps = server.metric("quire_steps_total")
    assert server.post("/admin/sleep", None)[1]["asleep"] is True
    assert server.post("/admin/sleep", None)[0] == 200, "twice is once"
    assert not any(map(alive, pids)), "their memory is free"
    assert server.metric("quire_steps_total") >= steps
    assert server.post(COMPLETIONS, body)[1]["choices"] == wanted
    server.until(lambda: len(set(engines_of(server)) - set(pids)) == 2, "two engines")
    assert server.post("/admin/wake", None)[1]["asleep"] is False
    assert server.metric("quire_steps_total") > steps
    assert server.metric("quire_engine_restarts_total") == 2, "sleep is no failure"


def found_tokens(caller: Caller, prompt: str) -> int:
    """Return how many tokens of a prompt an engine had, when it is sent through this process."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    status, reply = caller.ask("POST", COMPLETIONS, body)
    assert status == 200, reply
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_several_api_processes_share_engines_and_what_outlives_them(
    tiny: Path, tmp_path: Path
) -> None:
    """KV tier, KV store, KV events and trace are each engine's own, or shared, as documented."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/kv",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    flags = (
        *("--api-processes", "2", "--kv-tier-path", str(tmp_path / "tier")),
        *("--kv-store", str(tmp_path / "store"), "--kv-tier-size", "8MiB"),
        *("--kv-cache-memory", "32MiB"),
        *("--kv-events-config", json.dumps(events), "--trace", str(tmp_path / "trace.json")),
    )
    endpoint = events["endpoint"]
    with (
        RunningServer(tiny, *FLAGS, *flags) as server,
        calling() as caller_at,
        subscribed(str(endpoint), f"{endpoint}.1") as ranks_of_events,
    ):
        engines = engines_of(server)
        assert len(engines) == 2
        alone = [streamed(server, path, body) for path, body in WITHOUT_TEMPLATE]
        first, second = caller_at(server, 1), caller_at(server, 2)
        # What one process has sent to an engine, the other sends there too.
        stories = [f"{number} dogs and {number} cats " * 30 for number in range(4)]
        before = [found_tokens(first, story) for story in stories]
        after = [found_tokens(second, story) for story in stories]
        assert all(now > then + 100 for now, then in zip(after, before, strict=True))
        # Counters are of both engines and of both processes, whichever is asked.
        server.until(
            lambda: first.metric("quire_steps_total") == second.metric("quire_steps_total") > 0,
            "equal counters",
        )
        requests = "quire_requests_total"
        server.until(lambda: first.metric(requests) == second.metric(requests), "equal counters")
        assert first.metric("quire_kv_blocks") == second.metric("quire_kv_blocks")
        stored = "quire_kv_store_put_blocks_total"
        server.until(lambda: first.metric(stored) == second.metric(stored) > 0, "stored blocks")
        assert sorted(path.name for path in (tmp_path / "tier").iterdir()) == [
            "engine-0",
            "engine-1",
        ]
        assert sorted(path.name for path in tmp_path.glob("trace*")) == [
            "trace.engine-0.json",
            "trace.engine-1.json",
        ]
        assert ranks_of_events() == [0, 1]
        _check_routing(server, events, tmp_path)
        # A request is found by its name, and its timeline by its id, through the other process.
        stream = first.stream(LONG, **{"x-request-id": "mine"})
        id_ = next_event(stream)[1]["id"]
        assert second.ask("GET", "/v1/requests/mine")[1]["id"] == id_
        # A process that takes longer to answer than another waits for it is ignored.
        timeline = f"/v1/requests/{id_}/timeline"
        server.until(lambda: second.ask("GET", timeline)[0] == 200, "its timeline")
        assert second.ask("POST", "/v1/requests/mine/abort")[1]["aborted"] is True
        assert events_of(stream)[-1]["error"]["code"] == "aborted"
        _kill_one_after_the_other(server, caller_at, alone)
        assert not any(map(alive, engines))


def _check_routing(server: RunningServer, events: dict[str, Any], folder: Path) -> None:
    """A router knows the blocks of all engines of a server."""
    (folder / "route.toml").write_text(
        f'[kv-events.replicas."{server.url}"]\ndata-parallel-size = 2\n'
        f'endpoint = "{events["endpoint"]}"\nreplay-endpoint = "{events["replay_endpoint"]}"\n'
    )
    with RunningRouter("--config", str(folder / "route.toml"), server.url) as router:
        findable = server.get("/v1/cache")[1]["blocks"]["findable"]
        assert findable > 0
        router.until(lambda: router.metric("quire_router_known_blocks") == findable, "its blocks")
        assert router.metric("quire_router_kv_event_invalid_batches") == 0


@contextmanager
def subscribed(*endpoints: str) -> Iterator[Callable[[], list[int]]]:
    """Yield what returns the rank in the next batch of each publisher of KV events."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.SUB) for _ in endpoints]
    for socket, endpoint in zip(sockets, endpoints, strict=True):
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVTIMEO, int(GIVE_UP_S * 1000))
        socket.connect(endpoint)
    try:
        yield lambda: [msgspec.msgpack.decode(socket.recv_multipart()[2])[2] for socket in sockets]
    finally:
        context.destroy(linger=0)


def _kill_one_after_the_other(server: RunningServer, caller_at: Any, alone: list[bytes]) -> None:
    """A dead API process costs its own clients their streams, a dead engine no answer."""
    first, second = caller_at(server, 1), caller_at(server, 2)
    lost = first.stream(LONG)
    next_event(lost)
    server.until(lambda: second.metric("quire_running_requests") == 1, "it is shown")
    kill(pid_of(server, 1))
    with suppress(http.client.HTTPException, OSError):
        assert "[DONE]" not in events_of(lost)
    server.until(lambda: second.metric("quire_running_requests") == 0, "the engine ends it")
    server.until(lambda: 3 in pids_of(server), "another process serves")
    streams = Streams(server, WITHOUT_TEMPLATE)
    streams.until_begun(600)
    one, other = engines_of(server)
    kill(one)
    for (path, body), got, wanted in zip(WITHOUT_TEMPLATE, streams.join(), alone, strict=True):
        assert normal(got) == normal(wanted), (path, body, got[-300:])
    # A process that starts now has one engine from the beginning.
    kill(pid_of(server, 3))
    fourth = caller_at(server, 4)
    assert fourth.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
    assert fourth.ask("GET", "/health")[0] == 200
    server.until(lambda: "an engine is gone" in server.stderr(), "its line is logged")
    kill(other)
    assert server.exit_code() == 1


def test_engines_and_api_processes_come_back_together() -> None:
    flags = ("--api-processes", "2", "--restart-engine", "--restart-limit", "5")
    with RunningServer(MODEL, *FLAGS, *flags) as server, calling() as caller_at:
        alone = [streamed(server, path, body) for path, body in CASES[:3]]
        caller = caller_at(server, 2)
        steps = caller.metric("quire_steps_total")
        streams = Streams(server, CASES[:3])
        streams.until_begun(600)
        one, other = engines_of(server)
        kill(one)
        for got, wanted in zip(streams.join(), alone, strict=True):
            assert normal(got) == normal(wanted), got[-300:]
        restarts = "quire_engine_restarts_total"
        server.until(lambda: caller.metric(restarts) == 1, "it is counted")
        server.until(lambda: len(engines_of(server)) == 2, "two engines")
        assert caller.metric("quire_steps_total") > steps  # counters never fall
        # An API process that begins while an engine is started again gets it later.
        said = "the engine was restarted"
        server.until(lambda: said in server.stderr(), "the first one serves again")
        kill(other)
        kill(pid_of(server, 1))
        # One that begins while no engine is known to run ends, and another takes its place.
        server.until(lambda: max(pids_of(server)) > 2, "another process serves")
        third = caller_at(server, max(pids_of(server)))
        assert third.ask("POST", COMPLETIONS, PLAIN)[0] == 200
        server.until(lambda: len(engines_of(server)) == 2, "two engines")
        server.until(lambda: third.metric(restarts) == 2, "both are counted")
        blocks = caller.metric("quire_kv_blocks")
        server.until(lambda: third.metric("quire_kv_blocks") == blocks, "it has both")
        counted = "quire_steps_total"
        server.until(  # also of engines that ended before it began
            lambda: caller.metric(counted) == third.metric(counted), "equal counters"
        )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--kv-transfer-key-file", "x"), "kv-transfer-key-file is given, but"),
        (("--tensor-parallel-size", "64"), "128 ranks together"),
        (("--threads", "1"), "divided over the engines"),
        (("--disk-offload-gb", "1", "--pack-cache", "x"), "disk-offload-gb is given, but"),
    ],
)
def test_what_cannot_be_combined_is_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        RunningServer(MODEL, "--data-parallel-size", "2", *flags)


def test_engines_of_several_ranks_give_the_answers_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not bound to cores of their own: this machine may have fewer than ranks."""
    monkeypatch.setattr("quire.engine.data_parallel.engine_configs.num_usable_cores", lambda: 64)
    prompts = [f"Once upon a time {number} dogs" for number in range(4)]
    params = SamplingParams(seed=3, max_tokens=24, temperature=1.0)
    settings = {"model": MODEL, "kv_cache_memory_bytes": 8 << 20, "kv_touch_ahead_bytes": 0}
    with LLM(**settings) as llm:
        alone = [output.token_ids for output in llm.generate(prompts, params)]
    config = engine_config(
        {**settings, "tensor_parallel_size": 2, "data_parallel_size": 2, "num_threads": 4}
    )

    def client_of(own: EngineConfig) -> EngineClient:
        return EngineClient.attach(EngineProcess.launch(own), own)

    found, stats = asyncio.run(answers_of(config, client_of, prompts, params))
    assert [tokens for tokens, _ in found] == [list(ids) for ids in alone]
    assert all(one.steps_total for one in stats)


@pytest.mark.parametrize("proposer", ["ngram", "draft", "self", "eagle"])
def test_engines_with_drafts_give_the_answers_of_one_without(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """Drafts in each step, whether they pay or not: the engines are threads of this process."""
    prompts = [f"Once upon a time {number} dogs saw {number} dogs" for number in range(8)]
    params = SamplingParams(seed=3, max_tokens=40, temperature=0.6, logprobs=2, ignore_eos=True)
    settings = {"model": MODEL, "kv_cache_memory_bytes": 8 << 20, "kv_touch_ahead_bytes": 0}

    def client_of(own: EngineConfig) -> EngineClient:
        return EngineClient(ThreadLink(own), own)

    one = engine_config({**settings, "num_threads": 1})
    alone, _ = asyncio.run(answers_of(one, client_of, prompts, params))
    monkeypatch.setattr(drafter, "AdaptiveControl", lambda *_: FixedControl(3, NoRests()))
    both = engine_config(
        {**settings, "num_threads": 2, "data_parallel_size": 2, "speculate": proposer}
    )
    found, stats = asyncio.run(answers_of(both, client_of, prompts, params))
    assert found == alone
    assert [engine.proposer for engine in stats] == [proposer] * 2
    for engine in stats:
        assert sum(engine.accepted_draft_tokens_total) > 0
        assert not engine.draft_proposer_errors_total + engine.draft_errors_total


Answer = tuple[list[int], list[Any]]  # tokens and log-probabilities


async def answers_of(
    config: EngineConfig,
    client_of: Callable[[EngineConfig], EngineClient],
    prompts: list[str],
    params: SamplingParams,
) -> tuple[list[Answer], list[EngineStats]]:
    """Return the answers to prompts that all engines of a configuration share, and the counters of
    each engine."""
    clients = {number: client_of(own) for number, own in enumerate(engine_configs(config))}
    engine = DataParallelEngine(clients, Log("test"))
    await engine.ready()

    async def answer(number: int, prompt: str) -> Answer:
        ids = engine.tokenizer.encode(prompt)
        tokens: list[int] = []
        logprobs: list[Any] = []
        async for delta in engine.generate(ids, params, request_id=f"r{number}"):
            tokens += delta.token_ids
            logprobs += delta.logprobs
        return tokens, logprobs

    found = await asyncio.gather(*(answer(*each) for each in enumerate(prompts)))
    stats = [client.stats for client in clients.values()]
    await engine.close()
    return found, stats


def test_the_library_has_one_engine() -> None:
    with pytest.raises(SettingError, match="only quire serve starts several engines"):
        LLM(data_parallel_size=2)
