"""Proposers that are asked together: which requests ask which, and what an error costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.errors import DeviceLost
from quire.base.rare_records import Speculation
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.speculative.guarded_proposers import Found, GuardedProposers, ProposerFailed
from quire.speculative.plain_counts import OF_TEXT, PREDICTED
from quire.speculative.prediction import PredictionProposer
from tests.unit.speculative.test_drafter import (
    MAX_DRAFTS,
    NUM_SLOTS,
    VOCAB_SIZE,
    CountedModel,
    ScriptedProposer,
    ints,
)

BOTH = np.array([0, 1])
LIMITS = ints(MAX_DRAFTS, MAX_DRAFTS)


class Guarded:
    """Slot 0 asks the proposer, slot 1 brings a prediction besides."""

    def __init__(self, proposer: Any) -> None:
        self.reports: list[dict[str, Any]] = []
        self.tokens = TokenTable(NUM_SLOTS, 32)
        self.proposers = GuardedProposers(
            proposer,
            PredictionProposer(NUM_SLOTS),
            num_slots=NUM_SLOTS,
            max_drafts=MAX_DRAFTS,
            vocab_size=VOCAB_SIZE,
            report=lambda what, **fields: self.reports.append({"what": what, **fields}),
        )
        for slot, prediction in ((0, ints()), (1, ints(30, 31))):
            self.tokens.admit(slot, ints(1, 2, 3), 3)
            request = Request(
                request_id=f"r{slot}",
                group_id=f"r{slot}",
                stream=0,
                prompt_ids=ints(1, 2, 3),
                sampling=SamplingParams(),
                stop_ids=(),
                max_total_tokens=32,
                arrival_ms=0.0,
                speculation=Speculation(max_drafts=MAX_DRAFTS, prediction_ids=prediction),
            )
            self.proposers.begin(slot, request, predicts=len(prediction) > 0)

    def find(self, **asked: bool) -> Found:
        asked = {"of_proposer": True, "of_predictions": True} | asked
        return self.proposers.find(self.tokens, BOTH, LIMITS, **asked)


def test_what_is_found_is_of_the_prediction_first_and_of_those_asked_only() -> None:
    guarded = Guarded(ScriptedProposer())
    found = guarded.find()
    assert (found.drafts.counts.tolist(), found.limits.tolist()) == ([3, 2], [3, 2])
    assert found.is_computed is None
    assert found.predicted is not None
    assert found.kinds is not None
    assert (found.predicted.tolist(), found.kinds.tolist()) == ([False, True], [OF_TEXT, PREDICTED])
    assert guarded.find(of_proposer=False).drafts.counts.tolist() == [0, 2]
    found = guarded.find(of_predictions=False)
    assert found.drafts.counts.tolist() == [3, 3]
    assert found.predicted is not None
    assert not found.predicted.any()
    guarded.proposers.end(1)
    found = guarded.find()
    assert (found.predicted, found.kinds) == (None, None)


def test_of_a_model_it_is_found_how_many_drafts_it_could_compute() -> None:
    guarded = Guarded(model := CountedModel())
    found = guarded.find()
    assert (found.drafts.counts.tolist(), found.limits.tolist()) == ([0, 2], [2, 2])
    assert found.is_computed is not None
    assert found.is_computed.tolist() == [True, False]
    assert not model.asked
    made, drafting_ms = guarded.proposers.compute(guarded.tokens, BOTH[:1], ints(1), 5.0)
    assert (made.counts.tolist(), model.catch_up_ms, drafting_ms) == ([1], 5.0, 0.0)


def test_a_request_that_ends_or_loses_its_drafts_asks_nothing() -> None:
    guarded = Guarded(proposer := ScriptedProposer())
    proposers = guarded.proposers
    assert (proposers.num_asking, proposers.num_predicting) == (2, 1)
    proposers.mutes_proposer = proposers.mutes_predictions = True
    proposers.end(0)
    assert (proposers.num_asking, proposers.num_predicting) == (1, 1)
    assert proposers.mutes_proposer
    proposer._fails = 1
    guarded.find(of_predictions=False)
    assert (proposers.num_asking, proposers.num_predicting) == (0, 0)
    assert not proposers.asks_proposer.any()
    assert not proposers.asks_prediction.any()
    assert not proposers.mutes_proposer
    assert not proposers.mutes_predictions
    assert [report["request_id"] for report in guarded.reports] == ["r1"]
    proposers.give_up_all(BOTH, RuntimeError("once more"))
    assert len(guarded.reports) == 1


@pytest.mark.parametrize("method", ["pass_ms", "behind_ms", "call_ms"])
def test_an_error_that_is_of_no_known_request_is_the_callers_to_place(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded(CountedModel())

    def ask() -> None:
        guarded.find()
        guarded.proposers.making_ms(guarded.tokens, BOTH, 2)

    for error in (RuntimeError("no more"), DeviceLost("a rank has ended")):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as planted:
            planted.setattr(CountedModel, method, fails)
            is_lost = isinstance(error, DeviceLost)
            with pytest.raises(DeviceLost if is_lost else ProposerFailed) as raised:
                ask()
            assert error in (raised.value, raised.value.__cause__)
    assert not guarded.reports
    ask()


def test_a_model_that_cannot_say_what_is_possible_costs_only_its_request_the_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guarded = Guarded(CountedModel())
    possible = CountedModel.possible

    def fails(self: Any, tokens: Any, slots: Any, limits: Any) -> Any:
        if 1 in slots:
            raise RuntimeError("no more")
        return possible(self, tokens, slots, limits)

    monkeypatch.setattr(CountedModel, "possible", fails)
    for _ in range(2):
        guarded.find(of_predictions=False)
        assert [report["request_id"] for report in guarded.reports] == ["r1"]
        assert guarded.proposers.asks_proposer.tolist()[:2] == [True, False]
