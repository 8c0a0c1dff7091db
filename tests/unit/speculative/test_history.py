"""Prompt lookup with earlier answers: of the same tenant and salt only, bounded, the newest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire._native import SuffixIndex, TokenHistory
from quire.base.rare_records import Speculation
from quire.base.records import NO_INTS, Request
from quire.base.sampling_params import SamplingParams
from quire.base.token_table import TokenTable
from quire.speculative.history import MAX_HISTORIES, HistoryProposer, history_bytes
from quire.speculative.plain_history import PlainTokenHistory
from quire.speculative.proposer import no_drafts
from quire.speculative.suffix import PlainSuffixIndex

NUM_SLOTS, MAX_DRAFTS, MAX_TOKENS = 20, 6, 64
Kinds = (
    tuple[type[SuffixIndex], type[TokenHistory]]
    | tuple[type[PlainSuffixIndex], type[PlainTokenHistory]]
)
both = pytest.mark.parametrize(
    "kinds", [(SuffixIndex, TokenHistory), (PlainSuffixIndex, PlainTokenHistory)]
)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def drafts_after(index: SuffixIndex | PlainSuffixIndex, text: list[int]) -> list[int]:
    """Return the drafts that follow `text` in slot 1."""
    ids, counts = np.zeros((1, MAX_DRAFTS), np.int32), ints(0)
    tokens = np.zeros((2, 128), np.int32)
    tokens[1, : len(text)] = text
    slots = np.array([1])
    finds = index.finds_any(tokens, slots, ints(0, len(text)), 0)
    index.propose(tokens, slots, ints(len(text)), ints(MAX_DRAFTS), ids, counts, ints(0))
    assert finds == (counts[0] > 0)
    return [int(id_) for id_ in ids[0, : counts[0]]]


@both
@pytest.mark.parametrize(
    ("answers", "text", "drafts"),
    [
        ([[1, 2, 3, 4, 5, 6, 7]], [9, 1, 2, 3, 4], [5, 6, 7]),
        ([[1, 2, 3, 4, 5, 6, 7]], [9, 9, 2, 3, 4], []),  # three tokens are no match
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], [1, 2, 3, 4], [6]),  # the later of equal ones
        ([[8, 1, 2, 3, 4, 5], [7, 1, 2, 3, 4, 6]], [8, 1, 2, 3, 4], [5]),  # the longer match
        ([[1, 2, 3, 4, 5]], [1, 2, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2, 3, 4, 9]),  # its own of equals
        ([[1, 2, 3, 4, 5]], [3, 4, 9, 1, 2, 3, 4], [5]),  # longer than its own
        ([[1, 2, 3, 4], [5, 6, 7]], [1, 2, 3, 4], []),  # nothing follows in that answer
        ([[1, 2], [3, 4, 5]], [1, 2, 3, 4], []),  # a match lies in one answer
        ([[], [1, 2, 3, 4, 5]], [1, 2, 3, 4], [5]),
    ],
)
def test_drafts_follow_the_longest_match(
    kinds: Kinds, answers: list[list[int]], text: list[int], drafts: list[int]
) -> None:
    index, history = kinds[0](2), kinds[1](MAX_TOKENS)
    for answer in answers:
        history.add(ints(*answer))
    index.share(1, history)  # type: ignore[arg-type]
    assert drafts_after(index, text) == drafts
    index.forget(1)
    assert drafts_after(index, [8, *text[:4]]) == []


@both
def test_the_oldest_tokens_make_room(kinds: Kinds) -> None:
    index, history = kinds[0](2), kinds[1](16)
    index.share(1, history)  # type: ignore[arg-type]
    history.add(ints(*range(100, 107)))
    history.add(ints(*range(200, 207)))
    assert drafts_after(index, [100, 101, 102, 103]) == [104, 105, 106]
    history.add(ints(300, 301))  # 19 tokens with what is between answers
    index.forget(1)
    index.share(1, history)  # type: ignore[arg-type]
    assert drafts_after(index, [100, 101, 102, 103]) == []
    history.add(ints(*range(400, 440)))  # more than there is room for: its end
    for text, drafts in (([424, 425, 426, 427], list(range(428, 434))), ([410, 411, 412, 413], [])):
        index.forget(1)
        index.share(1, history)  # type: ignore[arg-type]
        assert drafts_after(index, text) == drafts


@given(
    answers=st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=8),
    texts=st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4),
    max_tokens=st.integers(1, 60),
)
def test_native_and_plain_propose_the_same(
    answers: list[list[int]], texts: list[list[int]], max_tokens: int
) -> None:
    native, plain = SuffixIndex(2), PlainSuffixIndex(2)
    history, twin = TokenHistory(max_tokens), PlainTokenHistory(max_tokens)
    for answer in answers:
        history.add(ints(*answer))
        twin.add(ints(*answer))
    for text in texts:
        native.forget(1)
        plain.forget(1)
        native.share(1, history)
        plain.share(1, twin)
        assert drafts_after(native, text) == drafts_after(plain, text)


def rows(num: int = 100) -> list[int]:
    """Return rows that begin alike, with a token of their own at the end."""
    return [token for row in range(num) for token in (1, 2, 3, 4, 5, 100 + row)]


@both
def test_an_answer_goes_on_where_its_last_match_went_on(kinds: Kinds) -> None:
    """It repeats the first rows of an earlier one, of which the last ones are compared else."""
    index, history, answer = kinds[0](2), kinds[1](1024), rows()
    history.add(ints(*answer))
    index.share(1, history)  # type: ignore[arg-type]
    tokens = np.zeros((2, 1024), np.int32)
    tokens[1, :120] = answer[:120]
    for length in range(6, 110):  # from the first row's own token on
        ids, counts, matches = np.zeros((1, MAX_DRAFTS), np.int32), ints(0), ints(0)
        assert index.finds_any(tokens, np.array([1]), ints(0, length), 4)
        of_step = (np.array([1]), ints(length), ints(3), ids, counts, matches)
        index.propose(tokens, *of_step)
        assert ids[0, :3].tolist() == answer[length : length + 3]


@both
def test_a_place_in_earlier_answers_is_forgotten_with_the_request(kinds: Kinds) -> None:
    index, history, answer = kinds[0](2), kinds[1](1024), rows()
    history.add(ints(*answer))
    index.share(1, history)  # type: ignore[arg-type]
    assert drafts_after(index, answer[:6])[:2] == answer[6:8]
    index.forget(1)
    index.share(1, history)  # type: ignore[arg-type]
    assert drafts_after(index, [9, *answer[:5]])[:1] == [199]  # the latest row


@both
def test_a_place_that_has_left_the_ring_is_none(kinds: Kinds) -> None:
    index, history = kinds[0](2), kinds[1](16)
    history.add(ints(*range(100, 112)))
    index.share(1, history)  # type: ignore[arg-type]
    text = [100, 101, 102, 103]
    assert drafts_after(index, text) == list(range(104, 110))
    history.add(ints(*range(200, 212)))
    assert drafts_after(index, [*text, 104]) == []


@given(
    answers=st.lists(
        st.lists(st.integers(0, 2), min_size=60, max_size=200), min_size=1, max_size=4
    ),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=20),
    start=st.integers(0, 50),
    max_tokens=st.integers(60, 400),
)
def test_native_and_plain_keep_the_same_places_in_earlier_answers(
    answers: list[list[int]], steps: list[tuple[int, int]], start: int, max_tokens: int
) -> None:
    """The text follows the first answer with changes, while others are added."""
    native, plain = SuffixIndex(2), PlainSuffixIndex(2)
    history, twin = TokenHistory(max_tokens), PlainTokenHistory(max_tokens)
    native.share(1, history)
    plain.share(1, twin)
    first, at, text = answers[0], start, list[int]()
    for number, (num, wrong) in enumerate(steps):
        if number % 4 == 0 and number // 4 < len(answers):
            history.add(ints(*answers[number // 4]))
            twin.add(ints(*answers[number // 4]))
        text = [*text, *first[at : at + num], wrong][:128]
        at += num + wrong
        assert drafts_after(native, text) == drafts_after(plain, text)


def test_a_lookup_compares_few_places_however_often_a_text_repeats() -> None:
    history, index = TokenHistory(1 << 14), SuffixIndex(2)
    history.add(np.zeros(1 << 14, np.int32))
    history.add(np.tile(ints(1, 2, 3, 4, 0, 0), 1 << 11))
    for text in ([5, 0, 0, 0, 0], [5, 6, 0, 0]):  # found, and only its last two tokens are
        before = history.num_compared
        index.forget(1)
        index.share(1, history)
        drafts_after(index, text)  # two lookups
        assert 0 < history.num_compared - before <= 2 * 256


def test_bad_sizes_are_rejected() -> None:
    for max_tokens in (0, 1 << 62):
        with pytest.raises(ValueError, match="at least one token"):
            TokenHistory(max_tokens)
    assert history_bytes(0) == 0
    assert history_bytes(1000) == MAX_HISTORIES * (1000 * 12 + 1024 * 8)


class Case:
    """A proposer, and texts of requests of several tenants."""

    def __init__(self) -> None:
        self.proposer = HistoryProposer(NUM_SLOTS, MAX_TOKENS)
        self.tokens = TokenTable(NUM_SLOTS, 64)

    def begin(self, slot: int, text: list[int], tenant: str = "", salt: str = "") -> None:
        self.tokens.admit(slot, ints(*text), len(text))
        self.proposer.begin(
            slot,
            Request(
                request_id=f"r{slot}",
                group_id=f"r{slot}",
                stream=0,
                prompt_ids=ints(*text),
                sampling=SamplingParams(seed=1),
                stop_ids=(),
                max_total_tokens=64,
                arrival_ms=0.0,
                tenant=tenant,
                cache_salt=salt,
                speculation=Speculation(
                    max_drafts=MAX_DRAFTS, uses_proposer=True, prediction_ids=NO_INTS
                ),
            ),
        )

    def end(self, slot: int, output: list[int]) -> None:
        self.proposer.learn(slot, ints(*output))
        self.proposer.end(slot)

    def drafts(self, slot: int) -> list[int]:
        found = no_drafts(1, MAX_DRAFTS)
        self.proposer.propose(self.tokens, np.array([slot]), ints(MAX_DRAFTS), found)
        assert self.proposer.may_find(self.tokens) or not found.counts[0]
        return [int(id_) for id_ in found.ids[0, : found.counts[0]]]


def test_answers_are_found_by_requests_of_the_same_tenant_and_salt_only() -> None:
    case = Case()
    case.begin(0, [9], tenant="a", salt="x")
    case.end(0, [1, 2, 3, 4, 5, 6])
    for slot, tenant, salt, drafts in (
        (1, "a", "x", [5, 6]),
        (2, "a", "", []),
        (3, "b", "x", []),
        (4, "", "", []),
        (5, "ax", "", []),
    ):
        case.begin(slot, [1, 2, 3, 4], tenant, salt)
        assert case.drafts(slot) == drafts, (tenant, salt)


def test_a_prompt_is_not_kept() -> None:
    case = Case()
    case.begin(0, [1, 2, 3, 4, 5, 6])
    case.end(0, [7, 8])
    case.begin(1, [1, 2, 3, 4])
    assert case.drafts(1) == []


def test_a_running_request_finds_what_ends_beside_it() -> None:
    case = Case()
    case.begin(0, [9])
    case.begin(1, [1, 2, 3, 4])
    assert case.drafts(1) == []
    case.end(0, [1, 2, 3, 4, 5])
    assert case.drafts(1) == [5]


def test_the_tenants_that_were_not_seen_longest_are_forgotten() -> None:
    case = Case()
    for number in range(MAX_HISTORIES + 1):
        case.begin(0, [9], tenant=f"t{number}")
        case.end(0, [1, 2, 3, 4, 50 + number])
    for number, drafts in ((MAX_HISTORIES, [50 + MAX_HISTORIES]), (1, [51]), (0, [])):
        case.begin(1, [1, 2, 3, 4], tenant=f"t{number}")
        assert case.drafts(1) == drafts
        case.proposer.end(1)


def test_where_running_requests_use_all_histories_another_has_none() -> None:
    case = Case()
    for slot in range(MAX_HISTORIES):
        case.begin(slot, [9], tenant=f"t{slot}")
    case.begin(MAX_HISTORIES, [1, 2, 1, 2], tenant="late")
    assert case.drafts(MAX_HISTORIES) == [1, 2, 1, 2, 1, 2]  # of its own text
    case.end(MAX_HISTORIES, [1, 2, 3, 4, 5])  # learned by nothing
    case.end(0, [1, 2, 3, 4, 6])
    case.begin(MAX_HISTORIES, [1, 2, 3, 4], tenant="late")
    assert case.drafts(MAX_HISTORIES) == []
    case.end(MAX_HISTORIES, [1, 2, 3, 4, 5])
    case.begin(MAX_HISTORIES, [1, 2, 3, 4], tenant="late")
    assert case.drafts(MAX_HISTORIES) == [5]
