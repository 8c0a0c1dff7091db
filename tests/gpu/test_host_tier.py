"""A KV tier in host memory under the whole engine, on CPU tensors and a lazy device.

The device does nothing until it is waited for. Every request gets what it gets without a tier, one
step at a time. QUIRE_GPU_EXACT_CASES draws more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quire.base.engine_stats import EngineStats  # noqa: E402
from quire.base.errors import SettingError  # noqa: E402
from quire.base.records import Request, StepPlan  # noqa: E402
from quire.base.sampling_params import SamplingParams  # noqa: E402
from quire.bench.local import LocalEngine  # noqa: E402
from quire.bench.workloads import RequestSpec  # noqa: E402
from quire.config.machine import MachineMemory  # noqa: E402
from quire.execute.gpu.executor_class import TorchExecutorClass  # noqa: E402
from quire.execute.gpu.stream import CpuStream  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.runner.handle import Handle  # noqa: E402
from quire.runner.model_runner import ModelRunner  # noqa: E402
from quire.scheduler.cost.transfer_cost import TransferCost  # noqa: E402
from tests.exact.rig import (  # noqa: E402
    Model,
    Outcome,
    WatchedRunner,
    make_core,
    make_runner,
    run_case,
)
from tests.exact.test_overlap import plain  # noqa: E402
from tests.exact.workload import VOCAB_SIZE, Case, Settings, draw_case  # noqa: E402
from tests.gpu.test_exact_answers import NUM_CASES, TorchModel  # noqa: E402
from tests.gpu.test_overlap import SlowModel, is_cut_short  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, SlowModel]]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tier") / "odd", seed=5, num_hidden_layers=1)
    made = TorchModel(folder, DType.F32), SlowModel(folder, DType.F32)
    yield made
    for model in made:
        model.close()


def tight(number: int, **fields: Any) -> Case:
    """Draw a case of requests sampled on the device, in a pool that is too small."""
    case = plain(draw_case(number, num_models=1, vocab_size=VOCAB_SIZE), reads_tokens=False)
    settings = replace(case.settings, num_threads=1, prefix_caching=True, max_samples=8, **fields)
    return replace(case, settings=settings)


class PromptRunner(ModelRunner):
    """A Runner that fails if submitting a plan waits for the device."""

    def submit(self, plan: StepPlan) -> Handle:
        stream = self.executor._stream  # type: ignore[attr-defined]
        before = stream.waiters.count("MainThread")
        handle = super().submit(plan)
        assert stream.waiters.count("MainThread") == before, f"step {plan.step} waited"
        return handle


def differences(outcome: Outcome, wanted: Outcome) -> list[str]:
    """Return the streams with other tokens, or with too few."""
    found = list(outcome.problems)
    for name, stream in outcome.streams.items():
        other = wanted.streams[name]
        shorter = min(len(stream.tokens), len(other.tokens))
        is_whole = len(stream.tokens) == len(other.tokens) or is_cut_short(stream, other)
        if stream.error or stream.tokens[:shorter] != other.tokens[:shorter] or not is_whole:
            found.append(f"case {outcome.case.number}, {name}: {stream.error or 'other tokens'}")
    return found


@pytest.mark.parametrize("in_host", [True, False], ids=["host", "disk"])
def test_requests_match_their_run_without_a_tier(
    models: tuple[Model, SlowModel], in_host: bool
) -> None:
    at_once, slow = models
    seen = dict.fromkeys(("preempted", "saved", "fetched", "cancelled"), 0)
    num_cases = max(NUM_CASES // 2, 4)
    for number in range(num_cases):
        places = (3, 12, 48, 48)[number % 4]  # the first is always full
        case = tight(number, tier_blocks=places, tier_in_host=in_host, plans_in_flight=2)
        alone = replace(case, settings=replace(case.settings, tier_blocks=0, plans_in_flight=1))
        outcome = run_case(slow, case, runner_type=PromptRunner)
        assert not differences(outcome, run_case(at_once, alone))
        for name in seen:
            seen[name] += getattr(outcome, name)
    assert min(seen.values()) >= 1, seen
    assert seen["saved"] >= num_cases // 2
    assert seen["fetched"] >= num_cases // 4


class Driven:
    """An engine with few blocks on the slow device, driven one step at a time."""

    def __init__(self, model: SlowModel) -> None:
        settings = Settings(
            num_blocks=10,
            block_size=16,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_samples=2,
            plans_in_flight=2,
            prefix_caching=True,
            num_threads=1,
            tier_blocks=16,
            tier_in_host=True,
        )
        self.runner = WatchedRunner(make_runner(model.executor(1), settings))
        self.core = make_core(self.runner, settings, window=0)
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self._now_ms = 0.0
        self._woken = threading.Event()
        assert self.core.tier is not None
        self.core.tier.wake = self._woken.set

    def add(self, name: str, num_prompt: int, max_tokens: int) -> None:
        """Add a greedy request with a prompt that depends only on its length."""
        ids = 2 + np.random.default_rng(num_prompt).integers(0, VOCAB_SIZE - 2, num_prompt)
        request = Request(
            request_id=name,
            group_id=name,
            stream=0,
            prompt_ids=ids.astype(np.int32),
            sampling=SamplingParams(temperature=0.0, seed=0),
            stop_ids=(),
            max_total_tokens=num_prompt + max_tokens,
            arrival_ms=self._now_ms,
        )
        self.core.add([request])
        self.tokens[name] = []

    def step(self) -> None:
        self._now_ms += 1.0
        outputs = self.core.step(lambda: self._now_ms)
        if outputs is None:  # blocks are in transfer
            self._woken.wait(0.01)
            self._woken.clear()
        for output in outputs or ():
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended.add(output.request_id)

    def until(self, what: str, is_so: Any) -> None:
        for _ in range(20_000):
            if is_so(self.core.stats()):
                return
            self.step()
        raise AssertionError(f"not within the steps: {what}")

    def end(self) -> None:
        """Run until idle; check that the cache metadata is consistent and no request is left."""
        self.until("all over", lambda _: not self.core.has_work)
        assert self.core.scheduler.check_integrity() == []
        assert self.core.stats().blocks_used == 0
        self.runner.runner.end_thread()


def test_aborting_a_request_while_its_blocks_are_on_the_host(
    models: tuple[Model, SlowModel],
) -> None:
    """Blocks of the aborted request stay findable; the request preempted in its place resumes as
    alone.
    """
    _, slow = models
    alone = Driven(slow)
    alone.add("stays", 64, 40)
    alone.end()
    driven = Driven(slow)
    driven.add("stays", 64, 40)
    driven.add("goes", 65, 40)
    driven.until("preempted", lambda stats: stats.preemptions_moved_total > 0)
    driven.until("saved", lambda stats: stats.tier_saved_blocks_total >= 4)
    driven.core.abort(["goes"])
    driven.until("the other is over", lambda _: "stays" in driven.ended)
    assert driven.tokens["stays"] == alone.tokens["stays"]
    driven.add("again", 65, 4)
    driven.end()
    assert len(driven.tokens["again"]) == 4


def test_a_swapped_out_request_resumes_with_its_bytes(
    models: tuple[Model, SlowModel],
) -> None:
    _, slow = models
    alone = Driven(slow)
    alone.add("one", 64, 40)
    alone.add("two", 65, 1)
    alone.end()
    driven = Driven(slow)
    driven.add("one", 64, 40)
    driven.add("two", 65, 40)
    driven.end()
    stats = driven.core.stats()
    assert stats.preemptions_moved_total > 0
    assert stats.tier_fetched_blocks_total > 0
    assert stats.tier_bad_blocks_total == 0
    assert driven.tokens["one"] == alone.tokens["one"]
    assert driven.tokens["two"][:1] == alone.tokens["two"]


# ---- the engine as `quire serve` starts it


PROMPT = tuple(3 + (7 * at) % 200 for at in range(100))  # six whole blocks
OTHER = tuple(3 + (11 * at) % 200 for at in range(120))
ASKS = [RequestSpec(prompt_ids=ids, output_tokens=6) for ids in (PROMPT, OTHER, PROMPT)]


@pytest.fixture
def posing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use CPU tensors posing as a GPU with its own memory, and allow transfers for a model so small
    that recomputing is always cheaper.
    """
    memory = MachineMemory(available_bytes=1 << 30, limit="memory of a test", is_own=True)
    monkeypatch.setattr(TorchExecutorClass, "available_memory", lambda _: memory)
    monkeypatch.setattr(TransferCost, "fetch_pays", lambda *_: True)
    monkeypatch.setattr(TransferCost, "return_ms", lambda *_: (1.0, True))
    return write_tiny_llama(tmp_path / "model", seed=5)


def answered(model: Path, **more: Any) -> tuple[list[tuple[int, ...]], EngineStats]:
    """Return the tokens of ASKS, one after another, in a pool that holds one request."""
    settings: dict[str, Any] = {"executor": "torch", "device": "cpu", "num_threads": 1, **more}
    settings |= {"kv_cache_memory": "36KiB", "max_num_seqs": 1, "max_model_len": 144}

    async def run() -> tuple[list[tuple[int, ...]], EngineStats]:
        async with LocalEngine(str(model), settings) as engine:
            tokens = [(await engine.run([spec]))[0].token_ids for spec in ASKS]
            return tokens, engine.stats

    return asyncio.run(run())


def test_evicted_device_blocks_are_found_in_host_memory(posing: Path) -> None:
    alone, _ = answered(posing)
    got, stats = answered(posing, kv_tier_host_size="1MiB")
    assert got == alone
    assert stats.tier_fetched_blocks_total > 0
    assert stats.prefix_hit_host_tokens_total == 16 * stats.tier_fetched_blocks_total
    assert stats.prefix_hit_disk_tokens_total == 0


def test_a_directory_is_a_tier_of_a_device_too(posing: Path, tmp_path: Path) -> None:
    alone, _ = answered(posing)
    got, stats = answered(posing, kv_tier_path=str(tmp_path / "tier"), kv_tier_size="1MiB")
    assert got == alone
    assert stats.tier_fetched_blocks_total > 0
    assert stats.prefix_hit_disk_tokens_total == 16 * stats.tier_fetched_blocks_total


def test_unavailable_memory_fails_startup_with_a_reason(
    posing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match=r"of the host's memory .* are left .*: give at most"):
        answered(posing, kv_tier_host_size="1024TiB")
    with pytest.raises(SettingError, match=r"a block takes .* bytes: give the tier more"):
        answered(posing, kv_tier_host_size="1KiB")

    def none(_: CpuStream, num_bytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(CpuStream, "host_memory", none)
    with pytest.raises(SettingError, match=r"pinned memory\).*out of memory; lower it, or raise"):
        answered(posing, kv_tier_host_size="1MiB")


def test_a_host_tier_on_cpu_tensors_is_rejected(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", seed=5)
    with pytest.raises(SettingError, match="computes on the CPU, where the KV cache itself"):
        answered(model, kv_tier_host_size="1MiB")
