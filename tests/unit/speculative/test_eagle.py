"""EagleProposer over a fake head: which rows are computed, and from what."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.rare_records import Speculation
from quire.base.records import NO_INTS, Request
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.speculative.draft_heads import HeadRows
from quire.speculative.eagle import HEAD, EagleProposer
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.passes import DraftLimits
from quire.speculative.proposer import Drafts, no_drafts

Int32s = NDArray[np.int32]
SLOTS, BLOCK, LENGTH = 4, 4, 60
FROM_TARGET, FED_BACK = False, True


def features_of(slot: int, position: int) -> list[float]:
    """Return the target's hidden state, which names slot and position."""
    return [float(slot), float(position)]


class FakeHead:
    """Keeps (token, feature) rows in blocks, checks the target's, and samples from all it has."""

    def __init__(self, num_blocks: int) -> None:
        self.tokens = TokenTable(SLOTS, LENGTH)
        self.passes: list[tuple[bool, dict[int, tuple[int, int]]]] = []
        self.fails = False
        self._tables = np.zeros((SLOTS, LENGTH), np.int32)
        self._pool = np.full((num_blocks, BLOCK, 2), -1.0)

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        self.tokens.admit(slot, NO_INTS, num_prompt_tokens)

    def retire(self, slot: int) -> None:
        self._tables[slot] = 0

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        self._tables[slot, first : first + len(blocks)] = blocks

    def compute(self, head: int, rows: HeadRows) -> tuple[Int32s, NDArray[np.float32]]:
        if self.fails:
            raise RuntimeError("no memory")
        spans = zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)
        assert head == HEAD
        self.passes.append((rows.fed_back, dict(zip(rows.slots.tolist(), spans, strict=True))))
        sampled, hidden, at = [], [], 0
        for slot, start, num, position in zip(
            rows.slots.tolist(),
            rows.starts.tolist(),
            rows.counts.tolist(),
            rows.positions.tolist(),
            strict=True,
        ):
            for row in range(start, start + num):
                token, feature = int(rows.token_ids[at]), rows.hidden_states[at]
                target = position - (start + num) - 1 + row  # the position the row stands for
                assert token == self.tokens.tokens[slot, target + 1]
                if not rows.fed_back:
                    assert feature.tolist() == features_of(slot, target)
                block = self._tables[slot, row // BLOCK]
                self._pool[block, row % BLOCK] = token, feature[1]
                at += 1
            held = [
                self._pool[self._tables[slot, row // BLOCK], row % BLOCK]
                for row in range(start + num)
            ]
            assert (np.array(held) >= 0).all(), "a row is attended that was not computed"
            sampled.append(int(sum(token for token, _ in held)) % 90 + 1)
            hidden.append([-1.0, float(position)])
        return np.array(sampled, np.int32), np.array(hidden, np.float32)

    def close(self) -> None:
        self.passes.clear()


class Rig:
    """A proposer with what the target would leave behind."""

    def __init__(
        self, *, num_blocks: int = 40, max_tokens: int = 64, max_model_len: int = LENGTH
    ) -> None:
        self.head = FakeHead(num_blocks)
        self.ring = HiddenStateRing(200, 2, SLOTS)
        limits = DraftLimits(SLOTS, num_blocks, BLOCK, max_model_len, max_tokens)
        times = count()
        self.proposer = EagleProposer(self.head, self.ring, limits, lambda: float(next(times)))
        self.known = TokenTable(SLOTS, LENGTH)
        self.tenancy = self.ring.tenancy

    def begin(self, slot: int, num_tokens: int, *, computed_from: int = 0) -> None:
        """Admit a request of which the target has computed all but the last token."""
        self.known.admit(slot, np.arange(3, 3 + num_tokens, dtype=np.int32), num_tokens)
        self.tenancy[slot] += 1
        request = Request(
            request_id=f"r{slot}",
            group_id="g",
            stream=0,
            prompt_ids=np.zeros(2, np.int32),
            sampling=SamplingParams(seed=0),
            stop_ids=(),
            max_total_tokens=LENGTH,
            arrival_ms=0.0,
            speculation=Speculation(max_drafts=8),
        )
        self.proposer.begin(slot, request)
        self.computed(slot, computed_from, num_tokens - 1)

    def computed(self, slot: int, first: int, end: int) -> None:
        """Leave hidden states of positions first .. end - 1."""
        positions = np.arange(first, end, dtype=np.int32)
        rows = np.array([features_of(slot, at) for at in range(first, end)], np.float32)
        slots = np.full(len(positions), slot)
        self.ring.put(slots, self.tenancy[slots], positions, rows.reshape(-1, 2))

    def append(self, slot: int, tokens: list[int]) -> None:
        """Accept tokens; the target computed all but the last of them."""
        length = int(self.known.lengths[slot])
        positions = np.arange(length, length + len(tokens), dtype=np.int32)
        self.known.put(np.full(len(tokens), slot), positions, np.array(tokens, np.int32))
        self.computed(slot, length - 1, length + len(tokens) - 1)

    def propose(self, slots: list[int], limit: int = 3) -> Drafts:
        drafts = no_drafts(len(slots), 8)
        limits = np.full(len(slots), limit, np.int32)
        self.proposer.propose(self.known, np.array(slots), limits, drafts)
        return drafts

    def possible(self, slot: int, limit: int = 3) -> int:
        limits = np.array([limit], np.int32)
        return int(self.proposer.possible(self.known, np.array([slot]), limits)[0])


def test_drafts_follow_from_all_rows_and_then_from_own_hidden_states() -> None:
    rig = Rig()
    rig.begin(0, 6)
    rig.begin(2, 9)
    drafts = rig.propose([0, 2])
    assert drafts.counts.tolist() == [3, 3]
    assert rig.head.passes == [
        (FROM_TARGET, {0: (0, 5), 2: (0, 8)}),
        (FED_BACK, {0: (5, 1), 2: (8, 1)}),
        (FED_BACK, {0: (6, 1), 2: (9, 1)}),
    ]


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_rows_of_guesses_are_computed_again_from_the_target(num_right: int) -> None:
    rig = Rig()
    rig.begin(1, 6)
    guesses = rig.propose([1]).ids[0, :3].tolist()
    rig.append(1, [*guesses[:num_right], 2])
    rig.head.passes.clear()
    drafts = rig.propose([1])
    assert rig.head.passes[0] == (FROM_TARGET, {1: (5, num_right + 1)})
    fresh = Rig()
    fresh.known = rig.known
    length = int(rig.known.lengths[1])
    tokens = rig.known.tokens[1, :length].copy()
    fresh.begin(1, length)
    fresh.known.tokens[1, :length] = tokens
    assert fresh.propose([1]).ids.tolist() == drafts.ids.tolist()


def test_cached_positions_are_left_out_and_positions_are_counted_from_there() -> None:
    rig = Rig()
    rig.begin(0, 20, computed_from=12)
    assert rig.possible(0) == 3
    assert rig.propose([0]).counts.tolist() == [3]
    assert rig.head.passes[0] == (FROM_TARGET, {0: (0, 7)})
    rig.append(0, [5])
    rig.propose([0])
    assert rig.head.passes[-3] == (FROM_TARGET, {0: (7, 1)})


def test_without_the_newest_hidden_state_there_are_no_drafts_and_later_a_new_origin() -> None:
    rig = Rig()
    rig.begin(0, 8)
    rig.propose([0])
    length = int(rig.known.lengths[0])
    rig.known.put(np.array([0]), np.array([length], np.int32), np.array([4], np.int32))
    assert rig.possible(0) == 0
    assert rig.propose([0]).counts.tolist() == [0]
    rig.append(0, [6, 7])  # positions 8 and 9 are there, 7 is not
    rig.head.passes.clear()
    assert rig.propose([0]).counts.tolist() == [3]
    assert rig.head.passes[0] == (FROM_TARGET, {0: (0, 2)})


def test_rows_begin_anew_where_the_head_counts_no_further() -> None:
    rig = Rig(max_model_len=10)
    rig.begin(0, 11)
    assert rig.propose([0]).counts.tolist() == [3]  # 5 rows of 10
    assert rig.head.passes[0] == (FROM_TARGET, {0: (0, 5)})
    for token in range(5):
        rig.append(0, [token])
        counts = rig.propose([0]).counts.tolist()
        assert counts == [min(3, 10 - (6 + token) + 1)]
    rig.append(0, [3])
    rig.head.passes.clear()
    assert rig.propose([0]).counts.tolist() == [3]
    assert rig.head.passes[0] == (FROM_TARGET, {0: (0, 5)})


def test_rows_of_an_earlier_request_are_not_read() -> None:
    rig = Rig()
    rig.begin(0, 9)
    rig.proposer.end(0)
    rig.begin(0, 9, computed_from=6)
    rig.propose([0])
    assert rig.head.passes[0] == (FROM_TARGET, {0: (0, 2)})


def test_long_prompts_are_computed_over_several_calls() -> None:
    rig = Rig(max_tokens=16)
    rig.begin(0, 40)
    rig.begin(1, 4)
    counts = [rig.propose([0, 1]).counts.tolist() for _ in range(4)]
    assert counts[0] == [0, 3]
    assert counts[-1] == [3, 3]
    assert rig.proposer.behind_ms(rig.known, np.array([0, 1])).tolist() == [0.0, 0.0]


def test_blocks_are_taken_as_needed_and_given_back() -> None:
    rig = Rig(num_blocks=4)
    rig.begin(0, 9)
    assert rig.propose([0]).counts.tolist() == [3]
    rig.begin(1, 9)
    assert rig.propose([1]).counts.tolist() == [0]  # 8 rows need two blocks
    rig.proposer.end(0)
    assert rig.propose([1]).counts.tolist() == [3]
    rig.proposer.end(1)
    assert rig.proposer.blocks.num_free == 4


def test_a_failure_is_passed_on_and_changes_nothing() -> None:
    rig = Rig()
    rig.begin(0, 6)
    rig.head.fails = True
    with pytest.raises(RuntimeError):
        rig.propose([0])
    rig.head.fails = False
    assert rig.propose([0]).counts.tolist() == [3]


def test_rows_displaced_while_drafts_are_made_cost_one_request_one_call() -> None:
    rig = Rig()
    rig.begin(0, 8)
    rig.begin(1, 8)
    take = rig.ring.take

    def late(slots: NDArray[np.intp], positions: Int32s) -> tuple[NDArray[np.intp], object]:
        """Displace all rows of slot 0 just before, as the target's thread may."""
        rig.ring.take = take  # type: ignore[method-assign]
        rig.computed(1, 0, 7)
        at = np.arange(200 - 14, dtype=np.int32)
        rig.ring.put(np.full(len(at), 3), np.zeros(len(at), np.int64), at, np.zeros((len(at), 2)))
        rig.computed(1, 0, 7)
        return take(slots, positions)

    rig.ring.take = late  # type: ignore[method-assign, assignment]
    assert rig.propose([0, 1]).counts.tolist() == [0, 3]
    rig.computed(0, 0, 7)
    assert rig.propose([0, 1]).counts.tolist() == [3, 3]


def test_a_request_never_drafts_from_rows_of_the_one_before_it_in_its_slot() -> None:
    rig = Rig()
    rig.begin(0, 20)
    assert rig.propose([0]).counts.tolist() == [3]
    rig.begin(0, 12, computed_from=11)  # all but its last token was cached
    assert rig.possible(0) == 0
    assert rig.propose([0]).counts.tolist() == [0]
    rig.append(0, [5])
    assert rig.propose([0]).counts.tolist() == [3]
    assert rig.head.passes[-3][1] == {0: (0, 1)}


def paused(rig: Rig, slot: int, num_lacking: int, num_kept: int) -> None:
    """Append tokens of which the target's hidden states are not kept, and then some of which they
    are."""
    rig.ring.pause(1)
    assert not rig.ring.keeps(1, is_decode=True)
    rig.ring.note_gap(1)
    length = int(rig.known.lengths[slot])
    positions = np.arange(length, length + num_lacking, dtype=np.int32)
    rig.known.put(np.full(num_lacking, slot), positions, np.full(num_lacking, 5, np.int32))
    for _ in range(num_kept):
        rig.append(slot, [6])


def test_after_a_pause_no_more_rows_are_behind_than_hidden_states_were_kept_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EagleProposer, "kept_steps", 4)
    rig = Rig()
    rig.begin(0, 6)
    rig.begin(1, 6)
    rig.propose([0, 1])
    paused(rig, 0, num_lacking=20, num_kept=6)
    rig.append(1, [5, 6, 7, 8])
    token_ms = rig.proposer.pass_times.token_ms
    behind_ms = rig.proposer.behind_ms(rig.known, np.array([0, 1]))
    assert behind_ms.tolist() == [(6 - 2) * token_ms, (4 - 2) * token_ms]
    rig.head.passes.clear()
    assert rig.propose([0, 1]).counts.tolist() == [3, 3]
    assert rig.head.passes[0] == (FROM_TARGET, {0: (0, 6), 1: (5, 4)})


def test_without_free_blocks_a_slot_with_a_gap_drafts_in_those_that_it_has() -> None:
    rig = Rig(num_blocks=4)
    rig.begin(0, 9)
    rig.begin(1, 3)
    assert rig.propose([0, 1]).counts.tolist() == [3, 3]
    assert not rig.proposer.blocks.num_free
    paused(rig, 0, num_lacking=12, num_kept=4)
    assert rig.possible(0) == 3
    assert rig.propose([0]).counts.tolist() == [3]
    paused(rig, 1, num_lacking=2, num_kept=6)  # more than its block holds
    assert rig.possible(1) == 0
