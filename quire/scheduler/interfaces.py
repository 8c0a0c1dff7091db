"""Interfaces through which the scheduler's core meets its extensions.

The core imports nothing of the extension packages except in wiring.py. An extension that is off has
no object, or is not active; then none of its code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request, RequestOutput, StepPlan, StepResult
from quire.base.timeline import WaitReason
from quire.base.token_table import TokenTable
from quire.scheduler.in_flight import InFlightPlans, PlanOutcome
from quire.scheduler.plan_builder import PlanBuilder, Step
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import SequenceGroup, SequenceState
from quire.scheduler.sequence_parts import Prediction


class StepExtension:
    """A feature that takes part in steps; hooks do nothing by default.

    is_active: whether the hooks are called. The extension itself sets it. limits_admission:
    whether `allows_admission` must be called.
    """

    is_active = limits_admission = False

    def begin_step(self, step: Step) -> None:
        """Pause slots, preempt, or add to the plan before running requests advance."""

    def allows_admission(self, step: Step, sequence: SequenceState) -> bool:
        """Return whether `sequence`, and those behind it, may be admitted in this step."""
        return True

    def end_step(self, step: Step) -> None:
        """Add to the plan after waiting requests were admitted."""


class DraftCost(NamedTuple):
    """Predicted milliseconds of a step without drafts, the tokens it yields, and what drafts add.
    added_ms: what 0, 1, 2 ... drafts in all add; row_ms: and each row with drafts besides.
    asked_ms: what a step takes longer for which drafts are asked and not made."""

    step_ms: float
    step_tokens: int
    added_ms: NDArray[np.float64]
    row_ms: float = 0.0
    asked_ms: float = 0.0


class DraftSource(Protocol):
    """Proposes tokens for running requests, by slot (quire.speculative.drafter).

    proposer_name: of the engine's proposer, in metrics. max_drafts: most drafts of a request in one
    step. drafting_ms: milliseconds that computing them took so far, inside `propose`. learns,
    uses_cache: whether `learn` and `note_kv` are called. notes_rests: `note_rest` is called, and
    nothing is asked for a request in the step that admits it: drafts follow from what its steps
    left behind. may_begin_late: `begin` and `end` may come when drafts are asked for next, and not
    at all for a request that has ended by then.
    notes_plain_steps: whether `note_step` is called for steps without drafts, for several at once
    where they are short. rest_steps: in so many further steps nothing is proposed, unless a request
    begins, or `note_step` changes that. asks_predictions_only: of the requests that have begun,
    some bring predictions, and none asks the engine's proposer: a rest is of predictions alone.
    num_proposer_errors, num_errors: errors of proposers, and of other parts; after one of the
    latter nothing is proposed. from_prediction: by slot, whether its last drafts are of the text
    that its request predicts; None: none ever were. plain_ms: is set to what a step without drafts
    and prompts took, after the first ones and some later ones; 0: before.
    """

    proposer_name: str
    max_drafts: int
    drafting_ms: float
    learns: bool
    uses_cache: bool
    notes_rests: bool
    may_begin_late: bool
    notes_plain_steps: bool
    num_proposer_errors: int
    num_errors: int
    from_prediction: Bools | None
    plain_ms: float

    @property
    def rest_steps(self) -> int: ...

    @property
    def asks_predictions_only(self) -> bool: ...

    def begin(self, slot: int, request: Request) -> None:
        """Note that `request` runs in `slot`, from its start or again after a preemption."""

    def learn(self, slot: int, output: Int32s) -> None:
        """Note the output of the request in `slot`, which has ended; `end` follows."""

    def note_kv(self, slots: Index, block_tables: Int32s, capacities: Int32s) -> None:
        """Note the blocks of `slots`, which the next call of `propose` asks for.

        block_tables [slots, columns]. capacities: drafts may be computed at positions before these;
        the blocks that hold them were the slot's in an earlier plan, and nothing else has them.
        """

    def end(self, slot: int) -> None:
        """Note that the request in `slot` has left it."""

    def skips_step(self, tokens: TokenTable, able_slots: Callable[[], Index]) -> bool:
        """Return whether no drafts are proposed in this step; asked once a step, and cheap.

        able_slots: returns the slots that may have drafts in this step, and those that wait for the
        next one as they would have some (`would_propose`); called in some steps only.
        """

    def rested(self, num_steps: int) -> None:
        """Note that so many steps have passed for which `skips_step` was not asked."""

    def note_rest(self, step: int, num_steps: int) -> None:
        """Note that `skips_step` is not asked in the `num_steps` steps after `step`, unless a
        request begins; with 0, that it may be asked in the next one."""

    def note_arrivals(self, num_new: int, num_running: int) -> None:
        """Note that so many requests of those that run have begun: once for each, before or after
        its `begin`; or, with 0 and 1, that one has come while there were none, which may end a
        rest."""

    def takes_plain_step(self) -> bool:
        """Return whether a step without drafts is due, to judge others against it; asked once in a
        step that is not skipped. Where plans overlap, some follow in turn once as many are due."""

    def would_propose(self, tokens: TokenTable, index: Index, limits: Int32s) -> Bools:
        """Return which of slots `index` would get drafts now; computes no model."""

    def propose(
        self, tokens: TokenTable, index: Index, limits: Int32s, cost: Callable[[], DraftCost]
    ) -> tuple[Int32s, Int32s]:
        """Return how many drafts follow the known tokens of slots `index`, at most limits[i] each,
        and the drafts of all, in order. cost: predicts the step's.
        """

    def verified(self, index: Index, drafted: Int32s, accepted: Int32s) -> None:
        """Note that of drafted[i] drafts the first accepted[i] were tokens of the answer."""

    def fail(self, error: Exception) -> None:
        """Note an error in the prices of drafts; report the first. Nothing is proposed from then
        on."""

    def note_step(
        self,
        step_ms: float,
        gained_ms: float | None,
        computed_ms: float,
        num_steps: int = 1,
        added_ms: float = 0.0,
    ) -> None:
        """Note a step that takes about `step_ms` without drafts, and what time its drafts gained:
        those of the last call of `verified`. None: it had none, nor had the `num_steps` steps up to
        it, of which `step_ms` is the mean. computed_ms: computing drafts took so long since the
        last call. added_ms: so much longer the step took for its drafts, which what they gained is
        less by."""


class DraftVerifier(Protocol):
    """Follows rows with drafts (speculation/draft_rows.py)."""

    def verify(self, plan: StepPlan, result: StepResult, outcome: PlanOutcome) -> Any:
        """Compare runs with drafts; return what `advance` takes."""

    def advance(self, verified: Any) -> None:
        """Count accepted positions as computed."""


class Gate(Protocol):
    """A reason for a waiting request to be passed over, though it is its turn.

    It is asked again in the next step, or after the next event where until_event is set, because
    nothing but a request that leaves can end the wait. A request loses no place. reason: what
    timelines call the wait.
    """

    until_event: bool
    reason: WaitReason

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether `sequence` must wait. Must become False once nothing else runs."""


class BlockLoads(Protocol):
    """Loads of blocks from a tier, for waiting requests (admission/kv_loads.py).

    any_used: False while no request has ever waited for one.
    """

    any_used: bool

    def drop(self, sequence: SequenceState) -> None:
        """End the wait of `sequence`."""

    def forget(self, sequence: SequenceState) -> None:
        """Note that `sequence` runs or has ended."""

    def release_kept(self, spared: SequenceState | None = None) -> bool:
        """Give back blocks kept for waiting requests; return whether there were any."""


class Preemption(Protocol):
    """Makes room for running requests (preemption/preemptor.py)."""

    def in_order(self, index: Index) -> Index:
        """Return the places in `index`, slots of running requests, in the order of service."""

    def make_room(self, index: Index, over: Index, needs: Int32s) -> Bools:
        """Preempt for rows `over` of slots `index` that lack needs[i] blocks; return which rows
        may advance."""


class Prompts(Protocol):
    """How much prompts get in a step (prefill/prompt_shares.py)."""

    def allot(
        self,
        step: Step,
        index: Index,
        starts: Int32s,
        wanted: Int32s,
        scored: Bools | None,
        first_waiting: SequenceState | None,
        num_waiting: int,
    ) -> Int32s:
        """Return the tokens of each row; prompts that yield to waiting ones go to step.yielding."""


class Layered(Protocol):
    """A chunk of a prompt computed some layers per step (prefill/layered.py).

    is_active: whether a chunk was allotted layers in this step.
    """

    is_active: bool

    def row(self, index: Index) -> int | None:
        """Return which of slots `index` is computed by layers in this step; None for none."""

    def send(self, builder: PlanBuilder) -> None:
        """Put the allotted layers into the plan."""


class SlotGroups(Protocol):
    """Groups of sequences that run on several slots: beams (beam/beam_groups.py).

    is_active: whether a group runs.
    """

    is_active: bool

    def add(self, sequence: SequenceState) -> SequenceState | None:
        """Add a stream; return the sequence that enters the queue, None if one did before."""

    def allocate_slots(self, first: SequenceState, builder: PlanBuilder) -> list[int]:
        """Give the other members their slots once `first` has its own; return these."""

    def forget(self, group: SequenceGroup) -> None:
        """Note that `group` has ended."""

    def keep_together(
        self, index: Index, steps: NDArray[np.int64], in_flight: InFlightPlans
    ) -> None:
        """Raise steps[i] to the last plan that names any slot of the group of index[i]."""

    def take(
        self, index: Index, rows: Index, result: StepResult, entries: Index | None, now_ms: float
    ) -> Sequence[SequenceGroup]:
        """Take in rows of groups; return the groups that are finished."""

    def outputs(self, group: SequenceGroup, now_ms: float) -> list[RequestOutput]:
        """Return the last outputs of a finished group, one per stream."""


class Returns(Protocol):
    """Counts preempted requests that run again (preemption/preemption_stats.py)."""

    def returned(self, sequence: SequenceState, start: int) -> None:
        """Note that `sequence` computes again from position `start` on."""


class OutputLengths(Protocol):
    """Lengths of answers that ended, and predictions from them (slo/length_history.py).

    ended: requests that ended since the last `learn`, with their number of output tokens.
    """

    ended: list[tuple[Request, int]]

    def learn(self) -> None:
        """Take in what has ended."""

    def predict(self, request: Request, limit: int) -> float:
        """Return the output tokens `request` is likely to have, within `limit` in all."""


class PredictionMargin(Protocol):
    """Learns from predictions and what came of them (slo/safety_margin.py)."""

    def came(self, prediction: Prediction, now_ms: float) -> None:
        """Note that what was predicted has come, or was given up."""
