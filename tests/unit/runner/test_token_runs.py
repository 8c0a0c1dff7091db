"""Rows with several sampled positions: their runs, where these end, and what the mirror keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import WorkerError
from quire.base.grammar import Grammar, GrammarKind
from quire.base.token_table import TokenTable
from quire.runner.batch_builder import sampled_rows
from quire.runner.grammar_rows import Follow, GrammarRows
from quire.runner.row_errors import NOT_FINITE
from quire.runner.slot_tables import SlotTables
from quire.runner.token_runs import TokenRuns, cut_runs
from quire.sampling.batch import TokenChoice
from quire.structured.matcher import MatcherError, TrackerError
from tests.unit.runner.plans import BLOCK_SIZE, admission_of, ints, plan_of, runner_of
from tests.unit.runner.scripted_executor import ScriptedExecutor, next_ids

# Slot 3 computes positions 1 to 4 and samples the last three; slot 1 samples one.
ROWS = [(3, 1, 4, 3), (1, 2, 1, 1)]
ADMISSIONS = (admission_of(3, [10, 11, 12, 13, 14]), admission_of(1, [20, 21, 22]))


def failing_at(*failed: int) -> Any:
    """A choice that finds no token at some positions."""

    def choose(positions: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(np.isin(positions, failed), np.int32(-1), next_ids(positions))

    return choose


@pytest.mark.parametrize(
    ("failed", "counts", "token_ids"),
    [
        ((), [3, 1], [3, 4, 5, 3]),
        ((5,), [2, 1], [3, 4, 3]),
        ((4,), [1, 1], [3, 3]),
    ],
)
def test_a_run_ends_before_the_first_position_without_a_token(
    failed: tuple[int, ...], counts: list[int], token_ids: list[int]
) -> None:
    runner = runner_of(ScriptedExecutor(failing_at(*failed)))
    result = runner.collect(runner.submit(plan_of(1, ROWS, admissions=ADMISSIONS)))
    assert result.token_counts.tolist() == counts
    assert result.token_ids.tolist() == token_ids
    assert result.errors == ()
    known = runner.tables.tokens
    assert known.tokens[3, 3 : 3 + counts[0]].tolist() == token_ids[: counts[0]]
    assert not known.tokens[3, 5:].any() or counts[0] == 3
    assert known.tokens[1, 3] == 3


def test_a_row_fails_with_its_first_position() -> None:
    runner = runner_of(ScriptedExecutor(failing_at(3)))
    plan = plan_of(1, [(3, 1, 4, 3), (1, 3, 1, 1)], admissions=ADMISSIONS)
    result = runner.collect(runner.submit(plan))
    assert result.token_counts.tolist() == [0, 1]
    assert result.token_ids.tolist() == [4]
    assert [(error.row, error.message) for error in result.errors] == [(0, NOT_FINITE)]


@pytest.mark.parametrize(
    ("follow", "counts", "token_ids", "complete"),
    [
        (Follow(forced={0: [40, 41]}), [3, 1], [5, 40, 41, 8], []),
        (Follow(forced={1: [40]}), [3, 1], [5, 6, 40, 8], []),
        (Follow(complete=[1]), [2, 1], [5, 6, 8], [True, False]),
        (Follow(forced={0: [40]}, complete=[0]), [2, 1], [5, 40, 8], [True, False]),
        (Follow(forced={3: [40]}, complete=[3]), [3, 2], [5, 6, 7, 8, 40], [False, True]),
    ],
)
def test_a_run_ends_with_forced_tokens_and_with_the_answer(
    follow: Follow, counts: list[int], token_ids: list[int], complete: list[bool]
) -> None:
    tables = SlotTables(num_slots=8, max_model_len=64, block_size=BLOCK_SIZE)
    plan = plan_of(1, ROWS, admissions=ADMISSIONS)
    tables.apply(plan)
    sampled = sampled_rows(plan, tables)
    runs = TokenRuns(
        counts=plan.sample_counts,
        slots=sampled.slots,
        positions=sampled.positions(plan),
        stays=None,
        choice=TokenChoice(
            token_ids=ints(5, 6, 7, 8),
            logprobs=np.zeros(4, np.float32),
            top_ids=np.zeros((4, 0), np.int32),
            top_logprobs=np.zeros((4, 0), np.float32),
        ),
        listed=np.zeros((4, 0), np.float32),
    )
    cut = cut_runs(runs, sampled, None, follow)
    assert cut.counts.tolist() == counts
    assert cut.choice.token_ids.tolist() == token_ids
    assert cut.complete.tolist() == complete
    assert cut.positions[: counts[0]].tolist() == list(range(3, 3 + counts[0]))
    assert cut.slots.tolist() == [3] * counts[0] + [1] * counts[1]


class CountingMatcher:
    """Allows each token one higher than the last, or 49, which ends the answer; 9 completes it."""

    eos_ids = (49,)

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if self.taken and token_id != self.taken[-1] + 1:
                raise MatcherError(f"{token_id} does not follow {self.taken[-1]}")
            self.taken.append(token_id)

    replay = take

    def go_back(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def copy(self) -> CountingMatcher:
        twin = CountingMatcher()
        twin.taken = self.taken.copy()
        return twin

    def mask(self) -> NDArray[np.uint32]:
        words = np.zeros(2, np.uint32)
        for token_id in (self.taken[-1] + 1, 49):
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words

    def ends_with(self, token_id: int) -> bool:
        return token_id in self.eos_ids

    def forced(self, most: int) -> list[int]:
        return []

    @property
    def is_complete(self) -> bool:
        return bool(self.taken) and self.taken[-1] == 9


class OneMatcher:
    def __init__(self) -> None:
        self.made = CountingMatcher()

    def matcher(self, grammar: Grammar) -> Any:
        return self.made

    def replacement(self, grammar: Grammar, failed: Any) -> Any:
        raise WorkerError("there is no other matcher")


def grammar_rows_of(source: OneMatcher, drafts: list[int]) -> GrammarRows:
    """Return rows with a matcher in slot 2, after the token 6 at position 2."""
    tokens = TokenTable(4, 32)
    rows = GrammarRows(4, tokens, source)
    admission = admission_of(
        2,
        [1, 1, 6],
        num_prompt_tokens=2,
        structured_outputs=Grammar(kind=GrammarKind.REGEX, text="x"),
    )
    tokens.admit(2, admission.token_ids, 2)
    rows.admit(admission)
    tokens.tokens[2, 3 : 3 + len(drafts)] = drafts
    return rows


SLOTS, POSITIONS = np.array([2, 2, 2]), ints(3, 4, 5)


@pytest.mark.parametrize(
    ("token_ids", "taken", "complete"),
    [
        ([7, 8, 9], [6, 7, 8, 9], [2]),  # all three were proposed
        ([7, -1, -1], [6, 7], []),  # the proposal after 7 was another
        ([9, 10, 11], [6], []),  # not allowed after 6
        ([7, 49, 3], [6, 7], []),  # 49 ends the answer
    ],
)
def test_a_matcher_follows_the_tokens_of_a_run(
    token_ids: list[int], taken: list[int], complete: list[int]
) -> None:
    """Masks of later positions need proposed tokens, which the matcher itself does not take."""
    source = OneMatcher()
    rows = grammar_rows_of(source, [7, 8])
    masks = rows.begin(SLOTS, POSITIONS)
    assert masks is not None
    assert masks.result().rows.tolist() == [0, 1, 2]
    assert source.made.taken == [6]
    follow = rows.follow(SLOTS, POSITIONS, ints(*token_ids))
    assert source.made.taken == taken
    assert follow.complete == complete
    assert list(follow.failed) == ([0] if token_ids[0] == 9 else [])
    rows.close()


def test_what_the_tracker_refuses_compiles_no_other_matcher() -> None:
    class Refusing(CountingMatcher):
        def take(self, token_ids: list[int]) -> None:
            raise TrackerError("an item is repeated")

    tokens, source = TokenTable(4, 32), OneMatcher()
    source.made, rows = Refusing(), GrammarRows(4, tokens, source)
    grammar = Grammar(kind=GrammarKind.REGEX, text="x")
    admission = admission_of(2, [1, 1, 6], num_prompt_tokens=3, structured_outputs=grammar)
    tokens.admit(2, admission.token_ids, 3)
    rows.admit(admission)
    follow = rows.follow(np.array([2]), ints(3), ints(7))
    assert follow.failed == {0: "an item is repeated"}
    rows.close()


@pytest.mark.parametrize(
    ("drafts", "mask_rows"),
    [
        ([7, 8], [0, 1, 2]),
        ([7, 9], [0, 1, -1]),  # 9 is forbidden after 7
        ([8, 9], [0, -1, -1]),
        ([49, 7], [0, -1, -1]),  # nothing follows the end of the answer
    ],
)
def test_drafts_end_at_the_first_one_the_grammar_forbids(
    drafts: list[int], mask_rows: list[int]
) -> None:
    rows = grammar_rows_of(OneMatcher(), drafts)
    future = rows.begin(SLOTS, POSITIONS)
    assert future is not None
    masks = future.result()
    assert masks.rows.tolist() == mask_rows
    assert list(masks.failed) == [place for place, row in enumerate(mask_rows) if row < 0]
    for row, allowed in enumerate((7, 8, 9)[: max(mask_rows) + 1]):
        assert int(masks.words[row, 0]) == 1 << allowed
    rows.close()
