"""Use of PyTorch's streams and graphs, on a fake GPU.

The tests check which device and stream are current at each launch, and after a failed capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor  # noqa: E402

from quire.execute.gpu.graphs import CudaCapture, Graphs  # noqa: E402
from quire.execute.gpu.stream import CpuStream, GpuStream  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.sampling.scoring import ScoreBatch  # noqa: E402
from tests.gpu.test_graphs import LLAMA, Recorder, decode_batch  # noqa: E402
from tests.gpu.torch_models import program_of, torch_executor  # noqa: E402
from tests.kernels.sampling_cases import make_batch  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SECOND = torch.device("cuda", 1)


class Watched(CpuStream):
    """Record whether a launching thread has selected its device and stream."""

    def __init__(self) -> None:
        self.open = 0

    @contextmanager
    def here(self) -> Iterator[None]:
        self.open += 1
        yield
        self.open -= 1

    def do(self, call: Callable[[], None]) -> None:
        with self.here():
            call()


def test_every_kernel_is_launched_on_the_executors_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stream, lost = LLAMA.write(tmp_path), Watched(), []
    launch = GridExecutor.__call__

    def watched(self: GridExecutor, *arguments: Any, **named: Any) -> Any:
        if not stream.open:
            lost.append(self.fn.__name__)
        return launch(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", watched)
    executor = torch_executor(
        folder,
        program_of(folder, DType.BF16),
        kernels=True,
        capture=Recorder(),
        stream=stream,
    )
    params = make_batch(2, temperature=[0.0, 1.0], num_logprobs=[2, -1])
    slots = np.array([1, 0], np.int32)
    for depth in range(2):
        batch = decode_batch([3, 4], [depth] * 2)
        executor.run_trunk(batch, head_rows=2)
        logits = executor.run_head(batch, 0, 2)
        executor.sample(logits, params)
        executor.sample_later(logits, params, slots)()
        executor.score(
            logits,
            ScoreBatch(
                targets=np.array([1, 2], np.int32),
                num_top=np.array([1, 0], np.int32),
                listed_starts=np.array([0, 1, 1], np.int32),
                listed_ids=np.array([5], np.int32),
            ),
        )
    executor.copy_blocks(np.array([0], np.int32), np.array([1], np.int32))
    assert lost == []


class FakeCuda:
    """The streams and captures of torch.cuda. current: the thread's device and stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: tuple[int, Any] = (0, None)
        self.fails_at_end = False
        self.captured_in: list[tuple[int, Any]] = []
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("own", device.index))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))

    @contextmanager
    def _set(self, now: tuple[int, Any]) -> Iterator[None]:
        before, self.current = self.current, now
        try:
            yield
        finally:
            self.current = before

    def _device(self, device: torch.device) -> Any:
        return self._set((device.index, None))

    def _stream(self, stream: tuple[str, int]) -> Any:
        return self._set((stream[1], stream))


class Graph:
    def __init__(self, card: FakeCuda) -> None:
        self.card = card

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads copy blocks during capture"
        self.card.captured_in.append(self.card.current)

    def capture_end(self) -> None:
        if self.card.fails_at_end:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )

    def replay(self) -> None:
        self.card.captured_in.append(("replayed", self.card.current))


def test_launches_go_to_the_streams_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card, seen = FakeCuda(monkeypatch), []
    GpuStream(SECOND).do(lambda: seen.append(card.current))
    GpuStream(SECOND, ("own", 1)).do(lambda: seen.append(card.current))
    assert seen == [(1, None), (1, ("own", 1))]
    assert card.current == (0, None)


@dataclass
class FakeRuntime:
    """The calls of the CUDA runtime that pin memory, which answer `code`."""

    card: FakeCuda
    code: int = 0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("pin", address, num_bytes, flags, self.card.current[0]))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unpin", address, self.card.current[0]))
        return self.code

    def cudaGetErrorString(self, code: int) -> str:
        return f"the words of {code}"


def test_memory_of_the_caller_is_pinned_on_the_streams_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(FakeCuda(monkeypatch))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = torch.zeros(100, dtype=torch.uint8)
    address, part = memory.data_ptr(), memory[20:]
    unpin = GpuStream(SECOND).pin(part)
    assert runtime.calls == [("pin", address + 20, 80, 0, 1)]
    unpin()
    assert runtime.calls[1:] == [("unpin", address + 20, 1)]
    runtime.code = 2
    with pytest.raises(RuntimeError, match=r"^CUDA error: the words of 2$"):
        GpuStream(SECOND).pin(memory)


def test_a_capture_has_its_own_stream_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCuda(monkeypatch)
    graphs, done = Graphs(CudaCapture(SECOND)), []
    for _ in range(3):
        graphs.run(4, lambda: done.append(card.current))
    assert done == [(0, None), (1, ("own", 1))]  # the step itself, and the capture
    assert card.captured_in[1:] == [("replayed", (0, None))] * 2


def test_a_failed_capture_costs_no_step_and_restores_the_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = FakeCuda(monkeypatch)
    card.fails_at_end = True
    graphs, done = Graphs(CudaCapture(SECOND)), []
    for _ in range(3):
        graphs.run(4, lambda: done.append(card.current))
        assert card.current == (0, None)
    assert done == [(0, None), (1, ("own", 1)), (0, None), (0, None)]
    assert "previous error during capture" in graphs.trouble
    assert "kernel by kernel" in capsys.readouterr().err


def test_a_capture_on_a_lost_device_raises() -> None:
    def lost(body: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        Graphs(lost).run(4, lambda: None)
