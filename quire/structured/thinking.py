"""Enforce a ThinkingBudget: once it is spent, only the closing mark may follow.

ThinkingTracker follows an answer beside the grammar's matcher, and takes all other tokens out of a
mask. FreeText stands in for llguidance's matcher where nothing else constrains the answer. Marks
are found in the text of the tokens, as quire/output_parsers finds them. Invariant: the result
depends only on the tokens taken, so replayed, rolled back and copied matchers agree.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quire.base.thinking_budget import ThinkingBudget, too_small
from quire.structured.vocabulary import LoadedVocabulary

Words = NDArray[np.uint32]
# Marks of answers in channels, as in quire/output_parsers/harmony.py.
CHANNEL, MESSAGE, END = "<|channel|>", "<|message|>", "<|end|>"
BODY_ENDS = ("<|start|>", END, "<|call|>", "<|return|>")
_SPACE = b" \t\r\n\x0b\x0c"
# Longer headers of a channel are no headers.
_MAX_HEADER_BYTES = 512
_BODY_ENDS = re.compile(b"|".join(re.escape(mark.encode()) for mark in BODY_ENDS))
_IS_ANALYSIS = re.compile(re.escape(CHANNEL.encode()) + rb"\s*analysis\b")
_MAX_BODY_MARK = max(map(len, BODY_ENDS))


class Position(Protocol):
    """The state of an answer in its reasoning; immutable."""

    def after(self, token_id: int, raw: bytes) -> Position:
        """Return the state after one more token with this text."""

    def forced(self) -> tuple[int, ...]:
        """Return the only tokens that may follow; () if all may."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """What the positions of one answer share."""

    max_tokens: int
    opens: bytes
    closes: bytes
    close_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Before:
    """The state before the opening mark is complete."""

    marks: _Marks
    text: bytes = b""

    def after(self, token_id: int, raw: bytes) -> Position:
        text, opens = self.text + raw, self.marks.opens
        begun = text.lstrip(_SPACE)
        if begun.startswith(opens):
            rest = begun[len(opens) :]
            return AFTER if self.marks.closes in rest else _Inside(self.marks, tail=rest)
        return _Before(self.marks, text[-_MAX_HEADER_BYTES:]) if opens.startswith(begun) else AFTER

    def forced(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class _Inside:
    """Within the reasoning: `used` tokens of it. tail: the end of its text; recent: of its ids."""

    marks: _Marks
    used: int = 0
    tail: bytes = b""
    recent: tuple[int, ...] = ()

    def after(self, token_id: int, raw: bytes) -> Position:
        marks, text = self.marks, self.tail + raw
        if marks.closes in text:
            return AFTER
        recent = (*self.recent, token_id)[-len(marks.close_ids) :]
        tail = text[max(len(text) - len(marks.closes) + 1, 0) :]
        return _Inside(marks, self.used + 1, tail, recent)

    def forced(self) -> tuple[int, ...]:
        close_ids, recent = self.marks.close_ids, self.recent
        if self.used + 1 + len(close_ids) <= self.marks.max_tokens:
            return ()  # the mark has room after any token
        lengths = range(len(close_ids) - 1, -1, -1)
        written = next(k for k in lengths if recent[len(recent) - k :] == close_ids[:k])
        return (close_ids[written],)


@dataclass(frozen=True, slots=True)
class _After:
    """The reasoning has ended, or there is none."""

    def after(self, token_id: int, raw: bytes) -> Position:
        return self

    def forced(self) -> tuple[int, ...]:
        return ()


AFTER = _After()


@dataclass(frozen=True, slots=True)
class _Channels:
    """What the positions of one answer in channels share. end_id: the token that ends a body;
    others: the first tokens of the channels that are no reasoning."""

    max_tokens: int
    end_id: int
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _InHeader:
    """Within a message's header, `text`, after `used` tokens of reasoning."""

    channels: _Channels
    used: int = 0
    text: bytes = b""

    def after(self, token_id: int, raw: bytes) -> Position:
        header, mark, rest = (self.text + raw).partition(MESSAGE.encode())
        if not mark:
            return _InHeader(self.channels, self.used, header[-_MAX_HEADER_BYTES:])
        is_reasoning = _IS_ANALYSIS.search(header) is not None and b"to=functions." not in header
        return _InBody(self.channels, self.used, rest, is_reasoning)

    def forced(self) -> tuple[int, ...]:
        is_open = self.text.endswith(CHANNEL.encode())
        return self.channels.others if is_open and self.used >= self.channels.max_tokens else ()


@dataclass(frozen=True, slots=True)
class _InBody:
    """Within a message's body. tail: the end of its text."""

    channels: _Channels
    used: int
    tail: bytes
    is_reasoning: bool

    def after(self, token_id: int, raw: bytes) -> Position:
        text, used = self.tail + raw, self.used + self.is_reasoning
        found = _BODY_ENDS.search(text)
        if found is not None:
            return _InHeader(self.channels, used, text[found.end() :])
        return _InBody(self.channels, used, text[-_MAX_BODY_MARK:], self.is_reasoning)

    def forced(self) -> tuple[int, ...]:
        is_spent = self.is_reasoning and self.used + 1 >= self.channels.max_tokens
        return (self.channels.end_id,) if is_spent else ()


class ThinkingTracker:
    """A Tracker (matcher.py) of one answer.

    texts: of each token, as the answer has it. closes: the mark that ends the reasoning.
    """

    num_bytes = 0

    def __init__(
        self, first: Position, texts: Sequence[bytes], num_words: int, *, closes: str
    ) -> None:
        self._texts, self._num_words, self._closes = texts, num_words, closes
        self._positions = [first]

    @property
    def dead_end(self) -> str:
        """See Tracker."""
        return (
            f"the budget of reasoning is spent, and the grammar forbids {self._closes}, which ends "
            "the reasoning; allow it in the grammar, or raise the budget"
        )

    def copy(self) -> ThinkingTracker:
        """Return an independent copy."""
        twin = ThinkingTracker(AFTER, self._texts, self._num_words, closes=self._closes)
        twin._positions = self._positions.copy()
        return twin

    def take(self, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens."""
        for token_id in token_ids:
            position = self._positions[-1]
            if position is not AFTER:
                position = position.after(token_id, self._texts[token_id])
            self._positions.append(position)
        return True

    def go_back(self, num_tokens: int) -> None:
        """Roll back the last tokens."""
        del self._positions[len(self._positions) - num_tokens :]

    def narrowed(self, mask: Words) -> Words:
        """Return a mask without the tokens that the budget forbids."""
        forced = self._positions[-1].forced()
        if not forced:
            return mask
        allowed = np.zeros(self._num_words, np.uint32)
        for token_id in forced:
            allowed[token_id // 32] |= np.uint32(1 << token_id % 32)
        return allowed & mask


class FreeText:
    """The part of llguidance's LLMatcher that Matcher uses, of a grammar that allows any tokens."""

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids

    def deep_copy(self) -> FreeText:
        """Return itself: it has no state."""
        return self

    def consume_tokens(self, token_ids: Sequence[int]) -> bool:
        return True

    def rollback(self, num_tokens: int) -> bool:
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        """Allow all ids of the vocabulary."""
        words = np.ctypeslib.as_array((ctypes.c_uint32 * (num_bytes // 4)).from_address(pointer))
        words[: self._num_ids // 32] = np.uint32(0xFFFFFFFF)
        if self._num_ids % 32:
            words[self._num_ids // 32] = np.uint32((1 << self._num_ids % 32) - 1)

    def compute_ff_tokens(self) -> tuple[int, ...]:
        """Return a token, as the masks may force some."""
        return (0,)

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        """Return False: which tokens end the answer is no matter of a grammar."""
        return False

    def get_error(self) -> str:
        return ""


def thinking_tracker(budget: ThinkingBudget, vocabulary: LoadedVocabulary) -> ThinkingTracker:
    """Return the tracker of an answer's beginning. Raises InvalidParameter for a budget that cannot
    hold the end of the reasoning."""
    marks = (budget.opens, budget.closes) if budget.closes else ()
    texts = vocabulary.texts(shown=marks or (CHANNEL, MESSAGE, *BODY_ENDS))
    if not budget.closes:
        end_ids = vocabulary.ids_of(END)
        if len(end_ids) != 1:
            raise too_small(budget, len(end_ids))
        others = tuple({vocabulary.ids_of(name)[0] for name in ("final", "commentary")})
        first: Position = _InHeader(_Channels(budget.max_tokens, end_ids[0], others))
        return ThinkingTracker(first, texts, vocabulary.num_words, closes=END)
    close_ids = vocabulary.ids_of(budget.closes)
    if budget.max_tokens < len(close_ids):
        raise too_small(budget, len(close_ids))
    shared = _Marks(budget.max_tokens, budget.opens.encode(), budget.closes.encode(), close_ids)
    first = _Inside(shared) if budget.is_open else _Before(shared)
    return ThinkingTracker(first, texts, vocabulary.num_words, closes=budget.closes)


def without_ends(vocabulary: LoadedVocabulary) -> LoadedVocabulary:
    """Return the vocabulary of an answer that no grammar ends."""
    other = copy(vocabulary)
    other.eos_ids = ()
    return other
