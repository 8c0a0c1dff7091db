"""Blocks on their way between a device's pool and the host: on a device that does nothing before it
is waited for, in each of its orders of work by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from numpy.typing import NDArray  # noqa: E402

from quire.base.errors import CapacityError  # noqa: E402
from quire.execute.gpu.executor import TorchExecutor  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.gpu.opened import program_of, torch_executor  # noqa: E402
from tests.gpu.slow_stream import SlowStream  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = pytest.mark.gpu

Bytes = NDArray[np.uint8]
NUM_BLOCKS = 12
CACHES = {"f32": DType.F32, "bf16": DType.BF16, "int8": DType.BF16, "fp8": DType.BF16}


class World:
    """An executor whose pool holds random bytes, and what these are by now, said and done."""

    def __init__(self, folder: Path, cache: str = "bf16", *, rows: int) -> None:
        self.stream = SlowStream()
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
        """Rooms on the host."""
        return [*self.executor.host_memory(count * self.size).reshape(count, self.size)]

    def take_out(self, blocks: list[int]) -> tuple[Callable[[], None], list[Bytes]]:
        """Told; what is returned first waits for it."""
        rooms = self.memory(len(blocks))
        return self.executor.export_blocks(np.array(blocks, np.int32), rooms), rooms

    def overwrite(self, source: int, targets: list[int]) -> None:
        """As a step told later does."""
        pairs = np.array([(source, target) for target in targets], np.int32)
        self.executor.copy_blocks(pairs[:, 0], pairs[:, 1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("port") / "odd", seed=5, num_hidden_layers=2)


def test_rows_are_used_when_what_was_told_before_there_were_any_is_done(folder: Path) -> None:
    """Their memory may be what a step before gave back, in the device's own order."""
    world, done = World(folder, rows=2), []
    world.stream.do(lambda: done.append("before"))
    world.executor.begin_moving(2)
    world.executor.import_block(1, world.blocks[0])
    assert done == ["before"]


@pytest.mark.parametrize("cache", CACHES)
def test_blocks_leave_as_they_were_when_that_was_told_and_come_back(
    cache: str, folder: Path
) -> None:
    world = World(folder, cache, rows=4)
    wait, rooms = world.take_out([3, 9, 0])
    world.overwrite(5, [3, 9, 0])
    assert not world.stream.waits
    wait()
    assert np.array_equal(rooms, world.blocks[[3, 9, 0]])
    world.executor.mark()()
    world.executor.import_blocks(np.array([1, 11, 9], np.int32), rooms)
    wait, again = world.take_out([1, 11, 9, 3])
    wait()
    assert np.array_equal(again, [*rooms, world.blocks[5]])


@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_rows_are_written_again_only_when_they_were_read(
    rows: int, steps_first: bool, folder: Path
) -> None:
    """More blocks than rows, again and again, and nothing waits for what was told before; whether
    the device comes to its steps first or to the copies beside them."""
    world = World(folder, rows=rows)
    told = []
    for blocks in ([4, 5, 6, 7, 8], [9], [0, 1, 2, 3], [4, 10]):
        told.append((blocks, *world.take_out(blocks)))
    world.overwrite(11, list(range(11)))
    assert not world.stream.waits
    if steps_first:
        world.executor.mark()()
    for blocks, wait, rooms in told:
        wait()
        assert np.array_equal(rooms, world.blocks[blocks]), blocks
    world.executor.mark()()
    listed = [7, 6, 5, 4, 3, 2]
    world.executor.import_blocks(np.array(listed, np.int32), [*world.blocks[listed]])
    wait, rooms = world.take_out(list(range(NUM_BLOCKS)))
    wait()
    wanted = np.repeat(world.blocks[11:], NUM_BLOCKS, axis=0)
    wanted[listed] = world.blocks[listed]
    assert np.array_equal(rooms, wanted)


def test_nothing_is_on_the_host_before_it_is_waited_for(folder: Path) -> None:
    world = World(folder, rows=4)
    wait, rooms = world.take_out([1, 2])
    before = np.array(rooms)
    assert (before == 0xEE).all()
    wait()
    assert not np.array_equal(rooms, before)


def test_a_cache_made_anew_takes_no_room_that_was_for_another(folder: Path) -> None:
    world = World(folder, rows=4)
    world.executor.allocate_cache(4, 32)
    raw = np.ones(world.executor.block_bytes, np.uint8)
    world.executor.export_block(2, raw)
    assert len(raw) == 2 * world.size
    assert not raw.any()


def test_memory_that_cannot_be_kept_in_place_is_refused_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: SlowStream, num_bytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    world = World(folder, rows=1)
    monkeypatch.setattr(SlowStream, "host_memory", none)
    with pytest.raises(CapacityError, match=r"no 3\.0 MiB of memory .*error: out of memory$"):
        world.executor.host_memory(3 << 20)
