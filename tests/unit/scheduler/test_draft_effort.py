"""The host's work in steps of requests that speculate, in calls of Python and C functions."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.rare_records import Speculation
from quire.base.records import NO_INTS, Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.cache.manager import CacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation.draft_prices import DraftPrices
from quire.scheduler.speculation.draft_rows import NOTED_MS
from quire.speculative.control import AdaptiveControl, Control, FixedControl, StepCost
from quire.speculative.draft_balance import MAX_STEPS, DraftBalance
from quire.speculative.drafter import Drafter
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import CostlyProposer, Drafts, LookupProposer

Int32s = NDArray[np.int32]
TOKEN, MAX_DRAFTS, NUM_TURNS = 7, 4, 128


class Repeats(LookupProposer):
    """Proposes the token that every position gets; or finds nothing."""

    name = "repeats"

    def __init__(self, *, finds: bool) -> None:
        self._finds = finds
        self.asked = 0

    def begin(self, slot: int, request: Request) -> None:
        pass

    def end(self, slot: int) -> None:
        pass

    def may_find(self, tokens: TokenTable) -> bool:
        return self._finds

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s, drafts: Drafts
    ) -> None:
        self.asked += 1
        if self._finds:
            drafts.ids[:] = TOKEN
            drafts.counts[:] = limits


class Case:
    """A scheduler of `running` requests. drafts_ms: what a step takes longer if it has drafts.
    counts: whether calls are counted. accepts: whether drafts are right. spare: slots of further
    requests. limits: further ones of the scheduler."""

    step_ms, drafts_ms, counts, accepts, spare = 1.0, 0.0, True, True, 0
    limits: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        running: int,
        proposer: Repeats | None,
        control: Control | None = None,
        *,
        step_ms: float = step_ms,
    ) -> None:
        self.step_ms = step_ms
        source, num_slots = None, running + self.spare
        if proposer is not None:
            source = Drafter(
                proposer,
                PredictionProposer(num_slots),
                AdaptiveControl(num_slots, MAX_DRAFTS) if control is None else control,
                num_slots=num_slots,
                max_drafts=MAX_DRAFTS,
                vocab_size=100,
                report=lambda what, **fields: None,
            )
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=num_slots,
                max_num_batched_tokens=8192,
                max_model_len=4096,
                **self.limits,
            ),
            CacheManager(num_slots * 256, 16, prefix_caching=True),
            FirstCome(),
            draft_source=source,
        )
        self.now_ms, self.calls, self.num_rows, self.num_drafts = 0.0, 0, 0, 0
        self.num_tokens = 0
        self._costly = proposer if isinstance(proposer, CostlyProposer) else None
        self.num_added = self.num_ended = 0
        for number in range(running):
            self.add([number, TOKEN, TOKEN], max_total_tokens=4000)
        for _ in range(4):
            self.turn()

    def add(self, prompt: list[int], *, max_total_tokens: int) -> None:
        self.num_added += 1
        self.scheduler.add(
            Request(
                request_id=f"r{self.num_added}",
                group_id=f"r{self.num_added}",
                stream=0,
                prompt_ids=np.array(prompt, np.int32),
                sampling=SamplingParams(seed=1),
                stop_ids=(),
                max_total_tokens=max_total_tokens,
                arrival_ms=0.0,
                speculation=Speculation(
                    max_drafts=MAX_DRAFTS, uses_proposer=True, prediction_ids=NO_INTS
                ),
            )
        )

    def turn(self) -> None:
        before_ms = 0.0 if self._costly is None else self._costly.drafting_ms
        plan = self._counted(lambda: self.scheduler.schedule(self.now_ms))
        assert isinstance(plan, StepPlan)
        if self._costly is not None:
            self.now_ms += self._costly.drafting_ms - before_ms
        self.compute(plan)

    def compute(self, plan: StepPlan) -> None:
        """Let a plan's step take its time, and give the scheduler its result."""
        self.now_ms += self.step_ms + (plan.draft_ids.size > 0) * self.drafts_ms
        counts, token = plan.sample_counts, TOKEN
        if not self.accepts:
            counts, token = np.minimum(counts, np.int32(1)), TOKEN + 1
        result = StepResult(
            step=plan.step, token_counts=counts, token_ids=np.full(counts.sum(), token, np.int32)
        )
        outputs = self._counted(lambda: self.scheduler.update(plan, result, self.now_ms))
        self.num_ended += sum(output.finish_reason is not None for output in outputs)
        self.num_rows += len(plan.slots)
        self.num_drafts += plan.draft_ids.size
        self.num_tokens += int(counts.sum())

    def calls_per_turn(self, num_turns: int = NUM_TURNS) -> float:
        self.calls = self.num_drafts = self.num_rows = 0
        for _ in range(num_turns):
            self.turn()
        return self.calls / num_turns

    def _counted(self, call: Any) -> Any:
        def tracer(frame: FrameType, event: str, argument: Any) -> None:
            self.calls += event in ("call", "c_call")

        if not self.counts:
            return call()
        before = sys.getprofile()
        sys.setprofile(tracer)
        try:
            return call()
        finally:
            sys.setprofile(before)


class ManySlots(Case):
    spare = 2


class Arrivals(Case):
    """A request begins in nearly every step, where another has ended."""

    num_tokens_each = 16

    def add(self, prompt: list[int], *, max_total_tokens: int) -> None:
        length = len(prompt) + 1 + self.num_added % self.num_tokens_each
        super().add(prompt, max_total_tokens=length)

    def turn(self) -> None:
        super().turn()
        for _ in range(self.num_ended):
            self._counted(lambda: self.add([1, TOKEN, TOKEN], max_total_tokens=0))
        self.num_ended = 0


def test_the_proposer_has_a_name_before_its_first_draft() -> None:
    case = Case(1, Repeats(finds=False))
    assert case.num_drafts == 0
    assert case.scheduler.stats().proposer == Repeats.name


def test_a_request_for_which_nothing_is_found_costs_next_to_nothing() -> None:
    plain, proposer = Case(1, None).calls_per_turn(), Repeats(finds=False)
    idle = Case(1, proposer)
    assert idle.calls_per_turn() <= plain + 4
    assert idle.calls_per_turn(512) <= plain + 3
    assert not idle.num_drafts
    assert not proposer.asked


@pytest.mark.parametrize("running", [1, 16])
def test_where_no_draft_pays_a_step_costs_next_to_nothing(running: int) -> None:
    plain, proposer = Case(running, None).calls_per_turn(), Repeats(finds=True)
    case = Case(running, proposer, FixedControl(0))
    assert case.calls_per_turn() <= plain + 16
    assert not case.num_drafts
    assert proposer.asked <= NUM_TURNS // 8
    assert case.calls_per_turn(512) <= plain + 4  # once rests are long


def test_where_requests_begin_in_every_step_drafts_rest_as_long_as_without() -> None:
    plain, proposer = Arrivals(16, None).calls_per_turn(512), Repeats(finds=True)
    case, control = Arrivals(16, proposer, FixedControl(0)), Repeats(finds=True)
    case.calls_per_turn(256)
    began, asked = case.num_added, proposer.asked
    calls = case.calls_per_turn(512)
    assert case.num_added - began >= 512
    steady = Case(16, control, FixedControl(0))
    steady.calls_per_turn(256)
    steady_asked = control.asked
    steady.calls_per_turn(512)
    assert proposer.asked - asked <= control.asked - steady_asked + 1
    assert calls <= plain + 12 * (case.num_added - began) / 512


def test_a_request_that_begins_while_drafts_rest_is_noted_when_they_are_asked_for() -> None:
    class Begun(Repeats):
        slots: ClassVar[list[int]] = []

        def begin(self, slot: int, request: Request) -> None:
            self.slots.append(slot)

        def end(self, slot: int) -> None:
            self.slots.remove(slot)

    proposer = Begun(finds=True)
    case = ManySlots(1, proposer, FixedControl(0))
    case.calls_per_turn(400)  # rests are as long as they become
    asked = proposer.asked
    case.add([1, TOKEN, TOKEN], max_total_tokens=4000)
    case.add([2, TOKEN, TOKEN], max_total_tokens=6)  # ends during the rest
    case.turn()
    assert (proposer.asked, len(proposer.slots)) == (asked, 1)
    case.calls_per_turn(102)
    assert proposer.asked > asked
    assert len(proposer.slots) == 2


def test_a_request_that_comes_when_all_have_left_ends_one_of_two_rests_in_turn() -> None:
    proposer = Repeats(finds=True)
    case = Case(1, proposer, FixedControl(0))
    case.calls_per_turn(400)
    ends = []
    for _ in range(2):
        asked = proposer.asked
        while proposer.asked == asked:  # then a whole rest is over, and the next has begun
            case.turn()
        case.calls_per_turn(20)  # no step is timed any more
        for _ in range(3):
            case.scheduler.abort(f"r{case.num_added}")
            case.add([1, TOKEN, TOKEN], max_total_tokens=4000)
            asked = proposer.asked
            for _ in range(6):
                case.turn()
            ends.append(proposer.asked > asked)
    assert ends == 2 * [True, False, False]


def test_a_step_with_drafts_costs_little_and_a_further_row_less() -> None:
    plain = Case(1, None).calls_per_turn()
    one, many = (Case(rows, Repeats(finds=True), FixedControl(MAX_DRAFTS)) for rows in (1, 16))
    calls_of_one, calls_of_many = one.calls_per_turn(), many.calls_per_turn()
    assert one.num_drafts >= 0.9 * MAX_DRAFTS * one.num_rows
    assert many.num_drafts >= 0.9 * MAX_DRAFTS * many.num_rows
    assert calls_of_one <= plain + 236
    assert calls_of_many <= calls_of_one + 15 * 20


def test_steps_without_drafts_come_at_times() -> None:
    case = Case(1, Repeats(finds=True), FixedControl(MAX_DRAFTS))
    case.calls_per_turn(600)
    assert 600 - 16 <= case.num_drafts / MAX_DRAFTS <= 600 - 6


@pytest.mark.parametrize(("step_ms", "share"), [(0.4, 0.1), (20.0, 0.9)])
def test_the_time_of_the_host_ends_drafting_where_it_does_not_pay(
    step_ms: float, share: float
) -> None:
    """All drafts are accepted, four a step, and a step with drafts takes 2 ms longer."""
    case = Case(1, Repeats(finds=True), step_ms=step_ms)
    case.drafts_ms = 2.0
    case.calls_per_turn(100)
    case.calls_per_turn(300)
    drafted = case.num_drafts / (300 * MAX_DRAFTS)
    assert drafted <= share if share < 0.5 else drafted >= share


class Model(Repeats, CostlyProposer):
    """Computes its drafts; a pass takes `pass_ms`."""

    def __init__(self, *, pass_ms: float) -> None:
        super().__init__(finds=True)
        self._pass_ms = pass_ms

    def possible(self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s) -> Int32s:
        return limits

    def pass_ms(self, num_requests: int) -> NDArray[np.float64]:
        return np.full(num_requests + 1, self._pass_ms)

    def behind_ms(self, tokens: TokenTable, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        return np.zeros(len(slots))


@pytest.mark.parametrize("running", [1, 16])
def test_a_draft_model_that_does_not_pay_costs_next_to_nothing(running: int) -> None:
    plain, model = Case(running, None).calls_per_turn(), Model(pass_ms=50.0)
    case = Case(running, model)
    assert case.calls_per_turn() <= plain + 19
    assert not model.asked
    assert not case.num_drafts


class LateModel(Model):
    """Passes of this model take `true_ms` each and are priced with a tenth of that. After a rest it
    first needs `num_behind` calls to know the texts, which take as long."""

    def __init__(self, *, true_ms: float, num_behind: int) -> None:
        super().__init__(pass_ms=true_ms / 10.0)
        self._true_ms, self._num_behind = true_ms, num_behind
        self._behind, self._length = num_behind, 0

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s, drafts: Drafts
    ) -> None:
        before, self._length = self._length, int(tokens.lengths[slots[0]])
        if self._length - before > 4 * MAX_DRAFTS:
            self._behind = self._num_behind
        if self._behind:
            self._behind -= 1
            self.drafting_ms += self._true_ms
            self.catching_up_ms += self._true_ms
            return
        super().propose(tokens, slots, limits, drafts)
        self.drafting_ms += self._true_ms * int(limits.max())


@pytest.mark.parametrize("num_behind", [0, 8])
@pytest.mark.parametrize("times", [1.2, 2.0])
def test_a_model_that_costs_more_than_its_price_loses_little(times: float, num_behind: int) -> None:
    """All drafts are accepted; a pass takes so many times what its token saves."""
    model = LateModel(true_ms=times * Case.step_ms, num_behind=num_behind)
    case = Case(16, model)
    case.counts = False
    for _ in range(200):  # in which it is tried for the first time
        case.turn()
    began_ms, num_tokens, asked = case.now_ms, case.num_tokens, model.drafting_ms
    for _ in range(3000):
        case.turn()
    plain_ms = (case.num_tokens - num_tokens) / 16 * Case.step_ms
    lost_ms = case.now_ms - began_ms - plain_ms
    assert lost_ms <= 0.02 * plain_ms
    assert model.drafting_ms > asked  # it is tried again


class Eager(AdaptiveControl):
    """Takes all drafts, unless they lost time."""

    def limits(
        self,
        slots: NDArray[np.intp],
        limits: Int32s,
        cost: StepCost | None,
        kinds: NDArray[np.intp] | None = None,
    ) -> Int32s:
        return limits


class WithSpare(Case):
    """Wrong drafts, by which a step takes twice as long."""

    drafts_ms, counts, accepts, spare = 1.0, False, False, 4


@pytest.mark.parametrize("has_prompts", [False, True])
def test_wrong_drafts_end_with_prompts_in_all_steps_too(*, has_prompts: bool) -> None:
    case = WithSpare(4, Repeats(finds=True), Eager(8, MAX_DRAFTS))
    for number in range(400):
        if has_prompts:
            case.add([20 + number % 70, *range(2, 12)], max_total_tokens=12)
        if number == 100:
            case.num_drafts = 0
        case.turn()
    assert 0 < case.num_drafts <= 10 * 4 * MAX_DRAFTS


class RightWithSpare(Case):
    """Right drafts beside short prompts."""

    counts, spare = False, 4


def test_prompts_between_short_steps_do_not_keep_drafts_away() -> None:
    """Every second step has a prompt, so that steps without drafts are never timed in turn."""
    case = RightWithSpare(1, Repeats(finds=True), FixedControl(MAX_DRAFTS), step_ms=0.4)
    num_steps = 256
    for number in range(num_steps):
        if number % 2:
            case.add([20 + number % 70, *range(2, 12)], max_total_tokens=12)
        case.turn()
    assert case.num_drafts >= 0.8 * num_steps * MAX_DRAFTS


class InDebt(Case):
    """Drafts have lost time, and none are made until steps without have earned it."""

    accepts = False

    @property
    def source(self) -> Any:
        assert self.scheduler._drafts is not None
        return self.scheduler._drafts._source

    def lose(self) -> DraftBalance:
        balance: DraftBalance = self.source._control.balance
        while balance.allows_drafts:
            balance.drafted(-2.0 * self.step_ms, self.step_ms)
        balance._steps = -MAX_STEPS
        self.source.note_step(self.step_ms, None, 0.0)
        self.scheduler._drafts.noted_from = 0  # type: ignore[union-attr]
        return balance

    def steps_to_earn(self) -> tuple[int, int]:
        """Return after how many steps drafts are allowed, and how often steps were noted."""
        balance, num_steps, num_noted = self.lose(), 0, 0
        note_step = self.source.note_step

        def counted(*given: Any) -> None:
            nonlocal num_noted
            num_noted += 1
            note_step(*given)

        self.source.note_step = counted
        while not balance.allows_drafts:
            self.turn()
            num_steps += 1
        self.source.note_step = note_step
        return num_steps, num_noted


class InDebtWithSpare(InDebt):
    spare = 2


@pytest.mark.parametrize("running", [1, 16])
def test_while_drafts_are_in_debt_short_steps_are_noted_several_at_once(running: int) -> None:
    plain, case = Case(running, None).calls_per_turn(512), InDebt(running, Repeats(finds=True))
    case.step_ms = 0.2
    case.calls_per_turn(64)
    case.lose()
    assert case.calls_per_turn(200) <= plain + 2.5
    assert not case.num_drafts


@pytest.mark.parametrize(("step_ms", "steps_per_note"), [(0.1, 16), (0.5, 8), (1.5, 2), (20.0, 1)])
def test_noted_at_once_steps_earn_what_they_earn_one_by_one(
    step_ms: float, steps_per_note: int
) -> None:
    found = {}
    for noted_ms in (0.0, NOTED_MS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.scheduler.speculation.draft_rows.NOTED_MS", noted_ms)
            case = InDebt(2, Repeats(finds=True), step_ms=step_ms)
            case.counts = False
            for _ in range(64):
                case.turn()
            found[noted_ms] = case.steps_to_earn()
    (one_by_one, _), (num_steps, num_noted) = found.values()
    assert abs(num_steps - one_by_one) <= 16
    assert num_steps >= 200
    assert num_noted <= num_steps / steps_per_note + 8


def test_steps_noted_at_once_earn_nothing_for_time_in_which_no_request_ran() -> None:
    case = InDebt(1, Repeats(finds=True), step_ms=0.25)
    case.counts = False
    balance = case.lose()
    for _ in range(40):
        case.turn()
    owed = balance._steps
    case.source.note_arrivals = lambda *given: None  # or the debt is less
    case.scheduler.abort(f"r{case.num_added}")
    case.now_ms += 1e6
    case.add([1, TOKEN, TOKEN], max_total_tokens=4000)
    for _ in range(24):
        case.turn()
    assert not balance.allows_drafts
    assert balance._steps - owed <= 2.0


def test_requests_that_begin_between_steps_that_are_noted_are_known() -> None:
    case = InDebtWithSpare(1, Repeats(finds=True), step_ms=0.25)
    case.counts = False
    case.lose()
    for _ in range(40):
        case.turn()
    arrivals: list[tuple[int, int]] = []
    case.source.note_arrivals = lambda *given: arrivals.append(given)
    case.add([1, TOKEN, TOKEN], max_total_tokens=4000)
    case.turn()
    case.add([2, TOKEN, TOKEN], max_total_tokens=4000)
    for _ in range(40):
        case.turn()
    assert sum(num for num, _ in arrivals) == 2
    assert arrivals[-1][1] == 3


@pytest.mark.parametrize("method", ["note", "note_plain", "added_ms"])
def test_an_error_in_prices_ends_drafts_and_changes_no_answer(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is counted; steps go on."""

    def fails(*_: object) -> None:
        raise ValueError("not so many values")

    case = Case(2, Repeats(finds=True), FixedControl(MAX_DRAFTS))
    case.counts = False
    with monkeypatch.context() as planted:
        planted.setattr(DraftPrices, method, fails)
        for _ in range(200):
            case.turn()
    stats = case.scheduler.stats()
    assert stats.draft_errors_total >= 1
    assert stats.draft_proposer_errors_total == 0
    case.num_drafts = case.num_rows = 0
    for _ in range(64):
        case.turn()
    assert case.num_drafts == 0
    assert case.num_rows == 2 * 64


class Missing(Repeats):
    """Finds nothing, in `num_looked` steps so far."""

    num_looked = 0

    def may_find(self, tokens: TokenTable) -> bool:
        self.num_looked += 1
        return False


@pytest.mark.parametrize(("step_ms", "steps_per_look"), [(0.2, 32), (4.0, 9), (100.0, 1)])
def test_before_any_ask_lookups_in_vain_rest_for_some_milliseconds(
    step_ms: float, steps_per_look: int
) -> None:
    """Not for as many steps whatever these take: a text may repeat itself from the next one on."""
    proposer = Missing(finds=False)
    case = Case(1, proposer, step_ms=step_ms)
    case.counts = False
    for _ in range(160):
        case.turn()
    proposer.num_looked = 0
    for _ in range(192):
        case.turn()
    assert abs(proposer.num_looked - 192 / steps_per_look) <= 2
