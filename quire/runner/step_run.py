"""StepRun: the rows of one plan on their way through an executor: begun, chosen, finished.

`begin` has the trunk computed, `choose` the head, scores and tokens, `computed` waits for what came
of it. With a synchronous executor these calls directly follow each other; with an asynchronous
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
    KeptSampleBatch,
    forward_batch,
    num_unknown,
    sampled_positions,
)
from quire.runner.grammar_rows import NO_MASK, Masks
from quire.runner.logprobs import ScoredRows, listed_logprobs, score_prompts, scores_some, stacked
from quire.runner.slot_tables import SlotTables
from quire.runner.step_result import Computed, joined_choices
from quire.sampling.batch import TokenChoice

Float32s = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerResources:
    """What all steps of a runner share. max_samples: the head's largest slice."""

    executor: Executor
    tables: SlotTables
    sampling: KeptSampleBatch
    max_samples: int


class StepRun:
    """Of a plan that was applied and has rows. knows_tokens: whether all steps before it are
    finished; is_late: whether tokens stay on the device until they are waited for."""

    def __init__(
        self,
        plan: StepPlan,
        means: RunnerResources,
        *,
        knows_tokens: bool = True,
        is_late: bool = False,
    ) -> None:
        tables = means.tables
        self.slots = np.repeat(plan.slots, plan.sample_counts)  # [R]
        self.positions = sampled_positions(plan, plan.starts + plan.counts)  # [R]
        self.tenancy = tables.tenancy[self.slots]
        self._plan, self._means = plan, means
        self._scores = tables.num_scoring > 0 and scores_some(plan, tables)
        self._has_grammar = bool(tables.grammars.has[self.slots].any())
        # Rows that need logits or a state on the host.
        self.is_on_host = is_late and (
            self._scores
            or bool(tables.has_listed[self.slots].any())
            or bool(tables.rare.uses[self.slots].any())
            or bool(tables.num_candidates[self.slots].any())
        )
        # Rows that depend on tokens that are not on the host yet, in more than what the
        # trunk computes. A penalty's last token may be on the device.
        unknown = num_unknown(self.slots, self.positions, tables)
        self.reads_tokens = (
            self.is_on_host
            or bool((tables.has_penalty[self.slots] & (unknown > 1)).any())
            or self._has_grammar
        )
        self._is_late = is_late and not self.is_on_host
        self._batch = forward_batch(plan, tables, knows_tokens=knows_tokens)
        self._masks: Future[Masks] | None = None
        self._made = NO_MASK
        self._scored: ScoredRows | None = None
        self._parts: list[tuple[Callable[[], TokenChoice], Float32s]] = []
        self._wait: Callable[[], None] | None = None
        self._knows_tokens = knows_tokens

    def begin(self) -> None:
        """The trunk; beside it masks are made, where the tokens before them are known."""
        means = self._means
        if self._has_grammar and self._knows_tokens:
            self._masks = means.tables.grammars.begin(self.slots, self.positions)
        try:
            at_once = not self._scores and len(self.slots) <= means.max_samples
            means.executor.run_trunk(self._batch, head_rows=len(self.slots) if at_once else 0)
        finally:
            if self._masks is not None:
                self._masks.exception()  # it reads the tables: they change only when it is done

    def choose(self) -> None:
        """Scores of prompts; the head and token choice, at most max_samples rows at a time. What
        reads tokens is chosen when all steps before are finished."""
        means, most = self._means, self._means.max_samples
        if self._has_grammar and not self._knows_tokens:
            self._masks = means.tables.grammars.begin(self.slots, self.positions)
        if self._scores:
            self._scored = score_prompts(
                self._plan, self._batch, means.tables, means.executor, max_samples=most
            )
        if self._masks is not None:
            self._made = self._masks.result()
        for first in range(0, len(self.slots), most):
            self._choose_slice(first, min(most, len(self.slots) - first))
        if self._is_late and not self._parts:
            self._wait = cast(AsyncExecutor, means.executor).mark()

    def computed(self) -> Computed:
        """What came of the rows, when it is there."""
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
        )

    def _choose_slice(self, first: int, count: int) -> None:
        """Of rows that sample, from `first` on."""
        means, rows = self._means, slice(first, first + count)
        slots, masks = self.slots[rows], self._made
        if count < len(self.slots):
            masks = replace(masks, rows=masks.rows[rows])
        logits = means.executor.run_head(self._batch, first, count)
        positions = self.positions[rows]
        sampling = means.sampling.of(slots, positions, masks, is_late=self._is_late)
        listed = np.empty((count, 0), np.float32)
        if self._is_late:
            later = cast(AsyncExecutor, means.executor)
            self._parts.append((later.sample_later(logits, sampling, slots), listed))
            return
        if means.tables.num_listed:
            listed = listed_logprobs(logits, slots, means.tables, means.executor)
        choice = means.executor.sample(logits, sampling)
        self._parts.append((lambda: choice, listed))
