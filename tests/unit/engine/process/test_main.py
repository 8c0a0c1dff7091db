"""The engine process: it answers, fails loudly, and never outlives its parent."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM, SamplingParams
from quire.base.errors import CapacityError, ConfigError, TokenizerError, WeightsError, WorkerError
from quire.base.records import FinishReason
from quire.config.flags import engine_config
from quire.engine.client import process_link
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.launch import EngineProcess, config_to_json
from quire.engine.client.tokenizer_side import load_tokenizer_side
from quire.engine.process.main import PARENT_GONE
from tests.serve.preloaded import forked_children
from tests.tiny_models import write_tiny_llama

PATIENCE_S = 60.0
LONG_TOKENS = 30_000


@pytest.fixture(scope="module", autouse=True)
def preloaded_children() -> Iterator[None]:
    """Fork the processes that tests start from one that has their modules."""
    with forked_children():
        yield


def run(story: Callable[[EngineClient], Awaitable[None]], model: Path, **settings: Any) -> None:
    """Run a script on an engine process, which has ended without remains when this returns."""

    async def play() -> None:
        config = engine_config({"model": str(model), "threads": 1, **settings})
        process = EngineProcess.launch(config)
        client = EngineClient.attach(process, config)
        try:
            await client.ready()
            await asyncio.wait_for(story(client), PATIENCE_S)
        finally:
            await client.close()
        assert process.wait(0) is not None
        assert not process.folder.exists()

    asyncio.run(play())


async def _answer(client: EngineClient, name: str, **settings: Any) -> tuple[list[int], str]:
    ids: list[int] = []
    text = ""
    sampling = SamplingParams(**settings)
    async for delta in client.generate([0, 40, 50, 60], sampling, request_id=name):
        ids += delta.token_ids
        text += delta.text
    return ids, text


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_concurrent_requests_match_the_in_process_engine(model: Path, plans_in_flight: int) -> None:
    asked = [
        {"temperature": temperature, "seed": seed, "max_tokens": 20, "ignore_eos": True}
        for seed, temperature in enumerate((0.0, 0.7, 1.0, 1.3, 1.0, 0.0))
    ]
    with LLM(model, threads=1) as llm:
        expected = llm.generate(
            [[0, 40, 50, 60]] * len(asked),
            [SamplingParams(**settings) for settings in asked],
        )

    async def story(client: EngineClient) -> None:
        answers = await asyncio.gather(
            *(_answer(client, f"r{i}", **settings) for i, settings in enumerate(asked))
        )
        assert [tuple(ids) for ids, _ in answers] == [answer.token_ids for answer in expected]
        assert [text for _, text in answers] == [answer.text for answer in expected]
        assert client.stats.steps_total > 0

    run(story, model, plans_in_flight=plans_in_flight)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with answers of many seconds, which run while this process waits for a processor."""
    folder = tmp_path_factory.mktemp("engine") / "long"
    return write_tiny_llama(folder, seed=3, max_position_embeddings=32768)


def test_a_disconnect_frees_its_blocks(long_model: Path) -> None:
    async def story(client: EngineClient) -> None:
        sampling = SamplingParams(max_tokens=LONG_TOKENS, ignore_eos=True)
        async with aclosing(client.generate([0, 5], sampling, request_id="r")) as deltas:
            async for _ in deltas:
                break
        await _until(lambda: client.stats.running == 0)
        assert client.stats.blocks_used == 0
        assert client.stats.steps_total < LONG_TOKENS

    run(story, long_model)


def test_a_killed_engine_is_reported_to_all_waiting_clients(long_model: Path) -> None:
    async def story(client: EngineClient) -> None:
        tasks = [
            asyncio.create_task(_answer(client, f"r{i}", max_tokens=LONG_TOKENS, ignore_eos=True))
            for i in range(3)
        ]
        await _until(lambda: client.stats.steps_total > 0)
        os.kill(_process_id(client), signal.SIGKILL)
        for task in tasks:
            with pytest.raises(WorkerError, match="signal 9"):
                await task
        await client.dead.wait()
        assert client.health().state == "dead"

    run(story, long_model)


def test_an_engine_that_hangs_at_its_end_is_killed_and_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_link, "_END_S", 0.2)

    async def story(client: EngineClient) -> None:
        os.kill(_process_id(client), signal.SIGSTOP)

    run(story, model)
    assert "the engine process is killed: it has not ended" in capsys.readouterr().err


def test_signals_for_a_clean_end_do_not_end_the_engine_itself(model: Path) -> None:
    async def story(client: EngineClient) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(_process_id(client), number)
        ids, _ = await _answer(client, "r", max_tokens=3, ignore_eos=True)
        assert len(ids) == 3

    run(story, model)


def test_an_idle_engine_does_not_wake_up(model: Path) -> None:
    async def story(client: EngineClient) -> None:
        await _answer(client, "r", max_tokens=3)
        before, num_woken = 0, 1 << 30
        for _ in range(20):  # on a busy machine its last wake-ups take a while
            if num_woken <= 2:
                break
            before = _times_woken(_process_id(client))
            await asyncio.sleep(0.5)
            num_woken = _times_woken(_process_id(client)) - before
        assert num_woken <= 2

    if not Path("/proc/self/task").is_dir():
        pytest.skip("counting wake-ups needs /proc")
    run(story, model)


def test_a_client_that_binds_late_still_gets_the_startup_error(model: Path) -> None:
    """The engine waits a second for its socket's other end; a busy client may take longer."""
    config = engine_config({"model": str(model), "kv_cache_memory": "900TiB", "threads": 1})
    process = EngineProcess.launch(config)
    assert process.wait(PATIENCE_S) == 1

    async def start() -> None:
        client = EngineClient.attach(process, config)
        with pytest.raises(CapacityError, match="lower --kv-cache-memory"):
            await client.ready()
        assert not process.folder.exists()

    asyncio.run(start())


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("config.json", ConfigError),
        ("model.safetensors", WeightsError),
        ("tokenizer.json", TokenizerError),
    ],
)
def test_an_unloadable_model_is_reported_with_its_class(
    model: Path, tmp_path: Path, broken: str, error: type[Exception]
) -> None:
    for file in model.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:20] if file.name == broken else content)

    async def story(client: EngineClient) -> None:
        raise AssertionError("it must not become ready")

    with pytest.raises(error):
        run(story, tmp_path)


def test_too_little_memory_is_reported_with_advice(model: Path) -> None:
    async def story(client: EngineClient) -> None:
        raise AssertionError("it must not become ready")

    with pytest.raises(CapacityError, match="lower --kv-cache-memory"):
        run(story, model, kv_cache_memory="900TiB")


def test_closing_during_startup_leaves_nothing_behind(model: Path) -> None:
    async def play() -> None:
        config = engine_config({"model": str(model)})
        process = EngineProcess.launch(config)
        client = EngineClient.attach(process, config)
        starting = asyncio.create_task(client.ready())
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await client.close()
        assert process.wait(0) is not None
        assert not process.folder.exists()

    asyncio.run(play())


def test_a_spare_process_loads_no_model_before_it_begins(model: Path) -> None:
    async def play() -> None:
        config = engine_config({"model": str(model), "threads": 1})
        process = EngineProcess.launch(config, is_spare=True)
        client = EngineClient.attach(process, config)
        ready = asyncio.ensure_future(client.ready(load_tokenizer_side(config.model)))
        await asyncio.wait([ready], timeout=1.0)
        assert not ready.done()
        process.begin()
        await asyncio.wait_for(ready, PATIENCE_S)
        ids, _ = await _answer(client, "r", max_tokens=3, ignore_eos=True)
        assert len(ids) == 3
        await client.close()
        assert not process.folder.exists()

    asyncio.run(play())


def test_a_spare_process_ends_with_its_input(model: Path) -> None:
    process = EngineProcess.launch(engine_config({"model": str(model)}), is_spare=True)
    process.end(PATIENCE_S)
    assert process.wait(0) == PARENT_GONE
    assert not process.folder.exists()


def test_the_sockets_are_accessible_to_their_owner_only(model: Path) -> None:
    process = EngineProcess.launch(engine_config({"model": str(model)}))
    assert process.folder.stat().st_mode & 0o777 == 0o700
    process.end(0.0)
    assert not process.folder.exists()


def test_what_an_engine_process_has_loaded_is_left_out_of_its_collections() -> None:
    script = (
        "import gc, types\n"
        "from quire.engine.process import main, messages\n"
        "def run_engine(config, channel, emit, report):\n"
        "    card = types.SimpleNamespace(name='tiny', fingerprint='f')\n"
        "    emit(messages.Ready(card=card, notes=()))\n"
        "    print(gc.get_freeze_count() > 10_000, gc.get_threshold()[0] > 700)\n"
        "    return True\n"
        "main.run_engine = run_engine\n"
        "end = types.SimpleNamespace(emit=lambda message: None, close=lambda: None)\n"
        "main.EngineSide = lambda folder, starter_id: end\n"
        "main.main()\n"
    )
    flags = ["--endpoint", "unused", "--starter", "1", "--failure-fd", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", script, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{config_to_json(engine_config({}))}\n\n")
        process.stdin.flush()  # and stays open: the process ends with it
        assert process.stdout.readline() == "True True\n"


def test_an_engine_in_a_program_leaves_its_collections_as_they_are(model: Path) -> None:
    before, num_frozen = (gc.get_threshold(), gc.isenabled()), gc.get_freeze_count()
    with LLM(model, threads=1) as llm:
        assert llm.generate([[0, 40]], SamplingParams(max_tokens=2))
        assert (gc.get_threshold(), gc.isenabled()) == before
        assert gc.get_freeze_count() <= num_frozen, "objects frozen before may be freed"


def test_an_engine_does_not_outlive_its_parent(model: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from quire.config.flags import engine_config\n"
        "from quire.engine.client.launch import EngineProcess\n"
        "process = EngineProcess.launch(engine_config({'model': sys.argv[1]}))\n"
        "print(process.process_id, process.folder, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(model)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        process_id, folder = parent.stdout.readline().split()
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    give_up_s = time.monotonic() + PATIENCE_S
    while _is_alive(int(process_id)) or Path(folder).exists():
        assert time.monotonic() < give_up_s, "the engine outlived its parent"
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["queue", "numpy", "types", "quire"])
def test_nothing_is_imported_from_the_current_directory(
    model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import sys; print('poisoned', file=sys.stderr, flush=True); sys.exit(9)\n"
    )
    root = str(Path(quire.__file__).parents[1])
    script = (
        "import sys\n"
        "sys.path.append(sys.argv[2])\n"
        "import asyncio\n"
        "from quire.config.flags import engine_config\n"
        "from quire.engine.client.engine_client import EngineClient\n"
        "async def play():\n"
        "    client = EngineClient.spawn(engine_config({'model': sys.argv[1]}))\n"
        "    await client.ready()\n"
        "    await client.close()\n"
        "asyncio.run(play())\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(model), root],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "poisoned" not in done.stderr


def test_the_finish_reason_survives_serialization(model: Path) -> None:
    async def story(client: EngineClient) -> None:
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2, seed=4)
        deltas = [d async for d in client.generate([0, 7], sampling, request_id="r")]
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].seed == 4
        tokens = [token for delta in deltas for token in delta.logprobs]
        assert len(tokens) == 2
        assert all(len(token.top) == 2 and token.logprob < 0 for token in tokens)
        assert deltas[-1].times is not None

    run(story, model)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def _process_id(client: EngineClient) -> int:
    link: Any = client._link
    return int(link._process.process_id)


def _is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _times_woken(process_id: int) -> int:
    """Return how often any thread of the process has yielded the CPU to wait."""
    total = 0
    for task in Path(f"/proc/{process_id}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total
