"""StepRun: run the rows of one plan on an executor.

`begin` runs the trunk, `choose` the head, scores and token choice, `computed` waits for the
results. With a synchronous executor these calls directly follow each other; with an asynchronous
device, calls of other steps come between. Knows no policy, no text and no
time. Always holds: the tables are read when the executor is called, and never written here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quire.base.records import StepPlan
from quire.execute.executor import AsyncExecutor, Executor
from quire.runner.batch_builder import (
    Index,
    Int32s,
    KeptRows,
    KeptSampleBatch,
    forward_batch,
    num_unknown,
)
from quire.runner.grammar_rows import NO_MASK, Masks
from quire.runner.logprobs import ScoredRows, listed_logprobs, score_prompts, scores_some, stacked
from quire.runner.slot_tables import SlotTables
from quire.runner.step_result import NO_MESSAGES, Computed, joined_choices, no_table
from quire.sampling.batch import TokenChoice

Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerResources:
    """What all steps of a runner share. max_samples: the head's largest slice."""

    executor: Executor
    tables: SlotTables
    rows: KeptRows
    sampling: KeptSampleBatch
    max_samples: int


class StepRun:
    """The run of a plan that was applied and has rows.

    knows_tokens: whether all steps before it are finished. is_late: whether tokens stay on the
    device until they are waited for.
    """

    def __init__(
        self,
        plan: StepPlan,
        resources: RunnerResources,
        *,
        knows_tokens: bool = True,
        is_late: bool = False,
    ) -> None:
        tables = resources.tables
        self.rows = rows = resources.rows.of(plan)
        self.positions = rows.positions(plan)  # [R]
        self._plan, self._resources = plan, resources
        self._scores = tables.num_scoring > 0 and scores_some(plan, tables)
        self.is_on_host = is_late and (self._scores or rows.needs_host)
        # Rows that depend on tokens that are not on the host yet, in more than what the
        # trunk computes. A penalty's last token may be on the device.
        self.reads_tokens = self.is_on_host or rows.has_grammar
        if rows.has_penalty and is_late:
            unknown = num_unknown(rows.slots, self.positions, tables)
            self.reads_tokens |= bool((tables.has_penalty[rows.slots] & (unknown > 1)).any())
        self._is_late = is_late and not self.is_on_host
        self.batch = forward_batch(plan, tables, rows, knows_tokens=knows_tokens)
        self._masks: Future[Masks] | None = None
        self._made = NO_MASK
        self._scored: ScoredRows | None = None
        self._parts: list[tuple[Callable[[], TokenChoice], Float32s]] = []
        self._wait: Callable[[], None] | None = None
        self._knows_tokens = knows_tokens

    def begin(self) -> None:
        """Run the trunk; beside it masks are made, if the tokens before them are known."""
        resources, rows = self._resources, self.rows
        if rows.has_grammar and self._knows_tokens:
            self._masks = resources.tables.grammars.begin(rows.slots, self.positions)
        try:
            at_once = not self._scores and len(rows) <= resources.max_samples
            resources.executor.run_trunk(self.batch, head_rows=len(rows) if at_once else 0)
        finally:
            if self._masks is not None:
                # The masks read the tables, which change only when they are done.
                resources.tables.grammars.wait(self._masks)

    def choose(self) -> None:
        """Score prompts; run the head and choose tokens, at most max_samples rows at a time. What
        reads tokens is chosen when all steps before are finished."""
        resources, rows, most = self._resources, self.rows, self._resources.max_samples
        if rows.has_grammar and not self._knows_tokens:
            self._masks = resources.tables.grammars.begin(rows.slots, self.positions)
        if self._scores:
            self._scored = score_prompts(
                self._plan, self.batch, resources.tables, resources.executor, max_samples=most
            )
        if self._masks is not None:
            resources.tables.grammars.wait(self._masks)
            self._made = self._masks.result()
        num_rows = len(rows)
        if 0 < num_rows <= most:
            self._choose_slice(0, rows.slots, self.positions, self._made)
        else:
            for first in range(0, num_rows, most):
                part = slice(first, min(first + most, num_rows))
                masks = replace(self._made, rows=self._made.rows[part])
                self._choose_slice(first, rows.slots[part], self.positions[part], masks)
        if self._is_late and not self._parts:
            self._wait = cast(AsyncExecutor, resources.executor).mark()

    def computed(self) -> Computed:
        """Return what came of the rows; wait until it is there."""
        if self._wait is not None:
            self._wait()
        choices = [part() for part, _ in self._parts]
        listed = [part for _, part in self._parts]
        is_one = len(choices) == 1
        return Computed(
            scored=self._scored,
            choice=choices[0] if is_one else joined_choices(choices),
            listed=listed[0] if is_one else stacked(listed, np.float32(np.nan)),
            no_mask=self._made.failed,
            has_grammar=len(self._made.rows) > 0,
            broken=NO_MESSAGES if self._scored is None else self._scored.messages,
        )

    def _choose_slice(self, first: int, slots: Index, positions: Int32s, masks: Masks) -> None:
        """Choose the tokens of the sampled positions from `first` on."""
        resources = self._resources
        logits = resources.executor.run_head(self.batch, first, len(slots))
        sampling = resources.sampling.of(slots, positions, masks, is_late=self._is_late)
        if self._is_late:
            later = cast(AsyncExecutor, resources.executor)
            choice = later.sample_later(logits, sampling, slots.astype(np.int32))
            self._parts.append((choice, no_table(len(slots))))
            return
        listed = no_table(len(slots))
        if resources.tables.num_listed:
            listed = listed_logprobs(logits, slots, resources.tables, resources.executor)
        chosen = resources.executor.sample(logits, sampling)
        self._parts.append((lambda: chosen, listed))
