"""Weight upload to an asynchronous device: staging buffers are reused only after they were read.

The device does nothing until it is waited for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quire.execute.gpu.load import load  # noqa: E402
from quire.execute.gpu.stream import CpuStream, Stream  # noqa: E402
from quire.execute.gpu.upload import MIN_THREAD_BYTES, Upload  # noqa: E402
from quire.execute.quantized_weights import read_f32  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.weights.binding import bind  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.gguf_convert import write_gguf_of  # noqa: E402
from tests.gpu.lazy_stream import LazyStream  # noqa: E402
from tests.gpu.torch_models import CPU, program_of  # noqa: E402
from tests.models.case import Case  # noqa: E402
from tests.models.cases_experts import QWEN3_MOE  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("make", [CpuStream, LazyStream])
@pytest.mark.parametrize("sizes", [[1, 100, 64, 65, 63, 1], [3 * MIN_THREAD_BYTES + 7]])
def test_uploads_of_any_size_arrive_complete(make: type[Stream], sizes: list[int]) -> None:
    stream, rng = make(), np.random.default_rng(3)
    raws = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    for raw in raws:
        raw.setflags(write=False)  # as mapped files are
    targets = [torch.zeros(len(raw), dtype=torch.uint8) for raw in raws]
    with Upload(stream, room_bytes=max(sizes) // 2 + 5) as upload:
        for raw, target in zip(raws, targets, strict=True):
            upload.copy(raw, target)
    for raw, target in zip(raws, targets, strict=True):
        assert np.array_equal(target.numpy(), raw)


def test_only_a_reused_staging_buffer_is_waited_for() -> None:
    stream = LazyStream()
    target = torch.zeros(60, dtype=torch.uint8)
    with Upload(stream, room_bytes=20) as upload:
        upload.copy(np.arange(40, dtype=np.uint8), target[:40])
        assert stream.waits == []
        upload.copy(np.arange(20, dtype=np.uint8), target[40:])
        assert stream.waits == [1]  # for the first, while the second was still pending
        assert np.array_equal(target[:20].numpy(), np.arange(20))


@pytest.mark.parametrize("precision", ["none", "int8"])
def test_weights_and_digest_are_equal_through_an_asynchronous_device(
    precision: str, tmp_path: Path
) -> None:
    folder = write_tiny_llama(tmp_path, seed=5, dtype="bf16", num_hidden_layers=2)
    program = program_of(folder, DType.BF16, precision)
    loaded = [
        load(program, bind(program, open_checkpoint(folder)), CPU, None, stream=stream)
        for stream in (CpuStream(), LazyStream())
    ]
    first, second = loaded
    assert first.digest == second.digest
    assert first.plain.keys() == second.plain.keys()
    for name, held in first.plain.items():
        assert torch.equal(held, second.plain[name])
    assert first.few.keys() == second.few.keys()
    if precision == "int8":
        for name, held in first.few.items():
            assert torch.equal(held.values, second.few[name].values)


def test_stacked_experts_are_loaded_by_the_rows_of_each(tmp_path: Path) -> None:
    """In a GGUF file the experts of a layer are one tensor [experts, rows, columns]."""
    folder = Case("experts", seed=5, stored="bf16", base=QWEN3_MOE).write(tmp_path / "checkpoint")
    path = write_gguf_of(folder, tmp_path / "m.gguf", kind="BF16")
    program = program_of(path, DType.BF16, "none")
    binding = bind(program, open_checkpoint(path))
    loaded = load(program, binding, CPU, None)
    for weight in (one for one in program.weights.values() if one.experts):
        found = loaded.plain[weight.name].float().numpy()
        assert np.array_equal(found, read_f32(weight, binding))
