"""Block transfers between a device pool and the host, on a lazy device, for each of its streams.

The device does nothing until it is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from numpy.typing import NDArray  # noqa: E402

from quire.base.errors import CapacityError  # noqa: E402
from quire.execute.gpu.executor import TorchExecutor  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.gpu.lazy_stream import LazyStream  # noqa: E402
from tests.gpu.torch_models import program_of, torch_executor  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = pytest.mark.gpu

Bytes = NDArray[np.uint8]
NUM_BLOCKS = 12
CACHES = {"f32": DType.F32, "bf16": DType.BF16, "int8": DType.BF16, "fp8": DType.BF16}


class World:
    """An executor with random bytes in its pool, and the bytes expected there."""

    def __init__(self, folder: Path, cache: str = "bf16", *, rows: int) -> None:
        self.stream = LazyStream()
        program = program_of(folder, CACHES[cache], "none", cache)
        self.executor: TorchExecutor = torch_executor(
            folder, program, blocks=NUM_BLOCKS, stream=self.stream
        )
        self.executor.begin_moving(rows)
        self.size = self.executor.block_bytes
        rng = np.random.default_rng(7)
        self.blocks = rng.integers(0, 256, (NUM_BLOCKS, self.size), np.uint8)
        self.executor.import_blocks(np.arange(NUM_BLOCKS, dtype=np.int32), [*self.blocks])
        self.stream.waits.clear()

    def memory(self, count: int) -> list[Bytes]:
        """Return host buffers."""
        return [*self.executor.host_memory(count * self.size).reshape(count, self.size)]

    def take_out(self, blocks: list[int]) -> tuple[Callable[[], None], list[Bytes]]:
        """Submit an export; the returned function waits for it."""
        buffers = self.memory(len(blocks))
        return self.executor.export_blocks(np.array(blocks, np.int32), buffers), buffers

    def overwrite(self, source: int, targets: list[int]) -> None:
        """Overwrite blocks, as a later step does."""
        pairs = np.array([(source, target) for target in targets], np.int32)
        self.executor.copy_blocks(pairs[:, 0], pairs[:, 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("port") / "odd", seed=5, num_hidden_layers=2)


def test_new_row_buffers_wait_for_work_submitted_before_them(folder: Path) -> None:
    """Row buffers may reuse memory that an earlier step freed in the device's own stream order."""
    world, done = World(folder, rows=2), []
    world.stream.do(lambda: done.append("before"))
    world.executor.begin_moving(3)
    world.executor.import_block(1, world.blocks[0])
    assert done == ["before"]


@pytest.mark.parametrize("cache", CACHES)
def test_exports_hold_the_bytes_at_submission_and_import_back(cache: str, folder: Path) -> None:
    world = World(folder, cache, rows=4)
    wait, buffers = world.take_out([3, 9, 0])
    world.overwrite(5, [3, 9, 0])
    assert not world.stream.waits
    wait()
    assert np.array_equal(buffers, world.blocks[[3, 9, 0]])
    world.executor.mark()()
    world.executor.import_blocks(np.array([1, 11, 9], np.int32), buffers)
    wait, again = world.take_out([1, 11, 9, 3])
    wait()
    assert np.array_equal(again, [*buffers, world.blocks[5]])


@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_row_buffers_are_reused_only_after_they_were_read(
    rows: int, steps_first: bool, folder: Path
) -> None:
    """Copy more blocks than rows, repeatedly, without waiting in between; the device runs its steps
    first, or the copies first.
    """
    world = World(folder, rows=rows)
    exports = []
    for blocks in ([4, 5, 6, 7, 8], [9], [0, 1, 2, 3], [4, 10]):
        exports.append((blocks, *world.take_out(blocks)))
    world.overwrite(11, list(range(11)))
    assert not world.stream.waits
    if steps_first:
        world.executor.mark()()
    for blocks, wait, buffers in exports:
        wait()
        assert np.array_equal(buffers, world.blocks[blocks]), blocks
    world.executor.mark()()
    listed = [7, 6, 5, 4, 3, 2]
    world.executor.import_blocks(np.array(listed, np.int32), [*world.blocks[listed]])
    wait, buffers = world.take_out(list(range(NUM_BLOCKS)))
    wait()
    wanted = np.repeat(world.blocks[11:], NUM_BLOCKS, axis=0)
    wanted[listed] = world.blocks[listed]
    assert np.array_equal(buffers, wanted)


def test_no_bytes_reach_the_host_before_a_wait(folder: Path) -> None:
    world = World(folder, rows=4)
    wait, buffers = world.take_out([1, 2])
    before = np.array(buffers)
    assert (before == 0xEE).all()
    wait()
    assert not np.array_equal(buffers, before)


def test_memory_of_the_caller_is_pinned_until_the_executor_is_closed(folder: Path) -> None:
    """As other processes map it: blocks go to and come from its middle."""
    world = World(folder, rows=4)
    memory = np.zeros(4 * world.size, np.uint8)
    world.executor.pin(memory)
    rooms = [*memory.reshape(4, world.size)[1:3]]
    world.executor.export_blocks(np.array([4, 7], np.int32), rooms)()
    assert np.array_equal(rooms, world.blocks[[4, 7]])
    world.executor.import_blocks(np.array([2, 3], np.int32), rooms)
    wait, buffers = world.take_out([2, 3])
    wait()
    assert np.array_equal(buffers, world.blocks[[4, 7]])
    assert (world.stream.pinned_bytes, world.stream.num_unpinned) == ([4 * world.size], 0)
    world.executor.close()
    assert world.stream.num_unpinned == 1


def test_imports_of_several_threads_do_not_share_a_row(folder: Path) -> None:
    world = World(folder, rows=1)
    listed = np.arange(NUM_BLOCKS - 1, dtype=np.int32).reshape(-1, 1)
    assert world.executor._port is not None
    coming = world.executor._port._coming
    copy = coming.copy

    def interrupted(source: torch.Tensor, target: torch.Tensor) -> None:
        copy(source, target)
        time.sleep(0.002)  # the other threads' turn

    coming.copy = interrupted  # type: ignore[method-assign]

    def bring(block: np.ndarray) -> None:
        world.executor.import_blocks(block, [world.blocks[block[0] + 1]])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(bring, listed))
    wait, buffers = world.take_out(listed[:, 0].tolist())
    wait()
    assert np.array_equal(buffers, world.blocks[1:])


def test_staging_rows_only_grow(folder: Path) -> None:
    """A tier and an exchange move blocks of one pool, each as many at once as it says."""
    world = World(folder, rows=4)
    before = world.executor._port
    world.executor.begin_moving(3)
    assert world.executor._port is before
    world.executor.begin_moving(5)
    assert world.executor._port is not before


def test_a_recreated_cache_reuses_no_buffer_of_another(folder: Path) -> None:
    world = World(folder, rows=4)
    world.executor.allocate_cache(4, 32)
    raw = np.ones(world.executor.block_bytes, np.uint8)
    world.executor.export_block(2, raw)
    assert len(raw) == 2 * world.size
    assert not raw.any()


def test_memory_that_cannot_be_pinned_is_rejected_with_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: LazyStream, asked: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    world = World(folder, rows=1)
    for name in ("host_memory", "pin"):
        monkeypatch.setattr(LazyStream, name, none)
    with pytest.raises(CapacityError, match=r"no 3\.0 MiB of memory .*error: out of memory$"):
        world.executor.host_memory(3 << 20)
    with pytest.raises(CapacityError, match=r"no 3\.0 MiB of memory .*error: out of memory$"):
        world.executor.pin(np.empty(3 << 20, np.uint8))
