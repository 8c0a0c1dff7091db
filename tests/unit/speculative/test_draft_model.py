"""ModelProposer over a fake draft model: what is computed, and what becomes of blocks."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.rare_records import Speculation
from quire.base.records import NO_INTS, Request
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.speculative.draft_model import ModelProposer
from quire.speculative.pass_times import MAX_STALL_TIMES
from quire.speculative.passes import DraftLimits
from quire.speculative.proposer import no_drafts

Int32s = NDArray[np.int32]
Index = NDArray[np.intp]
SLOTS, BLOCK, VOCAB = 4, 4, 97


def following(tokens: list[int]) -> int:
    """Return what the fake model samples after `tokens`: it depends on each of them."""
    return sum((at + 3) * token for at, token in enumerate(tokens)) % VOCAB


class FakeModel:
    """Keeps the tokens of which it has "KV" in blocks, and samples from these alone."""

    def __init__(self, limits: DraftLimits) -> None:
        self.tokens = TokenTable(limits.num_slots, limits.max_model_len)
        self.passes: list[dict[int, int]] = []  # tokens of each slot
        self.fails_on = -1
        self.is_closed = False
        self._pool: Int32s = np.full((limits.num_blocks, BLOCK), -1, np.int32)
        self._tables = np.zeros((limits.num_slots, limits.max_model_len // BLOCK + 1), np.int32)

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        self.tokens.admit(slot, NO_INTS, num_prompt_tokens)

    def retire(self, slot: int) -> None:
        self._tables[slot] = 0

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        self._tables[slot, first : first + len(blocks)] = blocks

    def compute(
        self, slots: Index, starts: Int32s, counts: Int32s, samples: NDArray[np.bool_]
    ) -> Int32s:
        if self.fails_on in slots:
            raise RuntimeError("no memory")
        self.passes.append(dict(zip(slots.tolist(), counts.tolist(), strict=True)))
        sampled = np.full(len(slots), -1, np.int32)
        for row, slot in enumerate(slots.tolist()):
            end = int(starts[row] + counts[row])
            for position in range(int(starts[row]), end):
                block = self._tables[slot, position // BLOCK]
                self._pool[block, position % BLOCK] = self.tokens.tokens[slot, position]
            held = [self._pool[self._tables[slot, at // BLOCK], at % BLOCK] for at in range(end)]
            if samples[row]:
                sampled[row] = following([int(token) for token in held])
        return sampled

    def close(self) -> None:
        self.is_closed = True


class Case:
    """A proposer, and the known tokens of requests that follow the same rule, or another one."""

    def __init__(self, num_blocks: int = 40, max_model_len: int = 40, max_tokens: int = 16) -> None:
        limits = DraftLimits(SLOTS, num_blocks, BLOCK, max_model_len, max_tokens)
        self.model = FakeModel(limits)
        self.proposer = ModelProposer(self.model, limits, lambda: float(next(clock)))
        self.known = TokenTable(SLOTS, 64)
        clock = count()

    def begin(self, slot: int, *token_ids: int) -> None:
        self.known.admit(slot, np.array(token_ids, np.int32), len(token_ids))
        request = Request(
            request_id=f"r{slot}",
            group_id=f"r{slot}",
            stream=0,
            prompt_ids=np.array(token_ids, np.int32),
            sampling=SamplingParams(seed=0),
            stop_ids=(),
            max_total_tokens=64,
            arrival_ms=0.0,
            speculation=Speculation(max_drafts=8),
        )
        self.proposer.begin(slot, request)

    def text(self, slot: int) -> list[int]:
        return [int(id_) for id_ in self.known.tokens[slot, : self.known.lengths[slot]]]

    def append(self, slot: int, *token_ids: int) -> None:
        at = int(self.known.lengths[slot])
        positions = np.arange(at, at + len(token_ids), dtype=np.int32)
        index = np.full(len(token_ids), slot, np.intp)
        self.known.put(index, positions, np.array(token_ids, np.int32))

    def propose(self, slots: list[int], limit: int = 3) -> list[list[int]]:
        found = no_drafts(len(slots), 8)
        limits = np.full(len(slots), limit, np.int32)
        self.proposer.propose(self.known, np.array(slots), limits, found)
        return [
            [int(id_) for id_ in ids[:num]]
            for ids, num in zip(found.ids, found.counts, strict=True)
        ]

    def answer(self, slot: int, length: int) -> list[int]:
        """Return the next tokens by the rule of the fake model."""
        tokens = self.text(slot)
        for _ in range(length):
            tokens.append(following(tokens))
        return tokens[-length:]


def test_drafts_follow_the_known_tokens_whatever_was_accepted_before() -> None:
    case = Case()
    case.begin(0, 5, 6, 7)
    case.begin(1, 9, 8)
    for accepted in (0, 1, 2, 3, 3, 0, 2):
        expected = [case.answer(0, 3), case.answer(1, 3)]
        assert case.propose([0, 1]) == expected
        for slot, drafts in enumerate(expected):
            case.append(slot, *drafts[:accepted])
            right = case.answer(slot, 1)[0]
            case.append(slot, right if accepted == 3 else (right + 1) % VOCAB)


def test_only_what_lacks_kv_is_computed() -> None:
    case = Case()
    case.begin(0, 5, 6, 7, 8, 9)
    first = case.propose([0])[0]
    assert case.model.passes == [{0: 5}, {0: 1}, {0: 1}]
    case.model.passes.clear()
    case.append(0, *first, 1)  # all right: the last draft has no KV
    second = case.propose([0])[0]
    assert case.model.passes == [{0: 2}, {0: 1}, {0: 1}]
    case.model.passes.clear()
    case.append(0, second[0], (second[1] + 1) % VOCAB)
    case.propose([0], limit=1)
    assert case.model.passes == [{0: 1}]
    case.model.passes.clear()
    case.propose([0], limit=1)  # the drafts were not used: nothing new is known
    assert case.model.passes == [{0: 1}]


def test_a_batch_of_slots_takes_one_pass_per_draft() -> None:
    case = Case(max_tokens=8)
    for slot in range(SLOTS):
        case.begin(slot, 3 + slot, 4)
    expected = [case.answer(slot, 3) for slot in range(SLOTS)]
    assert case.propose([0, 1, 2, 3]) == expected
    assert case.model.passes == [dict.fromkeys(range(4), 2), *[dict.fromkeys(range(4), 1)] * 2]


def test_a_long_prompt_catches_up_over_calls_and_delays_no_other_request() -> None:
    case = Case(max_tokens=8)
    case.begin(0, *range(1, 21))
    case.begin(1, 7, 7)
    drafts = []
    for _ in range(4):
        right = case.answer(1, 3)
        drafts.append(case.propose([0, 1]))
        assert drafts[-1][1] == right
        case.append(1, right[0])
    assert [bool(of_call[0]) for of_call in drafts] == [False, False, True, True]
    assert drafts[3][0] == case.answer(0, 3)
    assert all(sum(counts.values()) <= 8 for counts in case.model.passes)


def test_catching_up_is_bounded_by_time_but_goes_on() -> None:
    case = Case(max_tokens=36)
    case.begin(0, *range(1, 31))
    case.begin(1, *range(1, 31))
    case.propose([0], limit=1)  # a pass takes one tick of the clock, whatever it computes
    assert case.proposer.behind_ms(case.known, np.array([0, 1])).tolist() == [0, 28 / 30]
    case.proposer.catch_up_ms = 0.6  # 18 of these 30 tokens
    assert [case.propose([1], limit=1), case.propose([1], limit=1)] == [[[]], [case.answer(1, 1)]]
    assert case.model.passes == [{0: 30}, {1: 20}, {1: 10}]
    case.proposer.catch_up_ms = 0.0
    case.begin(1, *range(2, 32))
    case.propose([1], limit=1)
    assert case.model.passes[-1] == {1: 18}


def test_requests_without_blocks_have_no_drafts_and_get_those_that_come_free() -> None:
    case = Case(num_blocks=3)
    case.begin(0, *range(1, 7))  # two blocks with their drafts
    case.begin(1, 1, 2)  # one
    case.begin(2, 4, 4)
    assert [len(drafts) for drafts in case.propose([0, 1, 2])] == [3, 3, 0]
    assert case.proposer.blocks.num_free == 0
    room = case.proposer.possible(case.known, np.array([0, 1, 2]), np.full(3, 8, np.int32))
    assert room.tolist() == [3, 3, 0]
    case.proposer.end(0)
    assert case.propose([1, 2]) == [case.answer(1, 3), case.answer(2, 3)]
    for slot in (1, 2):
        case.proposer.end(slot)
    assert case.proposer.blocks.num_free == 3


def test_a_preempted_request_begins_again_with_what_it_had_generated() -> None:
    case = Case()
    case.begin(0, 5, 6, 7)
    case.append(0, *case.propose([0])[0])
    resumed = case.text(0)
    case.proposer.end(0)
    case.begin(0, 1, 1, 1)
    case.propose([0])
    case.proposer.end(0)
    case.begin(2, *resumed)
    assert case.propose([2]) == [case.answer(2, 3)]


def test_proposing_ends_with_the_context_of_the_draft_model() -> None:
    case = Case(max_model_len=8)
    case.begin(0, 1, 2, 3, 4, 5, 6)
    assert case.propose([0]) == [case.answer(0, 2)]
    case.append(0, 9, 9)
    assert case.propose([0]) == [[]]
    case.append(0, 9)
    assert case.propose([0]) == [[]]
    room = case.proposer.possible(case.known, np.array([0]), np.array([3], np.int32))
    assert room.tolist() == [0]


def test_a_failed_pass_leaves_a_state_that_goes_on() -> None:
    case = Case()
    case.begin(0, 5, 6, 7)
    case.begin(1, 5, 5)
    case.propose([0, 1])
    case.append(0, 2)
    case.append(1, 3)
    case.model.fails_on = 1
    with pytest.raises(RuntimeError, match="no memory"):
        case.propose([0, 1])
    assert case.propose([0]) == [case.answer(0, 3)]
    case.model.fails_on = -1
    assert case.propose([1]) == [case.answer(1, 3)]


def test_times_of_passes_are_learned_without_those_over_prompts() -> None:
    case = Case()
    case.begin(0, *range(1, 10))
    assert case.proposer.pass_ms(2).tolist() == [0, 0, 0]
    case.propose([0], limit=1)
    assert case.proposer.pass_ms(2).tolist() == [0, 0, 0]
    case.append(0, 1)
    case.propose([0], limit=2)
    assert case.proposer.pass_ms(2).tolist() == [0, 1, 1]
    assert case.proposer.drafting_ms > 0
    case.proposer.close()
    assert case.model.is_closed


def test_passes_that_are_made_to_be_timed_count_nowhere() -> None:
    case = Case()
    case.begin(0, *range(1, 12))
    case.propose([0])
    assert case.proposer.catching_up_ms > 0.0
    case.proposer.begin_to_count()
    assert case.proposer.drafting_ms == case.proposer.catching_up_ms == 0.0
    assert case.proposer.pass_ms(1)[1] > 0.0


def test_what_holds_up_a_pass_over_known_tokens_counts_little() -> None:
    """Each reading of the clock is a millisecond later, and once ten seconds."""
    case, stalls = Case(), iter([0.0] * 6 + [10_000.0] + [0.0] * 100)
    ms = 0.0

    def now_ms() -> float:
        nonlocal ms
        ms += 1.0 + next(stalls)
        return ms

    case.proposer = ModelProposer(case.model, DraftLimits(SLOTS, 40, BLOCK, 40, 16), now_ms)
    case.begin(0, *range(1, 12))
    case.propose([0], limit=1)
    usual_ms = case.proposer.catching_up_ms
    assert 0.0 < usual_ms < 1.0
    case.begin(1, *range(1, 12))
    case.propose([1], limit=1)
    assert case.proposer.drafting_ms > 10_000.0
    assert 2 * usual_ms < case.proposer.catching_up_ms <= (1 + MAX_STALL_TIMES) * usual_ms
