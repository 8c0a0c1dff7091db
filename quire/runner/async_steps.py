"""AsyncSteps: steps of a device beside the host; sampled tokens stay there until they are read.

A step's trunk is launched before the previous step's tokens are on the host: it reads them on the
device. There are three cases for the sampling of a step:

* At once, after the trunk: if it needs only logits, tokens that the host has, and at most one token
  per row that only the device has (penalties count it there).
* When the previous step is finished, while the device computes the trunk: if a row needs tokens
  that the host lacks. These are rows with a grammar, and rows with penalties if three steps are in
  flight. The whole step is sampled then.
* On the host (rare parameters, beams, scores): the overlap ends, and the next step waits for this
  one.

Knows no policy and no device. Invariants: steps are launched, sampled and finished in the order of
submission; a step is launched after the previous one is sampled; `submit` does not block, except
behind a step that ends the overlap and for a plan that copies tokens between slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from quire.base.records import StepPlan, StepResult
from quire.execute.executor import StepMemoryError
from quire.runner.split_step import computed_by_halves
from quire.runner.step_result import no_rows, step_result
from quire.runner.step_run import RunnerResources, StepRun


class AsyncSteps:
    """Steps of one runner. apply: takes a plan over into the tables, before its rows are read.
    make_run: as StepRun."""

    def __init__(
        self,
        resources: RunnerResources,
        apply: Callable[[StepPlan], None],
        make_run: Callable[..., StepRun] = StepRun,
    ) -> None:
        self._resources, self._apply, self._make_run = resources, apply, make_run
        self._out: deque[_Out] = deque()  # not finished, oldest first

    def submit(self, plan: StepPlan) -> _Out:
        """Begin a step; its outcome raises what goes wrong."""
        self._make_way(plan)
        out = _Out(plan, self)
        try:
            self._apply(plan)
            if len(plan.slots):
                knows = not self._out
                out.run = self._make_run(plan, self._resources, knows_tokens=knows, is_late=True)
                out.run.begin()
        except Exception as error:  # noqa: BLE001  raised by the outcome
            out.fail(error)
        self._out.append(out)
        if out.run is not None and not (out.run.reads_tokens and self._out[0] is not out):
            out.choose()
        return out

    def finish(self, last: _Out) -> None:
        """Wait for all steps up to this one, in order; then choose for the next, if it waited."""
        while not last.is_over:
            self._out.popleft().end(self._resources)
            if self._out:
                self._out[0].choose()

    def _make_way(self, plan: StepPlan) -> None:
        if not self._out:
            return
        last = self._out[-1]
        if last.ends_overlap or len(plan.known_slots) or len(plan.branch_from):
            self.finish(last)
        elif last.waits:  # so it is not the oldest
            self.finish(self._out[-2])


class _Out:
    """A step handed in: a Handle."""

    def __init__(self, plan: StepPlan, overlap: AsyncSteps) -> None:
        self.run: StepRun | None = None
        self.is_chosen = self.is_over = False
        self._plan, self._overlap = plan, overlap
        self._lacks_memory = False
        self._result: StepResult | None = None
        self._error: Exception | None = None

    @property
    def ends_overlap(self) -> bool:
        """Whether its tokens are on the host, or nowhere, until it is finished."""
        return self._lacks_memory or (self.run is not None and self.run.is_on_host)

    @property
    def waits(self) -> bool:
        """Whether its tokens are still to be chosen on the device."""
        return not (self.is_chosen or self.ends_overlap or self._error or self.run is None)

    def outcome(self) -> StepResult:
        """Wait for the step; return its result or raise its error."""
        self._overlap.finish(self)
        if self._error is not None:
            raise self._error
        assert self._result is not None, "a finished step has a result or an error"
        return self._result

    def fail(self, error: Exception) -> None:
        """Record a failure; after one for lack of memory, the step may succeed in parts."""
        if isinstance(error, StepMemoryError) and self.run is not None:
            self._lacks_memory = True
        else:
            self._error = error

    def choose(self) -> None:
        """Have its tokens chosen, unless they were, or are chosen on the host."""
        if self.run is None or not self.waits:
            return
        self.is_chosen = True
        try:
            self.run.choose()
        except Exception as error:  # noqa: BLE001  raised by the outcome
            self.fail(error)

    def end(self, resources: RunnerResources) -> None:
        """Wait for it; all steps before it are finished."""
        self.is_over = True
        if self._error is not None:
            return
        if self.run is None:
            self._result = no_rows(self._plan)
            return
        try:
            self._result = self._ended(self.run, resources)
        except Exception as error:  # noqa: BLE001  raised by the outcome
            self._error = error

    def _ended(self, run: StepRun, resources: RunnerResources) -> StepResult:
        computed = None
        if not self._lacks_memory:
            try:
                if not self.is_chosen:
                    run.choose()
                computed = run.computed()
            except StepMemoryError:
                pass  # a part at a time
        if computed is None:
            computed = computed_by_halves(self._plan, resources)
        return step_result(self._plan, resources.tables, computed, run.rows)
