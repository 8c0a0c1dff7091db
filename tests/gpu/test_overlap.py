"""Overlapped steps on an asynchronous device with CPU tensors.

The device does nothing until it is waited for, and then only what precedes the mark. Outputs are
those of one step at a time; tests/exact/test_overlap.py draws many more cases on the compiled
kernels. QUIRE_GPU_EXACT_CASES draws more here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quire.base.records import FinishReason  # noqa: E402
from quire.execute.executor import AsyncExecutor, Executor  # noqa: E402
from quire.execute.gpu.last_tokens import LastTokens  # noqa: E402
from quire.execute.gpu.step_buffers import Counts  # noqa: E402
from quire.execute.gpu.stream import CpuStream  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.exact.rig import Model, Stream, run_case  # noqa: E402
from tests.exact.test_overlap import overlapped, plain, with_penalties  # noqa: E402
from tests.exact.workload import VOCAB_SIZE, Case, draw_case  # noqa: E402
from tests.gpu.launch_capture import LaunchCapture  # noqa: E402
from tests.gpu.lazy_stream import LazyStream  # noqa: E402
from tests.gpu.test_exact_answers import MAX_ROWS, NUM_CASES, TorchModel  # noqa: E402
from tests.gpu.test_graphs import decode_batch  # noqa: E402
from tests.gpu.torch_models import BLOCK_SIZE, CPU, program_of, torch_executor  # noqa: E402
from tests.kernels.sampling_cases import assert_same_choice, make_batch  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


class SlowModel(TorchModel):
    """A model on a slow device."""

    stream: LazyStream

    def make_executor(self, num_threads: int) -> Executor:
        self.stream = LazyStream()
        return torch_executor(
            self.folder,
            self.program,
            max_tokens=MAX_ROWS,
            blocks=BLOCK_SIZE,
            stream=self.stream,
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, SlowModel]]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("d2") / "odd", seed=5, num_hidden_layers=1)
    made = TorchModel(folder, DType.F32), SlowModel(folder, DType.F32)
    yield made
    for model in made:
        model.close()


def with_settings(case: Case, **fields: Any) -> Case:
    settings = replace(case.settings, num_threads=1, tier_blocks=0, **fields)
    return replace(case, settings=settings)


def is_cut_short(one: Stream, other: Stream) -> bool:
    """Return whether a stream was aborted, so that its length may differ."""
    return FinishReason.ABORT in (one.finish_reason, other.finish_reason)


@pytest.mark.parametrize("reads_tokens", [False, True])
def test_requests_match_their_run_one_step_at_a_time(
    models: tuple[Model, SlowModel], reads_tokens: bool
) -> None:
    at_once, slow = models
    for number in range(NUM_CASES // 8):
        drawn = draw_case(number, num_models=1, vocab_size=VOCAB_SIZE)
        case = plain(drawn, reads_tokens=reads_tokens)
        wanted = run_case(at_once, with_settings(case, plans_in_flight=1)).streams
        for name, stream in run_case(slow, with_settings(overlapped(case, number))).streams.items():
            other = wanted[name]
            assert stream.error is None
            assert other.error is None
            shorter = min(len(stream.tokens), len(other.tokens))
            if not is_cut_short(stream, other):
                assert len(stream.tokens) == len(other.tokens) == shorter, (number, name)
            assert stream.tokens[:shorter] == other.tokens[:shorter], (number, name)


@pytest.mark.parametrize("has_penalties", [False, True])
def test_a_step_is_waited_for_after_the_next_is_submitted(
    has_penalties: bool, models: tuple[Model, SlowModel]
) -> None:
    _, slow = models
    assert isinstance(slow.executor(1), AsyncExecutor)
    slow.stream.waits.clear()
    drawn = draw_case(0, num_models=1, vocab_size=VOCAB_SIZE)
    drawn = with_penalties(drawn) if has_penalties else plain(drawn, reads_tokens=False)
    outcome = run_case(slow, with_settings(drawn, plans_in_flight=2, max_samples=8))
    waits, steps = slow.stream.waits, sum(len(plan.slots) > 0 for plan, _ in outcome.plans)
    assert len(waits) == steps  # no other waits
    assert sum(behind > 0 for behind in waits) > len(waits) * 0.7


@pytest.mark.parametrize("by_kernels", [False, True])
def test_last_tokens_are_read_from_slots(by_kernels: bool) -> None:
    last = LastTokens(5, CpuStream(), CPU, by_kernels=by_kernels)
    slots, tokens = np.array([3, 0, 4], np.int32), np.array([17, 9, -1], np.int32)
    if by_kernels:
        last.keep(slots, torch.from_numpy(tokens))
    else:
        last.put(slots, tokens)
    ids = torch.arange(100, 108, dtype=torch.int32)
    late = torch.tensor([-1, 3, -1, 0, 4, 1, -1, 3], dtype=torch.int32)
    last.take(ids, late, 7)
    assert ids.tolist() == [100, 17, 102, 9, 0, 0, 106, 107]


def test_a_size_without_memory_for_capture_is_launched() -> None:
    from quire.execute.gpu.graphs import Graphs

    def full(body: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs, done = Graphs(full), []
    for _ in range(3):
        graphs.run(4, lambda: done.append(1))
    assert done == [1, 1, 1]


def test_kernels_read_the_token_sampled_by_earlier_kernels(tmp_path: Path) -> None:
    """Also in captured steps, where padding rows read no token."""
    folder = write_tiny_llama(tmp_path / "tiny", seed=5, num_hidden_layers=1)
    program = program_of(folder, DType.F32)
    late = torch_executor(folder, program, kernels=True, capture=LaunchCapture())
    known = torch_executor(folder, program, kernels=True)
    ids, slots = np.array([3, 4, 5], np.int32), np.array([5, 2, 15], np.int32)
    for depth in range(3):
        batch = decode_batch(ids.tolist(), [depth] * 3)
        of_late = batch if depth == 0 else replace(batch, token_ids=0 * ids, late_slots=slots)
        params = make_batch(3, temperature=[0.0, 1.0, 0.8], num_logprobs=[2, -1, 0])
        logits = []
        for executor, given in ((known, batch), (late, of_late)):
            executor.run_trunk(given, head_rows=3)
            logits.append(executor.run_head(given, 0, 3))
        assert torch.equal(logits[0], logits[1])
        choice = known.sample(logits[0], params)
        assert_same_choice(late.sample_later(logits[1], params, slots)(), choice)
        ids = choice.token_ids


def test_rows_sampled_on_the_host_are_not_sampled_later(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", seed=5, num_hidden_layers=1)
    executor = torch_executor(folder, program_of(folder, DType.F32), kernels=True)
    batch = decode_batch([3, 4], [0, 0])
    executor.run_trunk(batch)
    params = make_batch(2, temperature=1.0, rare={"typical_p": [1.0, 0.5]})
    with pytest.raises(ValueError, match="chosen on the host"):
        executor.sample_later(executor.run_head(batch, 0, 2), params, np.array([0, 1], np.int32))


def test_a_slot_without_a_stored_last_token_is_rejected(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny", seed=5, num_hidden_layers=1)
    executor = torch_executor(folder, program_of(folder, DType.F32))
    batch = replace(decode_batch([3], [0]), late_slots=np.array([16], np.int32))
    with pytest.raises(ValueError, match=r"late_slots\[0\] is 16"):
        executor.run_trunk(batch)


def test_a_step_out_of_memory_is_computed_in_parts(
    models: tuple[Model, SlowModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator fails for every step of more than one sequence."""
    at_once, _ = models
    drawn = plain(draw_case(0, num_models=1, vocab_size=VOCAB_SIZE), reads_tokens=False)
    case = with_settings(drawn, plans_in_flight=1, max_samples=8)
    wanted = run_case(at_once, case).streams
    executor: Any = at_once.executor(1)
    launch, failures = executor._launch, []

    def launch_little(segment: str, counts: Counts) -> None:
        if counts.sequences > 1:
            failures.append(counts.sequences)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        launch(segment, counts)

    monkeypatch.setattr(executor, "_launch", launch_little)
    found = run_case(at_once, case).streams
    assert max(failures) > 2
    assert {name: stream.tokens for name, stream in found.items()} == {
        name: stream.tokens for name, stream in wanted.items()
    }
