"""Steps without drafts that are timed: after each step with drafts, whether or not some are due."""

from __future__ import annotations

import pytest

from quire.scheduler.speculation.draft_prices import DraftPrices
from quire.scheduler.speculation.plain_steps import PLAIN_STEPS, TIMED_STEPS, PlainSteps
from quire.speculative.control import FixedControl
from quire.speculative.rests import NoRests
from tests.unit.scheduler.test_draft_effort import Case, Repeats


def test_steps_without_drafts_are_timed_where_none_are_made_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed_ms: list[float] = []
    note_plain = DraftPrices.note_plain

    def noted(self: DraftPrices, num_rows: int, ms: float) -> None:
        timed_ms.append(ms)
        note_plain(self, num_rows, ms)

    monkeypatch.setattr(DraftPrices, "note_plain", noted)
    monkeypatch.setattr(PlainSteps, "begin_if_due", lambda *_, **__: False)
    proposer = Repeats(finds=True)
    case = Case(1, proposer, FixedControl(4, NoRests()))
    case.counts = False
    for times in range(1, 4):
        proposer._finds = True
        case.turn()
        case.num_drafts = 0
        case.turn()
        assert case.num_drafts
        timed_ms.clear()
        proposer._finds, case.step_ms = False, float(times)
        for _ in range(2 * (PLAIN_STEPS + TIMED_STEPS)):
            case.turn()
        assert timed_ms == [times] * TIMED_STEPS
