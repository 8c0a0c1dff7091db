"""TappedRunner: which steps tap layers and keep hidden states, on plans in flight too."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import ModelError
from quire.base.records import StepPlan
from quire.execute.executor import StepMemoryError
from quire.program.batch import ForwardBatch
from quire.runner.model_runner import ModelRunner
from quire.runner.tapped_runner import TappedPipelinedRunner, TappedRunner, Taps
from quire.speculative.hidden_states import HiddenStateRing
from tests.unit.runner.deferred_executor import DeferredExecutor
from tests.unit.runner.plans import BLOCK_SIZE, admission_of, plan_of
from tests.unit.runner.scripted_executor import ScriptedExecutor

NUM_SLOTS, WIDTH = 3, 2
SIZES: dict[str, Any] = {
    "num_slots": NUM_SLOTS,
    "max_model_len": 64,
    "block_size": BLOCK_SIZE,
    "max_samples": 64,
}


class TappingExecutor(ScriptedExecutor):
    """Of two stages, if it is asked. begun: whether the steps begun so far keep taps. Hidden states
    are the number of the batch that has run last."""

    num_stages = 2
    waited_ms = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[bool] = []
        self.fail_next: dict[str, Exception] = {}  # by segment

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        self._fail("trunk")
        super().run_trunk(batch, head_rows=head_rows)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        self._fail("head")
        return super().run_head(batch, first, count)

    def _fail(self, segment: str) -> None:
        if (error := self.fail_next.pop(segment, None)) is not None:
            raise error

    def begin_trunk(self, batch: ForwardBatch) -> None:
        self.begun.append(batch.keeps_taps)

    def output(self, name: str, num_rows: int) -> NDArray[np.float32]:
        return np.full((num_rows, WIDTH), len(self.batches), np.float32)


class TappingDevice(DeferredExecutor):
    """The same as an asynchronous device."""

    def output(self, name: str, num_rows: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._executor.output(name, num_rows)
        return rows


class World:
    """A runner of `kind` with some requests of two tokens. of_layers: see Taps."""

    def __init__(self, kind: str = "plain", *, of_layers: bool = True) -> None:
        self.executor = executor = TappingExecutor()
        self.fail_next = executor.fail_next
        self.ring = HiddenStateRing(32, WIDTH, NUM_SLOTS)
        taps, given = Taps(ring=self.ring, of_layers=of_layers), cast(Any, executor)
        self.runner: ModelRunner
        if kind == "pipelined":
            self.runner = TappedPipelinedRunner(given, taps=taps, **SIZES)
        elif kind == "device":
            device = cast(Any, TappingDevice(executor))
            self.fail_next = device.fail_next
            self.runner = TappedRunner(device, taps=taps, overlap=True, **SIZES)
        else:
            self.runner = TappedRunner(given, taps=taps, overlap=kind == "thread", **SIZES)
        admissions = tuple(admission_of(slot, [1, 2]) for slot in range(NUM_SLOTS))
        rows = [(slot, 0, 2, 1) for slot in range(NUM_SLOTS)]
        blocks = {slot: [2 * slot + 1, 2 * slot + 2] for slot in range(NUM_SLOTS)}
        self.run(plan_of(1, rows, admissions=admissions, blocks=blocks))

    def run(self, plan: StepPlan) -> None:
        self.runner.collect(self.runner.submit(plan))

    @property
    def kept(self) -> list[bool]:
        """Which batches kept taps."""
        return [batch.keeps_taps for batch in self.executor.batches]

    def has(self, slot: int, position: int) -> bool:
        """Whether there is a hidden state."""
        return bool(self.ring.find(np.array([slot]), np.array([position], np.int32))[0] >= 0)


@pytest.mark.parametrize("kind", ["plain", "thread", "pipelined", "device"])
def test_steps_of_a_rest_tap_nothing_and_keep_nothing(kind: str) -> None:
    world = World(kind)
    decodes = [plan_of(step, [(0, step, 1, 1)]) for step in (2, 3, 4)]
    world.run(decodes[0])
    assert [world.has(0, position) for position in range(4)] == [True, True, True, False]
    world.ring.pause(3)
    world.run(decodes[1])
    world.run(decodes[2])
    assert world.kept == [True, True, False, True]
    assert [world.has(0, position) for position in range(6)] == [False] * 4 + [True, False]
    world.runner.close()


@pytest.mark.parametrize("kind", ["plain", "thread", "pipelined", "device"])
@pytest.mark.parametrize("of_layers", [True, False])
def test_the_ring_knows_of_the_first_step_of_a_rest_only(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, of_layers: bool
) -> None:
    world, asked = World(kind, of_layers=of_layers), []
    keeps = world.ring.keeps
    monkeypatch.setattr(
        world.ring, "keeps", lambda step, **given: asked.append(step) or keeps(step, **given)
    )
    world.ring.pause(7)
    for step in range(2, 5):
        world.run(plan_of(step, [(0, step, 1, 1)]))
    world.run(plan_of(5, [(0, 5, 1, 1), (1, 1, 2, 1)]))  # as a prompt computes two positions
    assert world.has(0, 5)
    assert world.has(1, 2)
    for step in range(6, 11):
        world.run(plan_of(step, [(0, step, 1, 1)]))
    assert asked == [2, 5, 6, 8, 9, 10]
    assert not world.has(1, 2), "step 6 put none"
    assert [position for position in range(12) if world.has(0, position)] == [8, 9, 10]
    world.runner.close()


@pytest.mark.parametrize("kind", ["thread", "pipelined", "device"])
def test_a_rest_that_begins_or_ends_later_changes_no_plan_in_flight(kind: str) -> None:
    """That a step rests is decided when its plan is handed in: what computes it may be ahead."""
    world = World(kind)
    handles = []
    for slot, pause in enumerate((0, 9, 0)):
        world.ring.pause(pause)
        handles.append(world.runner.submit(plan_of(2 + slot, [(slot, 2, 1, 1)])))
        if kind == "thread":  # its thread may not have begun yet
            world.runner.collect(handles[-1])
        world.ring.pause(0 if pause else 9)
    if kind != "thread":
        for handle in handles:
            world.runner.collect(handle)
    assert world.kept == [True, True, False, True]
    if kind == "pipelined":
        assert world.executor.begun == world.kept
    # Only the last step has put rows since the one that put none, whatever was begun before it.
    assert [world.has(slot, 2) for slot in range(NUM_SLOTS)] == [False, False, True]
    assert world.ring.num_kept(np.arange(NUM_SLOTS)).tolist() == [0, 0, 1]
    world.runner.close()


def test_what_the_head_reads_is_no_tap_of_the_program() -> None:
    world = World(of_layers=False)
    world.run(plan_of(2, [(0, 2, 1, 1)]))
    assert [world.has(0, position) for position in range(1, 4)] == [True, True, False]
    world.ring.pause(9)
    world.run(plan_of(3, [(0, 3, 1, 1)]))
    assert world.kept == [False] * 3
    assert [world.has(0, position) for position in range(1, 4)] == [False] * 3


@pytest.mark.parametrize("kind", ["plain", "device"])
@pytest.mark.parametrize("of_layers", [True, False])
@pytest.mark.parametrize("lacks", ["trunk", "head"])
def test_parts_of_a_step_that_lacks_memory_keep_nothing(
    kind: str, lacks: str, *, of_layers: bool
) -> None:
    """What was kept of their positions is not found: it may be of rejected drafts."""
    world = World(kind, of_layers=of_layers)
    world.fail_next[lacks] = StepMemoryError("too large")
    world.run(plan_of(2, [(0, 1, 1, 1), (1, 2, 1, 1)]))
    assert world.kept[-2:] == [False, False]
    assert not world.has(0, 1)
    assert not world.has(1, 2)
    world.run(plan_of(3, [(0, 2, 1, 1)]))
    assert world.has(0, 2)


def test_an_executor_without_outputs_is_refused() -> None:
    taps = Taps(ring=HiddenStateRing(2, WIDTH, NUM_SLOTS), of_layers=True)
    with pytest.raises(ModelError, match="hands out no hidden states"):
        TappedRunner(cast(Any, ScriptedExecutor()), taps=taps, **SIZES)
