"""Weights in host memory: answers are those of weights on the device, each step copies each
offloaded layer once, two layers ahead, and no copy meets a product that still reads its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.base.errors import CapacityError, SettingError
from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.config.machine import MachineMemory
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.gpu import offload_plan
from quire.execute.gpu.exchange import ALONE, RankEnds
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.load import load
from quire.execute.gpu.offload import parts_of, to_host
from quire.execute.gpu.offload_plan import (
    SLOTS,
    OffloadPlan,
    OffloadSize,
    matrices_of_layers,
    moved_bytes,
    plan_offload,
)
from quire.execute.gpu.stream import CpuStream
from quire.program.program import Program
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.weights.binding import bind
from quire.weights.checkpoint import open_checkpoint
from tests.gpu.lazy_stream import LazyStream
from tests.gpu.rank_kernels import ByTurns
from tests.gpu.torch_models import CPU, packed_for, program_of, sequence_logits, torch_executor
from tests.rank_threads import on_all_ranks
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu

LAYERS, IDS = 8, list(range(3, 21))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("offload"), seed=7, num_hidden_layers=LAYERS, dtype="bf16"
    )


def first_layers(program: Program, chosen: Sequence[int]) -> OffloadPlan:
    """Return a plan of these layers."""
    layers = list(matrices_of_layers(program))
    sizes = [
        sum(moved_bytes(program.weights[name], is_gpu=False) for name in layers[at])
        for at in chosen
    ]
    return OffloadPlan(
        layers=tuple(layers[at] for at in chosen), copied_bytes=sum(sizes), slot_bytes=max(sizes)
    )


class RecordingStream(CpuStream):
    """Keeps the bytes of each copy."""

    def __init__(self) -> None:
        self.copies: list[int] = []

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.copies.append(source.data_ptr())
        super().copy(source, target)


def offloading(
    folder: Path,
    program: Program,
    plan: OffloadPlan,
    stream: Any,
    *,
    kernels: bool = False,
    ends: RankEnds = ALONE,
) -> TorchExecutor:
    """Return an executor with the layers of a plan in host memory."""
    in_host = {name for layer in plan.layers for name in layer}
    weights = load(
        program,
        bind(program, open_checkpoint(folder)),
        CPU,
        None,
        **packed_for(kernels),
        kept=lambda name, weight: to_host(weight, CpuStream()) if name in in_host else weight,
    )
    executor = TorchExecutor(
        program,
        weights,
        device=CPU,
        exact=True,
        limits=StepLimits(max_tokens=128, max_samples=128, max_sequences=16),
        launch=LaunchOptions(kernels=kernels, stream=stream, offload=plan, ends=ends),
        poison=True,
    )
    executor.allocate_cache(8, 16)
    return executor


@pytest.mark.parametrize(
    ("precision", "kernels"),
    [
        *((precision, False) for precision in ("none", "int8", "int4-g32", "fp8")),
        ("none", True),
        ("int4-g32", True),
    ],
)
def test_answers_are_those_of_weights_on_the_device(
    folder: Path, precision: str, kernels: bool, tmp_path: Path
) -> None:
    ids, layers = IDS, LAYERS
    if precision == "fp8":  # matrices of other columns stay on the device
        wide = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": layers}
        folder = write_tiny_llama(tmp_path, seed=8, dtype="bf16", **wide)
    if kernels:  # Triton's interpreter takes its time
        ids, layers = IDS[:3], SLOTS + 2
        folder = write_tiny_llama(tmp_path, seed=9, dtype="bf16", num_hidden_layers=layers)
    program = replace(program_of(folder, DType.BF16, precision), max_positions=64)
    whole = torch_executor(folder, program, kernels=kernels)
    wanted = sequence_logits(whole, ids, max_positions=64, chunk=10)
    plan = first_layers(program, range(layers))
    executor = offloading(folder, program, plan, None, kernels=kernels)
    for _ in range(2):
        np.testing.assert_array_equal(
            sequence_logits(executor, ids, max_positions=64, chunk=10), wanted
        )


@pytest.mark.parametrize("precision", ["none", "int4-g32"])
def test_kernels_of_two_ranks_have_the_bits_of_weights_on_one_device(
    precision: str, tmp_path: Path
) -> None:
    """Each rank copies the matrices of its own share, beside the exchanges of its layers."""
    layers, heads = SLOTS + 1, {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_tiny_llama(tmp_path, seed=9, dtype="bf16", num_hidden_layers=layers, **heads)
    program = replace(program_of(folder, DType.BF16, precision), max_positions=64)
    whole = torch_executor(folder, program, kernels=True)
    wanted = sequence_logits(whole, IDS[:3], max_positions=64, chunk=2)

    def run(group: InProcessRank) -> tuple[Any, int, int]:
        own = shard(program, degree=2, rank=group.rank)
        plan = first_layers(own, range(layers))
        ends = RankEnds(exchange=ByTurns(group, rank=group.rank, degree=2))
        with ByTurns.turn:
            executor = offloading(folder, own, plan, None, kernels=True, ends=ends)
            stream = executor.layer_stream
            assert stream is not None
            before = stream.copied_bytes
            logits = sequence_logits(executor, IDS[:3], max_positions=64, chunk=2)
            return logits, stream.copied_bytes - before, plan.copied_bytes

    for logits, copied, of_plan in on_all_ranks(InProcessGroup(2, timeout_s=300.0).ranks(), run):
        np.testing.assert_array_equal(logits, wanted, strict=True)
        assert 0 < copied <= 2 * of_plan, "of two steps"


@pytest.mark.parametrize("chosen", [range(LAYERS), (0, 2, 4, 6, 7), (1, 3, 5, 6), (2, 5)])
def test_no_copy_meets_a_product_on_a_device_that_works_beside_the_host(
    folder: Path, chosen: Sequence[int]
) -> None:
    program = replace(program_of(folder, DType.F32), max_positions=64)
    wanted = sequence_logits(torch_executor(folder, program), IDS, max_positions=64, chunk=10)
    stream = LazyStream()
    executor = offloading(folder, program, first_layers(program, chosen), stream)
    for _ in range(2):
        rows = []
        for first in range(0, len(IDS), 10):
            rows.append(sequence_logits_of(executor, stream, IDS[first : first + 10], first))
        np.testing.assert_array_equal(np.concatenate(rows), wanted)


def sequence_logits_of(
    executor: TorchExecutor, stream: LazyStream, ids: list[int], start: int
) -> np.ndarray:
    """Return the logits of a chunk, read behind a mark."""
    from tests.models.generate import sequence_batch

    batch = sequence_batch(ids, start, 64)
    executor.run_trunk(batch, head_rows=len(ids))
    logits = executor.run_head(batch, 0, len(ids))
    stream.mark().wait()
    return torch.as_tensor(logits).clone().numpy()


@pytest.mark.parametrize("count", [SLOTS + 1, 6, LAYERS])
def test_each_step_copies_each_layer_once_in_order_two_ahead(folder: Path, count: int) -> None:
    program = replace(program_of(folder, DType.BF16), max_positions=64)
    plan, stream = first_layers(program, range(count)), RecordingStream()
    executor = offloading(folder, program, plan, stream)
    layers = executor.layer_stream
    assert layers is not None
    filled = layers.copied_bytes
    assert filled == sum(
        moved_bytes(program.weights[name], is_gpu=False)
        for layer in plan.layers[:SLOTS]
        for name in layer
    )
    order = {
        matrix.host.data_ptr(): number
        for number, layer in enumerate(layers._layers)
        for matrix in layer
    }
    # After layer n its place gets layer n + 3, at the end of a step one of the first three; a
    # layer without a successor in its place stays there.
    following = [
        number + SLOTS if number + SLOTS < count else number % SLOTS for number in range(count)
    ]
    following = [after for number, after in enumerate(following) if after != number]
    for _ in range(3):
        stream.copies.clear()
        before = layers.copied_bytes
        sequence_logits(executor, IDS[:5], max_positions=64)
        assert layers.copied_bytes - before == sum(
            moved_bytes(program.weights[name], is_gpu=False)
            for number in following
            for name in plan.layers[number]
        )
        copied = [order[address] for address in stream.copies if address in order]
        assert copied == [number for number in following for _ in plan.layers[number]]


def test_layers_that_have_places_of_their_own_are_copied_once(folder: Path) -> None:
    program = replace(program_of(folder, DType.BF16), max_positions=64)
    executor = offloading(folder, program, first_layers(program, (1, 4)), None)
    assert executor.layer_stream is not None
    before = executor.layer_stream.copied_bytes
    sequence_logits(executor, IDS[:5], max_positions=64)
    assert executor.layer_stream.copied_bytes == before


def test_a_plan_saves_what_is_asked_with_as_few_layers_as_do(folder: Path) -> None:
    program = program_of(folder, DType.BF16)
    one = first_layers(program, (0,)).copied_bytes
    assert plan_offload(program, 0, is_gpu=True) == OffloadPlan()
    plan = plan_offload(program, 1, is_gpu=True)
    assert len(plan.layers) == SLOTS + 1
    assert plan.saved_bytes == plan.copied_bytes - SLOTS * plan.slot_bytes > 0
    layers = list(matrices_of_layers(program))
    assert [layers.index(layer) for layer in plan.layers] == [1, 3, 5, 7]
    assert len(plan_offload(program, plan.saved_bytes + 1, is_gpu=True).layers) == SLOTS + 2
    with pytest.raises(SettingError, match=r"at most .* are saved"):
        plan_offload(program, LAYERS * one, is_gpu=True)


def test_auto_saves_what_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(folder, DType.BF16)
    limits = StepLimits(max_tokens=16, max_samples=16, max_sequences=2)
    plain = TorchExecutorClass(CPU)
    whole = plain.memory_for(program, limits)
    one = first_layers(program, (0,)).copied_bytes
    kv_bytes, reserve = 64 * whole.token_bytes, 256 << 20
    tables = 2 * 64 * 12

    def with_memory(num_bytes: int) -> TorchExecutorClass:
        memory = MachineMemory(available_bytes=num_bytes, limit="a test")
        made = TorchExecutorClass(CPU, offload=OffloadSize(saved_bytes=None, kv_bytes=kv_bytes))
        monkeypatch.setattr(TorchExecutorClass, "available_memory", lambda _: memory)
        return made

    fits = whole.weights_bytes + whole.step_bytes + reserve + kv_bytes + tables
    assert with_memory(fits).memory_for(program, limits) == whole
    tight = with_memory(fits - 2 * one)
    saved = whole.weights_bytes - tight.memory_for(program, limits).weights_bytes
    assert 2 * one <= saved < 4 * one
    executor = tight(program, open_checkpoint(folder), ExecutorOptions(limits=limits))
    assert executor.layer_stream is not None
    assert (
        executor.weights_digest
        == plain(program, open_checkpoint(folder), ExecutorOptions(limits=limits)).weights_digest
    )


def test_more_than_the_host_has_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(folder, DType.BF16)
    limits = StepLimits(max_tokens=16, max_samples=16, max_sequences=2)
    little = MachineMemory(available_bytes=1000, limit="a test")
    monkeypatch.setattr(offload_plan, "machine_memory", lambda: little)
    with pytest.raises(CapacityError, match="are available"):
        TorchExecutorClass(CPU, offload=OffloadSize(saved_bytes=1)).memory_for(program, limits)


def test_runs_of_calls_begin_and_end_with_products() -> None:
    layer_of = {"a": 0, "b": 0, "c": 1}
    weights = [None, "a", None, "b", None, None, "c", None]
    found = parts_of(weights, lambda name: None if name is None else layer_of.get(name))
    assert found == [(None, 0, 1), (0, 1, 4), (None, 4, 6), (1, 6, 7), (None, 7, 8)]
