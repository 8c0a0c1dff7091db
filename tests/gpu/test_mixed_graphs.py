"""Replayed mixed steps have the bits of launched steps, in logits and in the KV cache.

Replays use other chunks, rows, tables and positions than the capture. QUIRE_GPU_EXACT_CASES draws
more steps.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bench.gpu.requests import Load, Slots  # noqa: E402
from quire.execute.executor import StepLimits  # noqa: E402
from quire.execute.gpu import attention_steps  # noqa: E402
from quire.execute.gpu.executor import TorchExecutor  # noqa: E402
from quire.execute.gpu.step_buffers import Counts, StepBuffers  # noqa: E402
from quire.execute.gpu.step_sizes import Sizes  # noqa: E402
from quire.program.batch import CacheRows, ForwardBatch  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.runner.model_runner import ModelRunner  # noqa: E402
from tests.gpu.launch_capture import LaunchCapture  # noqa: E402
from tests.gpu.launch_log import launched  # noqa: E402
from tests.gpu.torch_models import (  # noqa: E402
    BLOCK_SIZE,
    program_of,
    reference_executor,
    torch_executor,
)
from tests.models.case import MAX_POSITIONS, VOCAB_SIZE, Case  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LLAMA = Case("llama", {"num_hidden_layers": 1}, seed=3, stored="bf16")
COLUMNS = MAX_POSITIONS // BLOCK_SIZE
SEQUENCES = 4
BLOCKS = SEQUENCES * COLUMNS
NUM_STEPS = int(os.environ.get("QUIRE_GPU_EXACT_CASES", "6"))
TOLERANCE = 0.02


class World:
    """Growing sequences, each with its own table; two are past the first attention piece, so that
    their decode rows are split and merged.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._depths = [0, 3, 260, 255]
        ids = self._rng.permutation(BLOCKS).astype(np.int32)
        self._tables = ids.reshape(SEQUENCES, COLUMNS)

    def step(self, counts: list[int], order: list[int]) -> ForwardBatch:
        """Let sequence order[i] compute counts[i] tokens; the last token samples, except in a
        partial chunk.
        """
        rng, tables = self._rng, self._tables[order]
        owner = np.repeat(np.arange(len(counts)), counts)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        within = np.arange(len(owner)) - starts[:-1][owner]
        positions = (np.array(self._depths)[order][owner] + within).astype(np.int32)
        for sequence, count in zip(order, counts, strict=True):
            self._depths[sequence] += count
        blocks = tables[owner, positions // BLOCK_SIZE]
        samples = [count == 1 or rng.random() < 0.5 for count in counts]
        return ForwardBatch(
            token_ids=rng.integers(0, VOCAB_SIZE, len(owner)).astype(np.int32),
            positions=positions,
            rope_positions=positions,
            caches=(
                CacheRows(
                    kv_slots=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32),
                    block_tables=tables,
                ),
            ),
            seq_starts=starts,
            sample_rows=(starts[1:] - 1)[samples],
        )

    def drawn(self) -> ForwardBatch:
        """Draw sequences, some with one token and at least one with several.

        Mostly at most 16 rows, so that most steps replay the size of an earlier one.
        """
        rng = self._rng
        order = rng.permutation(SEQUENCES)[: rng.integers(1, SEQUENCES + 1)].tolist()
        counts = [int(rng.choice([1, 1, rng.integers(2, 5)])) for _ in order]
        counts[int(rng.integers(len(counts)))] = int(rng.integers(2, 10))
        return self.step(counts, order)


def opened(folder: Path, *params: str, **more: Any) -> TorchExecutor:
    program = program_of(folder, DType.BF16, *params)
    return torch_executor(folder, program, kernels=True, blocks=BLOCKS, max_tokens=64, **more)


def logits_of(executor: Any, batch: ForwardBatch) -> np.ndarray:
    count = len(batch.sample_rows)
    executor.run_trunk(batch, head_rows=count)
    if not count:
        return np.empty(0, np.float32)
    return torch.as_tensor(executor.run_head(batch, 0, count)).float().clone().numpy()


def cache_of(executor: TorchExecutor) -> np.ndarray:
    out = np.empty((BLOCKS, executor.block_bytes), np.uint8)
    executor.export_blocks(np.arange(BLOCKS, dtype=np.int32), list(out))()
    return out


def check_same(captured: TorchExecutor, eager: TorchExecutor, batches: list[ForwardBatch]) -> None:
    for number, batch in enumerate(batches):
        found, right = logits_of(captured, batch), logits_of(eager, batch)
        assert np.array_equal(found, right), f"logits of step {number}"
        assert np.array_equal(cache_of(captured), cache_of(eager)), f"cache after step {number}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("params", "exact"),
    [
        (("none", "auto"), True),
        (("none", "auto"), False),
        (("int8", "int8"), True),
        (("int4-g32", "auto"), True),
        (("fp8", "fp8"), True),
    ],
)
def test_drawn_steps_have_the_bits_of_launched_steps(
    params: tuple[str, str], exact: bool, folder: Path
) -> None:
    capture, world = LaunchCapture(), World(len(params[0]) + exact)
    captured, eager = (
        opened(folder, *params, exact=exact, **more) for more in ({"capture": capture}, {})
    )
    check_same(captured, eager, [world.drawn() for _ in range(NUM_STEPS)])
    assert capture.replayed == captured.steps_replayed >= NUM_STEPS // 2
    assert capture.replayed + capture.captured == NUM_STEPS
    assert eager.steps_replayed == 0


def some_steps(seed: int = 1) -> list[ForwardBatch]:
    """Return steps of one size: captured with few rows, replayed with more, then with fewer."""
    world = World(seed)
    first = replace(world.step([2, 1], [2, 0]), sample_rows=np.array([1, 2], np.int32))
    more = world.step([5, 1, 8, 1], [0, 2, 1, 3])
    more = replace(more, sample_rows=np.array([4, 5, 14], np.int32))
    less = replace(world.step([1, 9], [1, 3]), sample_rows=np.array([0, 8], np.int32))
    return [first, more, less]


def test_replayed_steps_match_the_reference(folder: Path) -> None:
    capture, program = LaunchCapture(), program_of(folder, DType.BF16)
    captured, reference = opened(folder, capture=capture), reference_executor(folder, program)
    reference.allocate_cache(BLOCKS, BLOCK_SIZE)
    for batch in some_steps():
        found, right = logits_of(captured, batch), logits_of(reference, batch)
        assert np.abs(found - right).max() <= TOLERANCE * np.abs(right).max()
    assert (capture.captured, capture.replayed) == (1, 2)


def test_a_replayed_step_launches_nothing_outside_the_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is in the graph; the first step of a size is launched once and captured whole."""
    capture = LaunchCapture()
    executor, batches = opened(folder, capture=capture), some_steps()
    with launched(monkeypatch) as names:
        logits_of(executor, batches[0])
        first = len(names)
        for batch in batches[1:]:
            logits_of(executor, batch)
    # Nine of a layer, wide and narrow tiles, and their merge; six outside the layer.
    assert first == 9 + 2 + 6
    assert len(names) == first
    assert capture.launches == first


def drafted(batch: ForwardBatch) -> ForwardBatch:
    """Sample all rows of a step, as where each sequence has draft tokens."""
    return replace(batch, sample_rows=np.arange(len(batch.token_ids), dtype=np.int32))


def test_rows_with_drafts_are_verified_inside_the_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one size with 10, 13 and 7 sampled rows of three, four and two sequences."""
    capture, world = LaunchCapture(), World(5)
    captured, eager = opened(folder, capture=capture), opened(folder)
    steps = [([4, 1, 5], [2, 0, 1]), ([1, 4, 4, 4], [3, 1, 0, 2]), ([4, 3], [0, 3])]
    batches = [drafted(world.step(counts, order)) for counts, order in steps]
    check_same(captured, eager, batches[:1])
    with launched(monkeypatch) as names:
        found = [logits_of(captured, batch) for batch in batches[1:]]
    assert names == [], "trunk and head are replayed"
    assert (capture.captured, capture.replayed) == (1, 2)
    for batch, logits in zip(batches[1:], found, strict=True):
        assert np.array_equal(logits, logits_of(eager, batch))
    assert np.array_equal(cache_of(captured), cache_of(eager))


def test_a_slice_of_the_head_bounds_what_is_in_the_graph(folder: Path) -> None:
    """Eight sampled rows are two slices of four: the head is computed beside the graph."""
    world = World(6)
    batch = drafted(world.step([4, 4], [0, 1]))
    logits = []
    for more in ({"capture": LaunchCapture()}, {}):
        program = program_of(folder, DType.BF16)
        one = torch_executor(
            folder, program, kernels=True, blocks=BLOCKS, max_tokens=64, max_samples=4, **more
        )
        for _ in range(2):
            one.run_trunk(batch)
            logits.append(
                torch.cat([one.run_head(batch, first, 4).float().clone() for first in (0, 4)])
            )
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_steps_above_the_limit_are_launched_uncaptured(folder: Path) -> None:
    capture = LaunchCapture()
    executor, world = opened(folder, capture=capture), World(2)
    executor.sizes = Sizes(StepLimits(max_tokens=64, max_samples=16, max_sequences=16), mixed=16)
    for _ in range(2):
        executor.run_trunk(world.step([17, 1], [0, 1]))
    assert (capture.captured, capture.replayed) == (0, 0)


def test_separate_logit_rows_are_computed_separately(folder: Path) -> None:
    """As for prompt log-probabilities: several rows of a sequence, in slices."""
    executor, eager = opened(folder, capture=LaunchCapture()), opened(folder)
    world = World(4)
    for counts, order in (([4, 1], [0, 1]), ([3, 3], [1, 0])):
        batch = world.step(counts, order)
        batch = replace(batch, sample_rows=np.arange(len(batch.token_ids), dtype=np.int32))
        logits = []
        for one in (executor, eager):
            one.run_trunk(batch)
            slices = [one.run_head(batch, first, 2).clone() for first in (2, 0)]
            logits.append(torch.cat(slices))
        assert torch.equal(*logits)
    assert executor.steps_replayed == 1


def answers(executor: TorchExecutor, *, overlap: bool) -> dict[int, list[int]]:
    """Return tokens by request, where chunks share steps with rows that have their token only on
    the device.
    """
    load = Load(requests=5, prompt=6, answer=4, running=3, step_tokens=8)
    runner = ModelRunner(
        executor,
        num_slots=3,
        max_model_len=16,
        block_size=BLOCK_SIZE,
        max_samples=3,
        overlap=overlap,
    )
    slots = Slots(load, 1, load.requests, free=deque(range(load.running)))
    tokens: dict[int, list[int]] = {}
    owner: dict[int, int] = {}
    out: deque[tuple[Any, list[int]]] = deque()

    def take() -> None:
        handle, owners = out.popleft()
        for request, token in zip(owners, runner.collect(handle).token_ids, strict=True):
            tokens.setdefault(request, []).append(int(token))

    steps = itertools.count()
    while (plan := slots.plan(next(steps))) is not None:
        slots.advance(plan)
        owner |= {one.slot: int(one.request_id) for one in plan.admissions}
        out.append((runner.submit(plan), [owner[slot] for slot in plan.slots[plan.samples]]))
        if len(out) > overlap:
            take()
    while out:
        take()
    runner.end_thread()
    return tokens


def test_outputs_are_equal_with_tokens_kept_on_the_device(folder: Path) -> None:
    capture = LaunchCapture()
    found = answers(opened(folder, capture=capture), overlap=True)
    right = answers(opened(folder), overlap=False)
    assert [len(found[request]) for request in range(5)] == [4] * 5
    assert found == right
    assert len(set(map(tuple, right.values()))) > 1
    assert capture.replayed > capture.captured


def _stores_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    write = StepBuffers._write

    def stored(buffers: StepBuffers, name: str, values: Any, padded: int, filler: int) -> None:
        write(buffers, name, values, padded, 0 if name == "kv_slots" else filler)

    monkeypatch.setattr(StepBuffers, "_write", stored)


def _plans_unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_steps, "padded", lambda plan, **_: plan)


def _counts_real_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StepBuffers.load

    def loaded(buffers: StepBuffers, batch: ForwardBatch, **more: Any) -> Counts:
        return replace(load(buffers, batch, **more), tokens=len(batch.token_ids))

    monkeypatch.setattr(StepBuffers, "load", loaded)


def _leaves_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the previous step's work items beyond the step's own."""
    pad, kept = attention_steps.padded, {}

    def stale(plan: Any, *, items: int, merges: int) -> Any:
        found = pad(plan, items=items, merges=merges)
        before = kept.setdefault((plan.rows, items), found.items.copy())
        idle = found.items[:, 2] == 0
        found.items[idle] = before[idle]
        kept[plan.rows, items] = found.items.copy()
        return found

    monkeypatch.setattr(attention_steps, "padded", stale)


def _computes_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a PyTorch operation among the launches."""
    launch = TorchExecutor._launch

    def launching(executor: TorchExecutor, segment: str, counts: Counts) -> None:
        launch(executor, segment, counts)
        executor._place.buffers[0].add_(0.0)

    monkeypatch.setattr(TorchExecutor, "_launch", launching)


@pytest.mark.parametrize(
    "fault",
    [_stores_padding, _plans_unpadded, _counts_real_rows, _leaves_items, _computes_beside],
)
def test_injected_faults_are_detected(
    fault: Callable[[pytest.MonkeyPatch], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, captured = opened(folder), opened(folder, capture=LaunchCapture())
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_same(captured, eager, some_steps())
