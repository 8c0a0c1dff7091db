"""Layers of a prompt chunk in a runner's plans: in order, beside rows, or rejected."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import WorkerError
from quire.base.records import PartLayers
from quire.program.batch import ForwardBatch
from tests.unit.runner.plans import admission_of, plan_of, runner_of
from tests.unit.runner.scripted_executor import ScriptedExecutor

NUM_LAYERS = 6


class LayeredScript(ScriptedExecutor):
    """Record what is computed by layers."""

    num_layers = NUM_LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[ForwardBatch, int, int]] = []
        self.fail_next_layers = False

    def run_layers(self, batch: ForwardBatch, first: int, end: int) -> None:
        if self.fail_next_layers:
            self.fail_next_layers = False
            raise MemoryError("no room")
        self.layers.append((batch, first, end))


def layers_of(first: int, end: int, **more: Any) -> PartLayers:
    settings = {"slot": 1, "start": 2, "count": 5, "store_from": 4, "num_layers": NUM_LAYERS}
    return PartLayers(first_layer=first, end_layer=end, **{**settings, **more})


def begun(executor: ScriptedExecutor) -> Any:
    """Return a runner with requests in slots 0 and 1, after the first two layers of the latter's
    chunk.
    """
    runner = runner_of(executor)
    admissions = (admission_of(0, [5, 6]), admission_of(1, list(range(20, 30))))
    plan = plan_of(
        1,
        [(0, 0, 2, True)],
        admissions=admissions,
        blocks={0: [3], 1: [7, 5]},
        layers=layers_of(0, 2),
    )
    return runner, runner.submit(plan)


def test_layers_are_computed_beside_rows_with_the_same_batch_to_the_last() -> None:
    executor = LayeredScript()
    runner, handle = begun(executor)
    assert runner.collect(handle).token_counts.tolist() == [1]
    runner.collect(runner.submit(plan_of(2, [(0, 2, 1, True)], layers=layers_of(2, 3))))
    runner.collect(runner.submit(plan_of(3, [], layers=layers_of(3, 6))))
    assert [(first, end) for _, first, end in executor.layers] == [(0, 2), (2, 3), (3, 6)]
    assert len(executor.batches) == 2, "a plan with layers and no rows runs no trunk"
    batch = executor.layers[0][0]
    assert all(other is batch for other, _, _ in executor.layers)
    assert batch.token_ids.tolist() == [22, 23, 24, 25, 26]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6]
    assert batch.caches[0].kv_slots.tolist() == [
        -1,
        -1,
        20,
        21,
        22,
    ]  # stored from position 4, in block 5
    assert batch.caches[0].block_tables.tolist() == [[7, 5]]
    assert batch.sample_rows.tolist() == []


@pytest.mark.parametrize(
    "wrong",
    [
        layers_of(3, 4),
        layers_of(1, 4),
        layers_of(2, 4, slot=0),
        layers_of(2, 4, start=1),
        layers_of(2, 4, count=4),
    ],
    ids=["a layer left out", "one again", "another slot", "another start", "another count"],
)
def test_layers_out_of_order_are_rejected_and_the_rows_beside_them_succeed(
    wrong: PartLayers,
) -> None:
    executor = LayeredScript()
    runner, handle = begun(executor)
    runner.collect(handle)
    result = runner.collect(runner.submit(plan_of(2, [(0, 2, 1, True)], layers=wrong)))
    assert result.token_counts.tolist() == [1]
    (error,) = result.errors
    assert error.row == 1
    assert "do not follow PartLayers" in error.message
    assert len(executor.layers) == 1


def test_a_chunk_with_failed_layers_is_not_continued() -> None:
    executor = LayeredScript()
    runner, handle = begun(executor)
    runner.collect(handle)
    executor.fail_next_layers = True
    with pytest.raises(MemoryError):
        runner.collect(runner.submit(plan_of(2, [], layers=layers_of(2, 4))))
    (error,) = runner.collect(runner.submit(plan_of(3, [], layers=layers_of(4, 6)))).errors
    assert error.row == 0
    assert "do not follow None" in error.message
    runner.collect(runner.submit(plan_of(4, [], layers=layers_of(0, 6))))
    assert [(first, end) for _, first, end in executor.layers] == [(0, 2), (0, 6)]


def test_an_executor_without_layered_prefill_is_reported() -> None:
    runner, handle = begun(ScriptedExecutor())
    with pytest.raises(WorkerError, match="the scripted executor does not"):
        runner.collect(handle)
