"""LayeredPrefillRun: a part of a prompt on its way through an executor, some layers a plan.

Knows no other rows. Always holds: layers are computed in order, each once, of the part that was
begun last; layers of another one, or with some left out, are refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.base.errors import WorkerError
from quire.base.records import PartLayers, StepPlan
from quire.execute.executor import Executor, LayeredExecutor
from quire.program.batch import ForwardBatch
from quire.runner.batch_builder import forward_batch, sampled_rows
from quire.runner.slot_tables import SlotTables


class LayeredPrefillLost(WorkerError):
    """A plan's layers have no input: the plan with the layers before them failed after this one was
    submitted. The other rows can be computed."""


class LayeredPrefillRun:
    """Run the layers of large chunks, plan by plan, in the order of the plans."""

    def __init__(self, executor: Executor, tables: SlotTables) -> None:
        self._executor, self._tables = executor, tables
        self._batch: ForwardBatch | None = None
        self._last: PartLayers | None = None

    def compute(self, layers: PartLayers) -> None:
        """Compute the layers of a plan that was applied. Raises LayeredPrefillLost where they do
        not follow the last, WorkerError where the executor computes no layers by themselves."""
        if not isinstance(self._executor, LayeredExecutor):
            raise WorkerError(
                f"a plan computes layers {layers.first_layer} to {layers.end_layer} of a prompt's "
                f"part by themselves; the {self._executor.name} executor does not: take the one "
                "the plan was made for"
            )
        if layers.first_layer == 0:
            self._batch = _batch_of(layers, self._tables)
        elif self._batch is None or not _follows(layers, self._last):
            last, self._last = self._last, None
            raise LayeredPrefillLost(
                f"layers {layers.first_layer} to {layers.end_layer} of positions {layers.start} to "
                f"{layers.start + layers.count} in slot {layers.slot} do not follow {last}"
            )
        assert self._batch is not None, "a part has a batch from its first layers on"
        self._last = None  # nothing to go on with, should this fail
        self._executor.run_layers(self._batch, layers.first_layer, layers.end_layer)
        self._last = layers
        if layers.is_last:
            self._batch = None


def _follows(layers: PartLayers, last: PartLayers | None) -> bool:
    if last is None or last.end_layer != layers.first_layer:
        return False
    return last == replace(layers, first_layer=last.first_layer, end_layer=last.end_layer)


def _batch_of(layers: PartLayers, tables: SlotTables) -> ForwardBatch:
    """Return the part as the only row of a plan."""
    plan = StepPlan(
        step=0,
        slots=np.array([layers.slot], np.int32),
        starts=np.array([layers.start], np.int32),
        counts=np.array([layers.count], np.int32),
        store_from=np.array([layers.store_from], np.int32),
        sample_counts=np.zeros(1, np.int32),
    )
    return forward_batch(plan, tables, sampled_rows(plan, tables))
