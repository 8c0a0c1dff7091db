"""The drafter: which proposer is asked, what becomes of bad drafts and of proposers that raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import DeviceLost
from quire.base.rare_records import Speculation
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.scheduler.interfaces import DraftCost
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from quire.speculative.draft_choice import MAX_REFUSED
from quire.speculative.drafter import Drafter
from quire.speculative.ngram import NgramProposer
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import CostlyProposer, Drafts, LookupProposer, Proposer
from quire.speculative.rests import ASK_SHARE, MANY_MISSES, MAX_MISS_STEPS

Int32s = NDArray[np.int32]
NUM_SLOTS, MAX_DRAFTS, VOCAB_SIZE = 4, 3, 50


def ints(*values: int) -> Int32s:
    return np.array(values, np.int32)


def cost_of(num_requests: int) -> DraftCost:
    return DraftCost(10.0, num_requests, np.arange(2.0), asked_ms=100.0 * ASK_SHARE)


def of_none() -> NDArray[np.intp]:
    """Return that no slot may have drafts, where long matches are looked for."""
    return np.empty(0, np.intp)


class ScriptedProposer(Proposer):
    """Proposes the same tokens after any text; raises where slot `fails` is among those asked."""

    name = "scripted"

    def __init__(self, token_ids: tuple[int, ...] = (7, 8, 9), fails: int = -1) -> None:
        self.asked: list[list[int]] = []
        self._token_ids, self._fails = token_ids, fails

    def begin(self, slot: int, request: Request) -> None:
        pass

    def end(self, slot: int) -> None:
        pass

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s, drafts: Drafts
    ) -> None:
        self.asked.append(slots.tolist())
        drafts.ids[:, : len(self._token_ids)] = self._token_ids
        drafts.counts[:] = len(self._token_ids)
        if self._fails in slots:  # of what it has filled in, nothing counts
            raise RuntimeError("no guess")

    def verified(self, slots: NDArray[np.intp], drafted: Int32s, accepted: Int32s) -> None:
        pass


class Case:
    """A drafter over a token table with three texts."""

    def __init__(self, proposer: Any, control: Control | None = None) -> None:
        self.reports: list[dict[str, Any]] = []
        self.tokens = TokenTable(NUM_SLOTS, 32)
        self.proposer, self.prediction = proposer, PredictionProposer(NUM_SLOTS)
        self.drafter = Drafter(
            proposer,
            self.prediction,
            FixedControl(MAX_DRAFTS) if control is None else control,
            num_slots=NUM_SLOTS,
            max_drafts=MAX_DRAFTS,
            vocab_size=VOCAB_SIZE,
            report=lambda what, **fields: self.reports.append({"what": what, **fields}),
        )

    def begin(self, slot: int, text: list[int], num_prompt_tokens: int, **more: Any) -> None:
        self.tokens.admit(slot, ints(*text), num_prompt_tokens)
        request = Request(
            request_id=f"r{slot}",
            group_id=f"r{slot}",
            stream=0,
            prompt_ids=ints(*text[:num_prompt_tokens]),
            sampling=SamplingParams(),
            stop_ids=(),
            max_total_tokens=32,
            arrival_ms=0.0,
            speculation=Speculation(max_drafts=MAX_DRAFTS, **more),
        )
        self.drafter.begin(slot, request)

    def propose(self, *slots: int, limit: int = MAX_DRAFTS) -> list[list[int]]:
        index = np.array(slots)
        limits = np.full(len(slots), limit, np.int32)
        counts, ids = self.drafter.propose(self.tokens, index, limits, lambda: cost_of(len(slots)))
        parts = np.split(ids, np.cumsum(counts)[:-1])
        return [[int(id_) for id_ in part] for part in parts]


def test_a_prediction_is_asked_before_the_proposer() -> None:
    case = Case(NgramProposer(NUM_SLOTS))
    case.begin(0, [1, 2, 5, 1, 2], 3, prediction_ids=ints(1, 2, 30, 31))
    case.begin(1, [1, 2, 5, 1, 2], 3)
    case.begin(2, [1, 2, 5, 1, 2], 3, prediction_ids=ints(30, 31), uses_proposer=False)
    case.begin(3, [1, 2, 5, 1, 2], 3, prediction_ids=ints(30, 31))
    assert case.propose(0, 1, 2, 3) == [[30, 31], [5, 1, 2], [], [5, 1, 2]]


def test_a_proposer_that_raises_costs_only_its_request_the_drafts() -> None:
    proposer = ScriptedProposer(fails=1)
    case = Case(proposer)
    for slot in range(3):
        case.begin(slot, [1, 2, 3], 3)
    assert case.propose(0, 1, 2) == [[7, 8, 9], [], [7, 8, 9]]
    assert [report["request_id"] for report in case.reports] == ["r1"]
    assert case.reports[0]["error"] == "RuntimeError: no guess"
    proposer.asked.clear()
    assert case.propose(0, 1, 2) == [[7, 8, 9], [], [7, 8, 9]]
    assert proposer.asked == [[0, 2]]
    assert len(case.reports) == 1
    case.drafter.end(1)
    case.begin(1, [4], 1)  # another request in the slot
    assert case.propose(0) == [[7, 8, 9]]


def test_the_loss_of_the_device_is_no_failure_of_a_proposer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(ScriptedProposer())
    case.begin(0, [1, 2, 3], 3)

    def lost(*_: object) -> None:
        raise DeviceLost("a rank has ended")

    monkeypatch.setattr(ScriptedProposer, "propose", lost)
    with pytest.raises(DeviceLost):
        case.propose(0)
    assert not case.reports


@pytest.mark.parametrize(
    ("token_ids", "limit", "drafts"),
    [
        ((7, VOCAB_SIZE, 8), 3, [7]),
        ((-1, 7, 8), 3, []),
        ((7, 8, 9), 2, [7, 8]),
    ],
)
def test_drafts_are_cut_to_the_vocabulary_and_the_limit(
    token_ids: tuple[int, ...], limit: int, drafts: list[int]
) -> None:
    case = Case(ScriptedProposer(token_ids))
    case.begin(0, [1, 2, 3], 3)
    assert case.propose(0, limit=limit) == [drafts]


class CountedModel(ScriptedProposer, CostlyProposer):
    """A proposer that computes; notes for how many drafts it was asked."""

    def __init__(self, pass_ms: float = 1.0, behind_ms: float = 0.0) -> None:
        super().__init__()
        self._behind_ms = behind_ms
        self.drafting_ms = 0.0
        self.catch_up_ms = 0.0
        self.limits: list[list[int]] = []
        self.is_closed = False
        self._pass_ms = pass_ms

    def possible(self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s) -> Int32s:
        return np.minimum(limits, np.int32(2))

    def behind_ms(self, tokens: TokenTable, slots: NDArray[np.intp]) -> NDArray[np.float64]:
        return np.full(len(slots), self._behind_ms)

    def pass_ms(self, num_requests: int) -> NDArray[np.float64]:
        return np.full(num_requests + 1, self._pass_ms)

    def propose(
        self, tokens: TokenTable, slots: NDArray[np.intp], limits: Int32s, drafts: Drafts
    ) -> None:
        self.limits.append(limits.tolist())
        super().propose(tokens, slots, limits, drafts)

    def close(self) -> None:
        self.is_closed = True


def test_a_model_is_asked_for_as_many_drafts_as_the_control_chose() -> None:
    model = CountedModel()
    case = Case(model)
    case.begin(0, [1, 2, 3], 3)
    case.begin(1, [1, 2, 3], 3, prediction_ids=ints(30, 31, 32))
    assert case.propose(0, 1) == [[7, 8], [30, 31, 32]]
    assert (model.asked, model.limits) == ([[0]], [[2]])
    assert model.catch_up_ms == 5.0  # half a step, as another request waits
    assert case.propose(0) == [[7, 8]]
    assert model.catch_up_ms == math.inf
    model.asked.pop()
    index, limits = np.array([0, 1]), np.full(2, 3, np.int32)
    assert case.drafter.would_propose(case.tokens, index, limits).all()
    assert len(model.asked) == 1  # not for the answer to that


@pytest.mark.parametrize(("behind_ms", "is_asked"), [(64.0, True), (6400.0, False)])
def test_a_prompt_that_the_model_lacks_is_part_of_the_price(
    behind_ms: float, is_asked: bool
) -> None:
    model = CountedModel(behind_ms=behind_ms)
    case = Case(model, AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    case.propose(0)
    assert bool(model.asked) == is_asked


def test_no_model_runs_where_its_drafts_do_not_pay() -> None:
    model = CountedModel(pass_ms=1000.0)
    case = Case(model, AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    case.begin(1, [1, 2, 3], 3, prediction_ids=ints(30, 31, 32))
    assert case.propose(0, 1) == [[], [30]]  # at first one: nothing is known of predictions
    assert not model.asked
    assert case.drafter.takes_plain_step()  # the first one, which drafts are judged against
    assert not case.drafter.skips_step(case.tokens, of_none)  # a prediction may go on in any step
    case.drafter.end(1)
    rests = []
    for _ in range(7):
        assert case.propose(0) == [[]]
        rests.append(0)
        while case.drafter.skips_step(case.tokens, of_none):
            rests[-1] += 1
    assert rests == [2, 4, 8, 10, 10, 10, 10]  # steps are long, and one of a rest is over
    case.propose(0)
    skipped = []
    for num_live in (2, 2, 1, *[1] * 11, 2, 1):  # one that begins alone is asked at once
        case.drafter.note_arrivals(1, num_live)
        skipped.append(case.drafter.skips_step(case.tokens, of_none))
        if not skipped[-1]:
            case.propose(0)
    # But not at the end of each of two rests in turn.
    assert skipped == [True, True, False, *[True] * 10, False, True, False]
    case.drafter.close()
    assert model.is_closed


def test_requests_wait_to_be_judged_anew_after_a_rest() -> None:
    case = Case(ScriptedProposer(), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    index, limits = np.array([0]), ints(MAX_DRAFTS)
    dear = DraftCost(1.0, 1, 100.0 * np.arange(2), asked_ms=100.0 * ASK_SHARE)
    counts, _ = case.drafter.propose(case.tokens, index, limits, lambda: dear)
    assert counts.tolist() == [0]
    num_waits = 0
    for _ in range(40):  # with steps in flight no request is asked that does not wait
        case.drafter.skips_step(case.tokens, of_none)
        waits = case.drafter.would_propose(case.tokens, index, limits).any()
        if waits:
            num_waits += 1
            case.drafter.propose(case.tokens, index, limits, lambda: dear)
    assert 3 <= num_waits <= 6  # after 1, 2, 4, 8, 16 steps, which are short
    while case.drafter.skips_step(case.tokens, of_none):
        pass
    assert case.drafter.would_propose(case.tokens, index, limits).all()
    assert case.propose(0) == [[7]]
    assert case.drafter.would_propose(case.tokens, index, limits).all()


def resting() -> Case:
    """Return a case of which slot 0 rests, with prompt lookup."""
    case = Case(NgramProposer(NUM_SLOTS), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    for _ in range(6):
        case.drafter._control.rests.note_choice(pays=False, step_ms=0.1, asked_ms=1.0)
    return case


def test_predictions_do_not_rest_beside_a_request_that_does() -> None:
    case = resting()
    case.begin(1, [1, 2, 3], 3, prediction_ids=ints(30, 31, 32))
    index, limits = np.array([0, 1]), np.full(2, MAX_DRAFTS, np.int32)
    assert case.drafter.would_propose(case.tokens, index, limits).tolist() == [False, True]


def test_many_refusals_by_the_last_costs_are_put_to_the_test() -> None:
    class Refuses(FixedControl):
        def limits(self, slots: Any, limits: Int32s, cost: Any, kinds: Any = None) -> Int32s:
            return limits if cost is not None else np.zeros_like(limits)

    case = Case(ScriptedProposer(), Refuses(MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    index, limits = np.array([0]), ints(MAX_DRAFTS)
    waits = [bool(case.drafter.would_propose(case.tokens, index, limits)[0]) for _ in range(40)]
    assert waits == 2 * ([False] * MAX_REFUSED + [True]) + [False] * (40 - 2 * (MAX_REFUSED + 1))


def test_a_proposer_that_raises_while_it_is_looked_for_a_long_match_is_asked() -> None:
    case = resting()
    case.drafter._control.rests.until_look = 0
    case.proposer.finds_long = lambda *_: 1 / 0
    assert not case.drafter.would_propose(case.tokens, np.array([0]), ints(3)).any()
    assert not case.drafter.num_errors


def test_of_requests_that_could_wait_only_those_are_looked_at_that_ask_for_lookups() -> None:
    case = resting()
    case.begin(1, [1, 2, 3], 3)
    case.begin(2, [1, 2, 3], 3, prediction_ids=ints(30, 31), uses_proposer=False)
    case.drafter.end(2)
    case.begin(3, [1, 2, 3], 3)
    case.drafter._control.rests.until_look = 0
    looked: list[list[int]] = []
    case.proposer.finds_long = lambda _, slots: slots is None or bool(looked.append(slots.tolist()))
    assert not case.drafter.would_propose(case.tokens, np.array([1, 2, 3]), ints(3, 3, 3)).any()
    assert case.drafter.skips_step(case.tokens, lambda: np.array([0, 2]))
    assert looked == [[1, 3], [0]]


def test_a_rest_goes_on_while_drafts_have_to_earn_what_they_lost() -> None:
    case = resting()
    rests, balance = case.drafter._control.rests, case.drafter._control.balance
    assert balance is not None
    while balance.allows_drafts:
        balance.drafted(-8.0, 10.0, 0.0)
    rests.until_look = 0
    before = rests.left
    assert case.drafter.skips_step(case.tokens, of_none)
    assert rests.left == before - 1


def test_after_many_lookups_in_vain_some_steps_pass_to_the_next() -> None:
    asked: list[int] = []

    class Misses(ScriptedProposer, LookupProposer):
        def may_find(self, tokens: TokenTable) -> bool:
            asked.append(len(asked))
            return False

    case = Case(Misses(), FixedControl(3))
    case.begin(0, [1, 2, 3], 3)
    case.drafter.plain_ms = 0.2
    assert all(case.drafter.skips_step(case.tokens, of_none) for _ in range(MANY_MISSES + 96))
    assert len(asked) == MANY_MISSES + 96 // (1 + MAX_MISS_STEPS)
    case.drafter.skips_step(case.tokens, of_none)
    for num_live, num_asked in ((2, 0), (2, 8)):  # requests that begin may repeat their prompts
        case.drafter.note_arrivals(1, num_live)
        asked.clear()
        assert all(case.drafter.skips_step(case.tokens, of_none) for _ in range(8))
        assert len(asked) == num_asked


@pytest.mark.parametrize(("timed_ms", "num_asked"), [(0.0, 96), (4.0, 20), (100.0, 96)])
def test_before_any_ask_a_rest_after_misses_has_as_many_steps_as_they_take_time(
    timed_ms: float, num_asked: int
) -> None:
    asked: list[int] = []

    class Misses(ScriptedProposer, LookupProposer):
        def may_find(self, tokens: TokenTable) -> bool:
            asked.append(len(asked))
            return False

    case = Case(Misses(), FixedControl(3))
    case.begin(0, [1, 2, 3], 3)
    case.drafter.plain_ms = timed_ms
    for _ in range(MANY_MISSES - 1 + 96):
        case.drafter.skips_step(case.tokens, of_none)
    assert len(asked) == MANY_MISSES - 1 + num_asked


def test_lookups_are_asked_only_where_the_last_tokens_occurred_before() -> None:
    case = Case(NgramProposer(NUM_SLOTS))
    case.begin(0, [1, 2, 3, 4], 4)
    case.begin(1, [5, 6, 7, 8], 4)
    case.drafter.skips_step(case.tokens, of_none)
    case.propose(0, 1)
    assert all(case.drafter.skips_step(case.tokens, of_none) for _ in range(8))
    case.tokens.put(np.array([1, 1]), ints(4, 5), ints(5, 6))
    assert not case.drafter.skips_step(case.tokens, of_none)
    assert case.propose(0, 1) == [[], [7, 8, 5]]
    case.drafter.end(1)
    assert case.drafter.skips_step(case.tokens, of_none)


class FailingLookup(ScriptedProposer):
    """A lookup that raises for slot 1, whatever it is asked."""

    def may_find(self, tokens: TokenTable) -> bool:
        raise RuntimeError("no guess")


def test_a_lookup_that_raises_costs_only_its_request_the_drafts() -> None:
    case = Case(FailingLookup(fails=1))
    for slot in range(2):
        case.begin(slot, [1, 2, 3], 3)
    case.propose(0)
    assert not case.drafter.skips_step(case.tokens, of_none)
    assert case.propose(0, 1) == [[7, 8, 9], []]
    assert [report["request_id"] for report in case.reports] == ["r1"]


def test_no_drafts_are_made_while_they_lose_time() -> None:
    case = Case(ScriptedProposer(), AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    assert case.propose(0) == [[7]]
    case.drafter.skips_step(case.tokens, of_none)
    assert not case.drafter.skips_step(case.tokens, of_none)
    rests = []
    for _ in range(6):
        while not case.drafter.rest_steps:
            case.drafter.note_step(10.0, -8.0, 0.0)
        assert not case.drafter.would_propose(case.tokens, np.array([0]), ints(3)).any()
        num_plain = 0
        while case.drafter.skips_step(case.tokens, of_none):
            case.drafter.note_step(10.0, None, 0.0)
            num_plain += 1
        rests.append(num_plain)
    assert rests[0] <= 40  # what ended them may be over
    assert min(rests[2:]) > 2 * rests[0]
    assert 90 <= rests[-1] <= 120  # tried again seldom


def test_a_step_held_up_for_seconds_while_texts_are_computed_ends_no_drafts() -> None:
    model = CountedModel()
    case = Case(model, AdaptiveControl(NUM_SLOTS, MAX_DRAFTS))
    case.begin(0, [1, 2, 3], 3)
    model.catching_up_ms += 20.0
    case.drafter.note_step(10.0, None, 5000.0)
    for _ in range(500):  # each gains more than its part of what was computed
        case.drafter.note_step(10.0, 2.0, 0.5)
        assert not case.drafter.rest_steps


def test_which_drafts_come_from_predictions_is_known_by_slot() -> None:
    case = Case(NgramProposer(NUM_SLOTS))
    case.begin(0, [1, 2, 5, 1, 2], 3)
    assert case.propose(0) == [[5, 1, 2]]
    assert case.drafter.from_prediction is None
    case.begin(1, [1, 2, 5, 1, 2], 3, prediction_ids=ints(1, 2, 30, 31))
    assert case.propose(0, 1) == [[5, 1, 2], [30, 31]]
    assert case.drafter.from_prediction.tolist() == [False, True, False, False]
    case.drafter.end(1)
    case.begin(1, [1, 2, 5, 1, 2], 3)
    assert not case.drafter.from_prediction.any()


class Learner(ScriptedProposer):
    """Has the methods of a LearningProposer and of a CacheProposer, and is neither."""

    def learn(self, slot: int, output: Int32s) -> None:
        raise AssertionError("it is not asked")

    def note_kv(self, slots: Any, block_tables: Any, capacities: Any) -> None:
        raise AssertionError("it is not asked")


def test_what_a_proposer_can_do_is_said_by_its_base_classes() -> None:
    drafter = Case(Learner()).drafter
    assert (drafter.learns, drafter.uses_cache, drafter.proposer_name) == (False, False, "scripted")
    case = Case(Learner())
    case.begin(0, [1, 2, 3], 3)
    case.drafter.learn(0, ints(1))
    with pytest.raises(TypeError, match="abstract"):
        type("Costly", (ScriptedProposer, CostlyProposer), {})()


@pytest.mark.parametrize(
    "method", ["begin", "propose", "possible", "behind_ms", "pass_ms", "call_ms", "verified", "end"]
)
def test_a_proposer_that_raises_anywhere_costs_drafts_and_nothing_else(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has one report at most, but for one of its end."""
    case = Case(CountedModel())

    def fails(*_: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(CountedModel, method, fails)
    for slot in range(2):
        case.begin(slot, [1, 2, 3], 3)
    has_drafts = method in ("verified", "end")
    assert case.propose(0, 1) == ([[7, 8]] * 2 if has_drafts else [[], []])
    both = np.array([0, 1])
    case.drafter.verified(both, ints(2, 2), ints(1, 0))
    if method != "end":
        assert sorted(report["request_id"] for report in case.reports) == ["r0", "r1"]
        assert case.propose(0, 1) == [[], []]
    assert not case.drafter.would_propose(case.tokens, both, ints(3, 3)).any() or method == "end"
    for slot in range(2):
        case.drafter.end(slot)
    assert len(case.reports) == 2
    monkeypatch.undo()
    case.begin(0, [1, 2, 3], 3)
    assert case.propose(0) == [[7, 8]]  # the next request has drafts


class Broken:
    """Raises like an error in Quire's own code."""

    def __call__(self, *_: object, **__: object) -> Any:
        raise ValueError("not so many values")


@pytest.mark.parametrize("place", ["cost", "limits", "verified"])
def test_an_error_in_prices_or_control_is_no_proposers_and_ends_drafts_for_all(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = AdaptiveControl(NUM_SLOTS, MAX_DRAFTS)
    case = Case(ScriptedProposer(), control)
    for slot in range(2):
        case.begin(slot, [1, 2, 3], 3)
    both, drafter = np.array([0, 1]), case.drafter
    with monkeypatch.context() as planted:
        if place != "cost":
            planted.setattr(control, place, Broken())
        cost = Broken() if place == "cost" else lambda: cost_of(2)
        counts, ids = drafter.propose(case.tokens, both, ints(3, 3), cost)
        assert place == "verified" or (counts.tolist(), len(ids)) == ([0, 0], 0)
        drafter.verified(both, ints(1, 1), ints(1, 0))
        drafter.fail(RuntimeError("another one, of a step in flight"))
    assert len(case.reports) == 1
    assert case.reports[0]["error"] == "ValueError: not so many values"
    assert "request_id" not in case.reports[0]
    assert "in __call__" in case.reports[0]["traceback"]
    assert (drafter.num_errors, drafter.num_proposer_errors) == (2, 0)
    assert drafter.skips_step(case.tokens, of_none)
    assert drafter.rest_steps > 1000
    assert not drafter.would_propose(case.tokens, both, ints(3, 3)).any()
    for slot in range(2):
        drafter.end(slot)
    case.begin(0, [1, 2, 3], 3, prediction_ids=ints(1, 2, 30))
    assert drafter.skips_step(case.tokens, of_none)
    assert drafter.rest_steps > 1000
    drafter.note_step(10.0, None, 0.0)
    assert not drafter.notes_plain_steps
    assert len(case.reports) == 1


def test_errors_of_proposers_are_counted() -> None:
    case = Case(ScriptedProposer(fails=1))
    for slot in range(3):
        case.begin(slot, [1, 2, 3], 3)
    case.propose(0, 1, 2)
    assert (case.drafter.num_errors, case.drafter.num_proposer_errors) == (0, 1)


def test_a_loss_of_the_device_in_any_method_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(CountedModel())
    case.begin(0, [1, 2, 3], 3)

    def lost(*_: object) -> None:
        raise DeviceLost("a rank has ended")

    calls: dict[str, Callable[[], object]] = {
        "possible": lambda: case.propose(0),
        "verified": lambda: case.drafter.verified(np.array([0]), ints(1), ints(1)),
        "end": lambda: case.drafter.end(0),
    }
    for method, call in calls.items():
        with monkeypatch.context() as planted:
            planted.setattr(CountedModel, method, lost)
            with pytest.raises(DeviceLost):
                call()
    assert not case.reports
