"""Proposers of every kind that fail now and then, in any of their methods, change no answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.speculative.draft_model import ModelProposer
from quire.speculative.drafter import Drafter
from quire.speculative.eagle import EagleProposer
from quire.speculative.history import HistoryProposer
from quire.speculative.medusa import MedusaProposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.self_draft import SelfProposer
from tests.exact.conftest import VOCAB_SIZE
from tests.exact.drafts import OracleProposer
from tests.exact.rig import AloneRuns, Model, differences, run_case
from tests.exact.workload import draw_case

KINDS = (
    *(ModelProposer, SelfProposer, EagleProposer, MedusaProposer),
    *(NgramProposer, HistoryProposer, OracleProposer),
)
METHODS = (
    *("begin", "end", "propose", "verified", "possible", "behind_ms", "pass_ms"),
    *("note_kv", "may_find", "finds_long", "learn", "note_rest", "call_ms"),
)
NUM_CASES = 24
FAILS = 0.03  # of the calls, half of them after their work


def test_proposers_that_fail_change_no_answer(
    models: list[Model], alone: AloneRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, reports, calls = random.Random(5), list[str](), {"failed": 0}

    def failing(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if drawn.random() >= FAILS:
                return real(*given)
            calls["failed"] += 1
            if drawn.random() < 0.5:
                real(*given)
            raise RuntimeError(name)

        return call

    for kind in KINDS:
        for name in METHODS:
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, failing(getattr(kind, name), name))
    made = Drafter.__init__

    def reporting(self: Drafter, *given: Any, **named: Any) -> None:
        named["report"] = lambda what, **fields: reports.append(str(fields["error"]))
        made(self, *given, **named)

    monkeypatch.setattr(Drafter, "__init__", reporting)
    lines: list[str] = []
    for number in range(NUM_CASES):
        case = draw_case(number, num_models=len(models), vocab_size=VOCAB_SIZE)
        if case.settings.proposer:
            model = models[case.model]
            lines += differences(model, run_case(model, case, alone=alone), alone)
    assert not lines
    assert calls["failed"] > 20
    assert reports
    assert {report.removeprefix("RuntimeError: ") for report in reports} <= {*METHODS}
