"""Captured decode steps: when steps are captured, and that padding rows have no effect.

Mixed steps are in test_mixed_graphs.py, step sizes in test_step_sizes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.execute.gpu.executor import TorchExecutor  # noqa: E402
from quire.execute.gpu.graphs import Graphs  # noqa: E402
from quire.program.batch import CacheRows, ForwardBatch  # noqa: E402
from quire.program.taps import TAPS, with_taps  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.sampling import reference  # noqa: E402
from quire.sampling.batch import SampleBatch  # noqa: E402
from quire.sampling.parts import LogitBias, NoiseKeys, RaggedIds, Truncation  # noqa: E402
from tests.gpu.launch_capture import LaunchCapture  # noqa: E402
from tests.gpu.torch_models import BLOCK_SIZE, program_of, torch_executor  # noqa: E402
from tests.models.case import Case  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

COLUMNS = 4
LLAMA = Case("llama", {"num_hidden_layers": 1}, seed=3, stored="bf16")


class Recorder:
    """A capture that stores functions and counts replays."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            body()

        return replay


def test_a_size_is_run_then_captured_then_replayed_until_reset() -> None:
    recorder, done = Recorder(), []
    graphs = Graphs(recorder)
    for _ in range(3):
        graphs.run(4, lambda: done.append("body"))
    graphs.run((4, True), lambda: done.append("other"))
    assert done == ["body", "body", "body", "other"]
    assert (recorder.captured, recorder.replayed) == (2, 2)
    graphs.clear()
    graphs.run(4, lambda: done.append("new"))
    assert recorder.captured == 3


def decode_batch(ids: list[int], depths: list[int]) -> ForwardBatch:
    """Return a decode step of several sequences, at some depth of their own block tables."""
    count = len(ids)
    positions = np.array(depths, np.int32)
    tables = np.arange(count * COLUMNS, dtype=np.int32).reshape(count, COLUMNS)[:, ::-1].copy()
    blocks = tables[np.arange(count), positions // BLOCK_SIZE]
    return ForwardBatch(
        token_ids=np.array(ids, np.int32),
        positions=positions,
        rope_positions=positions,
        caches=(
            CacheRows(kv_slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE, block_tables=tables),
        ),
        seq_starts=np.arange(count + 1, dtype=np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
    )


def _steps(executor: TorchExecutor, counts: list[int]) -> list[np.ndarray]:
    found = []
    for depth, count in enumerate(counts):
        batch = decode_batch([3 + depth + 7 * row for row in range(count)], [depth] * count)
        executor.run_trunk(batch, head_rows=count)
        found.append(torch.as_tensor(executor.run_head(batch, 0, count)).clone().numpy())
    return found


def test_replayed_steps_have_the_bits_of_launched_steps(tmp_path: Path) -> None:
    folder, recorder = LLAMA.write(tmp_path), LaunchCapture()
    program = program_of(folder, DType.BF16)
    counts = [5, 6, 7, 3, 1, 1]
    captured = torch_executor(folder, program, kernels=True, capture=recorder)
    found = _steps(captured, counts)
    right = _steps(torch_executor(folder, program, kernels=True), counts)
    assert all(np.array_equal(one, other) for one, other in zip(found, right, strict=True))
    assert recorder.captured == 3  # of 8, 4 and 1
    assert recorder.replayed == 3


def test_tokens_are_sampled_on_the_device(tmp_path: Path) -> None:
    folder = LLAMA.write(tmp_path)
    executor = torch_executor(folder, program_of(folder, DType.BF16), kernels=True)
    batch = decode_batch([3, 4, 5], [0, 0, 0])
    executor.run_trunk(batch)
    logits = executor.run_head(batch, 0, 3)
    assert isinstance(logits, torch.Tensor)
    params = SampleBatch(
        positions=np.ones(3, np.int32),
        temperature=np.array([0, 1, 0.7], np.float32),
        noise=NoiseKeys(seeds=np.array([1, 2, 3], np.int64), streams=np.zeros(3, np.int32)),
        truncation=Truncation(
            top_k=np.array([0, 5, 0], np.int32),
            top_p=np.array([1, 0.9, 1], np.float32),
            min_p=np.zeros(3, np.float32),
        ),
        logit_bias=LogitBias(
            tokens=RaggedIds(np.array([0, 1, 1, 1], np.int32), np.array([9], np.int32)),
            values=np.array([30.0], np.float32),
        ),
        num_logprobs=np.array([2, -1, 0], np.int32),
    )
    found, right = executor.sample(logits, params), reference.choose(logits.numpy(), params)
    assert found.token_ids.tolist() == right.token_ids.tolist()
    assert found.token_ids[0] == 9
    assert np.array_equal(found.top_ids, right.top_ids)
    np.testing.assert_array_equal(found.logprobs, right.logprobs)
    np.testing.assert_array_equal(found.top_logprobs, right.top_logprobs)


def test_steps_that_keep_taps_and_those_that_keep_none_are_captured_apart(tmp_path: Path) -> None:
    """With equal logits; a step that keeps none launches no copy of a layer."""
    folder = LLAMA.write(tmp_path)
    plain = program_of(folder, DType.BF16)
    tapped, recorder = with_taps(plain, (0,)), LaunchCapture()
    right = _steps(torch_executor(folder, plain, kernels=True), [3] * 6)
    captured = torch_executor(folder, tapped, kernels=True, capture=recorder)
    launches = []
    for depth, keeps_taps in enumerate((True, False, True, False, True, False)):
        batch = decode_batch([3 + depth + 7 * row for row in range(3)], [depth] * 3)
        batch = replace(batch, keeps_taps=keeps_taps)
        captured.run_trunk(batch, head_rows=3)
        logits = torch.as_tensor(captured.run_head(batch, 0, 3)).numpy()
        assert np.array_equal(logits, right[depth])
        taps = captured.output(TAPS, 3)
        assert (taps == captured.output("hidden", 3)).all() == keeps_taps
        launches.append(recorder.launches)
    assert (recorder.captured, recorder.replayed) == (2, 4)
    assert launches[0] == launches[1] + 1


def test_plain_tensors_are_tapped_in_steps_that_keep_taps(tmp_path: Path) -> None:
    folder = LLAMA.write(tmp_path)
    executor = torch_executor(folder, with_taps(program_of(folder, DType.BF16), (0,)))
    found = []
    for keeps_taps in (True, False):
        batch = replace(decode_batch([3, 4], [0, 0]), keeps_taps=keeps_taps)
        executor.run_trunk(batch, head_rows=2)
        found.append(np.array(executor.run_head(batch, 0, 2)))
        taps = executor.output(TAPS, 2)
        assert (taps == executor.output("hidden", 2)).all() == keeps_taps
    assert np.array_equal(*found)
