"""ModelRunner: run the steps of StepPlans on an executor and return their StepResults.

Order within a plan: admissions, table deltas, copies between tiers, block copies, layers of a
prompt's part, trunk (masks of grammars are made beside it); head in slices, with the scores of
prompts; head in slices, with token choice; what ends the answers of beams; append to the token
table. Knows nothing of policy, text or time. Always holds: plans run strictly in the order they
were submitted; a failed row never touches another; what a plan's rows read was put into the mirrors
by this plan or an earlier one, even where computing an earlier one failed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from quire.base.errors import WorkerError
from quire.base.records import StepPlan, StepResult
from quire.execute.executor import AsyncExecutor, Executor, StepMemoryError
from quire.runner.async_steps import AsyncSteps
from quire.runner.batch_builder import KeptRows, KeptSampleBatch
from quire.runner.beam_stops import WatchSource
from quire.runner.grammar_rows import MatcherSource
from quire.runner.handle import Handle
from quire.runner.layered_prefill import LayeredPrefillLost, LayeredPrefillRun
from quire.runner.slot_tables import SlotTables
from quire.runner.split_step import computed_by_halves
from quire.runner.step_result import Computed, no_rows, step_result, without_part
from quire.runner.step_run import RunnerResources, StepRun
from quire.runner.tier_mover import BlockMover


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraints:
    """Sources of what constrains or ends outputs.

    matchers: of the grammars that outputs follow. watches: of the stop strings that end beams.
    jump_ahead: return tokens that a grammar forces at once; None: only with one plan in flight,
    since a later plan already has a row for such a token.
    """

    matchers: MatcherSource | None = None
    watches: WatchSource | None = None
    jump_ahead: bool | None = None


NO_CONSTRAINTS = OutputConstraints()


class ModelRunner:
    """Two-phase: `submit(plan)` then `collect(handle)`, in the same order.

    With `overlap`, the caller can make the next plan while one is computed: by a device that works
    asynchronously (async_steps.py), or by a thread of the runner; else submit computes.
    `max_samples` is the head's largest slice. mover: moves the blocks of plans to a tier and back;
    closed with the runner.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        max_samples: int,
        overlap: bool = False,
        mover: BlockMover | None = None,
        constraints: OutputConstraints = NO_CONSTRAINTS,
    ) -> None:
        self.executor = executor
        jump_ahead = constraints.jump_ahead
        self.tables = SlotTables(
            num_slots=num_slots,
            max_model_len=max_model_len,
            block_size=block_size,
            matchers=constraints.matchers,
            watches=constraints.watches,
            jump_ahead=not overlap if jump_ahead is None else jump_ahead,
        )
        self.mover = mover
        self._resources = RunnerResources(
            executor=executor,
            tables=self.tables,
            rows=KeptRows(self.tables),
            sampling=KeptSampleBatch(self.tables),
            max_samples=max_samples,
        )
        self._part = LayeredPrefillRun(executor, self.tables)
        self._overlap: AsyncSteps | None = None
        self._thread: WorkerThread | None = None
        if overlap and isinstance(executor, AsyncExecutor):
            self._overlap = AsyncSteps(self._resources, self._apply)
        elif overlap:
            self._thread = WorkerThread("quire-runner")

    def submit(self, plan: StepPlan) -> Handle:
        """Hand in the next plan. Never raises for what computing it does; `collect` does."""
        if self._overlap is not None:
            return self._overlap.submit(plan)
        job = WorkerTask(lambda: self._run(plan))
        if self._thread is None:
            job.run()
        else:
            self._thread.put(job)
        return job

    def collect(self, handle: Handle) -> StepResult:
        """Return the result of a plan; raises what the executor raised."""
        return handle.outcome()

    def end_thread(self) -> None:
        """Let plans handed in finish and end the runner's own threads; the executor stays open."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self.mover is not None:
            self.mover.close()
            self.mover = None
        self.tables.grammars.close()

    def close(self) -> None:
        """Let plans handed in finish, end the thread, close the executor."""
        self.end_thread()
        self.executor.close()

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            self._apply(plan)
        except LayeredPrefillLost as error:  # all else of the plan was taken over before
            return without_part(plan, self._rows_result(plan), str(error))
        return self._rows_result(plan)

    def _rows_result(self, plan: StepPlan) -> StepResult:
        if len(plan.slots) == 0:
            return no_rows(plan)
        run = StepRun(plan, self._resources)
        return step_result(plan, self.tables, self._computed(plan, run), run.rows)

    def _computed(self, plan: StepPlan, run: StepRun) -> Computed:
        try:
            run.begin()
            run.choose()
            return run.computed()
        except StepMemoryError:
            return computed_by_halves(plan, self._resources)

    def _apply(self, plan: StepPlan) -> None:
        """Take the plan over, up to its rows."""
        self.tables.apply(plan)
        self._move(plan)
        if len(plan.copy_from):
            self.executor.copy_blocks(plan.copy_from, plan.copy_to)
        if plan.layers is not None:
            self._part.compute(plan.layers)

    def _move(self, plan: StepPlan) -> None:
        """Begin the copies between tiers, before anything is written into what they read."""
        if self.mover is not None:
            if plan.tier_copies is not None:
                self.mover.begin(plan.tier_copies)
            self.mover.wait_for(plan.table_blocks)
        elif plan.tier_copies is not None:
            raise WorkerError(
                f"step {plan.step} moves {len(plan.tier_copies)} blocks to or from a tier and the "
                "runner has none; give it the mover of a tier (a record is replayed with an empty "
                "one)"
            )


class WorkerTask:
    """A call that will have an outcome: what it returned or what it raised."""

    def __init__(self, call: Callable[[], StepResult]) -> None:
        self._call = call
        self._running = threading.Lock()  # held until there is an outcome; cheaper than an Event
        self._running.acquire()
        self._result: StepResult | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Make the call and keep its outcome."""
        try:
            self._result = self._call()
        except Exception as error:  # noqa: BLE001  raised again, in the thread that asks
            self._error = error
        self._running.release()

    def outcome(self) -> StepResult:
        """Wait; then return or raise as the call did."""
        with self._running:
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a finished job has a result or an error"
        return self._result


class WorkerThread:
    """Runs jobs one by one. Not a daemon's queue: close() lets what was put in finish."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[WorkerTask | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, job: WorkerTask) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queue, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
