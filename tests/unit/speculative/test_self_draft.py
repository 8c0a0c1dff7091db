"""SelfProposer over a fake model: drafts in the target's blocks, and how far these reach."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.speculative.control import FixedControl
from quire.speculative.drafter import Drafter
from quire.speculative.passes import DraftLimits
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import no_drafts
from quire.speculative.self_draft import SelfProposer
from tests.unit.speculative.test_draft_model import BLOCK, SLOTS, VOCAB, Case, FakeModel

Int32s = NDArray[np.int32]
BLOCKS = 40


class SelfCase(Case):
    """A proposer in the cache of a target, which computes all known tokens but the last."""

    def __init__(self) -> None:
        super().__init__()
        limits = DraftLimits(SLOTS, BLOCKS, BLOCK, 40, SLOTS)
        clock = count()
        self.model = FakeModel(limits)
        self.proposer = SelfProposer(self.model, limits, lambda: float(next(clock)))
        self.tables = np.arange(SLOTS * 10, dtype=np.int32).reshape(SLOTS, 10)[:, ::-1].copy()

    def note(self, slots: list[int], num_blocks: int = 9) -> None:
        """Compute the known tokens in the target, and note the blocks of `slots`."""
        for slot in slots:
            for position, token in enumerate(self.text(slot)[:-1]):
                block = self.tables[slot, position // BLOCK]
                self.model._pool[block, position % BLOCK] = token
        capacities = np.full(len(slots), num_blocks * BLOCK, np.int32)
        self.proposer.note_kv(np.array(slots), self.tables[slots], capacities)


def test_drafts_follow_the_known_tokens_in_the_blocks_of_the_target() -> None:
    case = SelfCase()
    case.begin(0, 5, 6, 7)
    case.begin(2, 9, 8)
    for accepted in (0, 1, 2, 3, 3, 0, 2):
        expected = [case.answer(0, 3), case.answer(2, 3)]
        case.note([0, 2])
        assert case.propose([0, 2]) == expected
        for slot, drafts in zip((0, 2), expected, strict=True):
            case.append(slot, *drafts[:accepted])
            right = case.answer(slot, 1)[0]
            case.append(slot, right if accepted == 3 else (right + 1) % VOCAB)
    assert all(set(counts.values()) == {1} for counts in case.model.passes), "nothing is caught up"


def test_only_positions_from_the_last_known_token_on_are_written() -> None:
    case = SelfCase()
    case.begin(1, *range(1, 11))
    case.note([1])
    before = case.model._pool.copy()
    case.propose([1], limit=4)  # stores tokens 9 .. 12: the last draft has no KV
    written = [tuple(place) for place in np.argwhere(case.model._pool != before)]
    places = [(case.tables[1, at // BLOCK], at % BLOCK) for at in range(9, 13)]
    assert sorted(written) == sorted((int(block), at) for block, at in places)


@pytest.mark.parametrize(("num_blocks", "possible"), [(0, 0), (2, 0), (3, 3), (9, 6)])
def test_blocks_and_context_bound_the_drafts(num_blocks: int, possible: int) -> None:
    case = SelfCase()
    case.begin(0, *range(1, 11))  # 10 tokens; three blocks hold 12
    slots, limits = np.array([0]), np.array([6], np.int32)
    assert case.proposer.possible(case.known, slots, limits).tolist() == [6], "not known yet"
    case.note([0], num_blocks)
    assert case.proposer.possible(case.known, slots, limits).tolist() == [possible]
    case.note([0], num_blocks)
    assert len(case.propose([0], limit=6)[0]) == possible


def test_the_context_ends_drafts() -> None:
    case = SelfCase()
    case.begin(0, *range(1, 39))
    case.note([0], 10)
    assert case.proposer.possible(case.known, np.array([0]), np.array([6], np.int32)) == [2]


def test_an_entry_behind_the_window_is_no_block() -> None:
    case = SelfCase()
    case.begin(0, *range(1, 11))
    case.tables[0, 0] = -1
    case.note([0])
    assert (case.model._tables[0, :9] >= 0).all()


def test_a_reused_slot_begins_anew() -> None:
    case = SelfCase()
    case.begin(0, 5, 6, 7)
    case.note([0])
    case.propose([0])
    case.proposer.end(0)
    case.begin(0, 9, 8)
    expected = [case.answer(0, 3)]
    case.note([0])
    assert case.propose([0]) == expected


def test_the_drafter_passes_blocks_on() -> None:
    case = SelfCase()

    def report(what: str, **fields: object) -> None:
        raise AssertionError(f"{what}: {fields}")

    drafter = Drafter(
        case.proposer,
        PredictionProposer(SLOTS),
        FixedControl(3),
        num_slots=SLOTS,
        max_drafts=8,
        vocab_size=VOCAB,
        report=report,
    )
    assert drafter.uses_cache
    case.begin(0, 5, 6, 7)
    case.note([0])
    drafter.note_kv(np.array([0]), case.tables[[0]], np.array([4], np.int32))
    found = no_drafts(1, 8)
    case.proposer.propose(case.known, np.array([0]), np.array([8], np.int32), found)
    assert found.counts.tolist() == [2], "position 3 is the last of the noted block"
