"""The balance of drafts: what they gained and lost, and how long none are made after losses."""

from __future__ import annotations

import numpy as np
import pytest

from quire.speculative.draft_balance import FIRST_STEPS, LOSS_SHARE, MAX_STEPS, DraftBalance

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
    assert 8 <= lose(balance, 1.0) <= 14
    rest(balance)
    assert lose(balance, 1.0) == 1


def test_steps_noted_at_once_earn_what_they_earn_one_by_one() -> None:
    found = []
    for num_steps in (1, 3, 16):
        balance, num = DraftBalance(), 0
        lose(balance, 1.0)
        while not balance.allows_drafts:
            balance.plain(STEP_MS, num_steps)
            num += num_steps
        found.append(num)
    assert max(found) - min(found) <= 16


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


def test_no_more_is_invested_than_was_gained_and_the_first_is_always_tried() -> None:
    balance, behind_ms = DraftBalance(), STEP_MS * np.array([40.0, 3.0, 0.0, 4.0, 30.0])
    assert balance.affords(behind_ms, STEP_MS).tolist() == [False, True, True, True, False]
    assert balance.affords(behind_ms[:1], STEP_MS).tolist() == [True]  # nothing was tried yet
    balance.caught_up((FIRST_STEPS - 4.0) * STEP_MS)
    assert balance.affords(behind_ms, STEP_MS).tolist() == [False, True, True, False, False]
    balance.drafted(0.0, STEP_MS)
    assert balance.affords(behind_ms[:1], STEP_MS).tolist() == [False]


def test_where_none_can_be_afforded_drafts_end_until_the_cheapest_can_be() -> None:
    balance, steps = DraftBalance(), 1.5 * MAX_STEPS
    balance.drafted(0.0, STEP_MS)
    behind_ms = STEP_MS * np.array([2 * steps, steps])
    assert not balance.affords(behind_ms, STEP_MS).any()
    assert not balance.allows_drafts
    assert not balance.is_settled
    num = rest(balance)
    assert 0.9 * (steps - FIRST_STEPS) <= LOSS_SHARE * num <= 1.1 * (steps - FIRST_STEPS)
    assert balance.affords(behind_ms, STEP_MS).tolist() == [False, True]
    assert not balance.affords(behind_ms[:1], STEP_MS).any()
    balance.reconsider()  # another request may be cheaper
    assert rest(balance) <= 8


def test_what_ended_drafts_that_paid_may_be_over_soon() -> None:
    balance = DraftBalance()
    for _ in range(30):
        balance.drafted(0.3 * STEP_MS, STEP_MS)
    lose(balance, 1.0)
    assert rest(balance) <= 40
    lengths = []
    for _ in range(4):  # it is not
        lose(balance, 1.0)
        lengths.append(rest(balance))
    assert lengths == sorted(lengths)
    assert lengths[-1] >= 0.9 / LOSS_SHARE
    for _ in range(10):  # now it is
        balance.drafted(0.3 * STEP_MS, STEP_MS)
    lose(balance, 1.0)
    assert rest(balance) <= 40


def failing() -> DraftBalance:
    """Return a balance after drafts that failed again and again."""
    balance = DraftBalance()
    for _ in range(6):
        lose(balance, 2.0)
        rest(balance)
    lose(balance, 2.0)
    return balance


def test_other_requests_and_another_batch_are_reasons_to_try_sooner() -> None:
    alone = rest(failing())
    begun = failing()
    begun.reconsider()
    assert rest(begun) <= alone / 4
    smaller, num = failing(), 0
    while not smaller.allows_drafts:
        smaller.plain(STEP_MS / 4)
        num += 1
    assert num <= alone / 4


def test_many_changes_cost_no_more_than_two_percent() -> None:
    balance, num_lost, num_plain = failing(), 0, 0
    for number in range(4000):
        if balance.allows_drafts:
            balance.drafted(-2.0 * STEP_MS, STEP_MS)
            num_lost += 1
        else:
            balance.plain(STEP_MS * (4 if number % 16 < 8 else 1))
            balance.reconsider()
            num_plain += 1
    assert 0 < 2 * num_lost <= 0.02 * num_plain


def test_how_many_steps_earn_a_trial_follows_how_long_they_take() -> None:
    balance = DraftBalance()
    balance.drafted(0.0, STEP_MS)
    assert not balance.affords(STEP_MS * np.array([2.0 * FIRST_STEPS]), STEP_MS).any()
    said: list[int] = []
    while not balance.allows_drafts:
        said.append(balance.steps_to_earn)
        balance.plain(1.4 * STEP_MS)
    assert len(said) > 512
    assert all(abs(at + num - len(said)) <= 64 for at, num in enumerate(said) if at >= 256)
