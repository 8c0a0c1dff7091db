"""The balance of drafts: what they gained and lost, and how long none are made after losses."""

from __future__ import annotations

import pytest

from quire.speculative.draft_balance import LOSS_SHARE, DraftBalance

STEP_MS = 2.0


def lose(balance: DraftBalance, steps: float) -> int:
    """Note losses of so many steps each until no drafts are allowed; return how many there were."""
    num = 0
    while balance.allows_drafts:
        balance.drafted(-steps * STEP_MS, STEP_MS)
        num += 1
    return num


def rest(balance: DraftBalance) -> int:
    """Return how many steps without drafts it takes until they are allowed again."""
    num = 0
    while not balance.allows_drafts:
        balance.plain(STEP_MS)
        num += 1
    return num


def test_several_failures_are_forgiven_at_first_and_few_later() -> None:
    balance = DraftBalance()
    assert 10 <= lose(balance, 1.0) <= 20
    rest(balance)
    assert lose(balance, 1.0) == 1


@pytest.mark.parametrize("lost", [0.2, 1.0, 2.0])
def test_in_the_long_run_little_is_lost(lost: float) -> None:
    balance, num_lost, num_plain = DraftBalance(), 0, 0
    lose(balance, 2.0)
    for _ in range(50):
        num_plain += rest(balance)
        num_lost += lose(balance, lost)
    assert num_lost * lost / num_plain <= 1.2 * LOSS_SHARE


def test_drafts_that_gain_go_on_and_one_bad_step_ends_nothing() -> None:
    balance = DraftBalance()
    for at in range(200):
        balance.drafted(STEP_MS * (-20.0 if at % 40 == 39 else 0.3), STEP_MS)
        assert balance.allows_drafts


def test_passes_count_in_their_step_and_one_long_pass_ends_nothing() -> None:
    balance = DraftBalance()
    for at in range(200):  # of what was gained, passes take a part
        balance.drafted(0.9 * STEP_MS, STEP_MS, (500.0 if at == 100 else 0.2) * STEP_MS)
        assert balance.allows_drafts
    num = 0
    while balance.allows_drafts:
        balance.drafted(0.9 * STEP_MS, STEP_MS, 1.9 * STEP_MS)
        num += 1
    assert num <= 17


def test_a_long_prompt_is_paid_over_the_steps_that_follow() -> None:
    balance = DraftBalance()
    balance.drafted(0.0, STEP_MS)
    balance.caught_up(100 * STEP_MS)
    for _ in range(200):  # each gains more than its part of that
        balance.drafted(1.7 * STEP_MS, STEP_MS)
        assert balance.allows_drafts
    balance.caught_up(100 * STEP_MS)
    num = 0
    while balance.allows_drafts:  # nothing more is gained
        balance.plain(STEP_MS)
        num += 1
    assert num <= 20
