"""Matcher: how far one answer has come in its grammar, and which tokens may follow.

Wraps llguidance's matcher; knows tokens by id and no requests. Always holds: what it allows depends
on its grammar and the tokens it has taken, on nothing else; a matcher that failed says so each time
it is asked, and no other is touched by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.structured.vocabulary import LoadedVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.uint32]
# How many forced tokens are given out at once: a step computes no more for one row.
MAX_FORCED = 64


class MatcherError(Exception):
    """A matcher cannot go on: its request fails, and no other."""


class DeadEnd(MatcherError):
    """The tokens taken so far are the beginning of no answer."""


class Matcher:
    """Tokens go in by `take`; `mask` and `forced` tell of what may follow those taken so far."""

    def __init__(self, matcher: LLMatcher, vocabulary: LoadedVocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._mask: Words | None = None  # of the tokens taken so far, where it is known
        self._root: Matcher | None = None  # what this is a copy of; None: a compiled grammar
        # Of a compiled grammar: how long it took, and llguidance's grammar: its text where a trial
        # wrote it, and its length.
        self.compile_ms = 0.0
        self.source = ""
        self.num_source_chars = 0

    def copy(self) -> Matcher:
        """Return an independent copy. It shares llguidance's lexer with the original, so an error
        of the lexer fails both."""
        twin = Matcher(self._matcher.deep_copy(), self._vocabulary)
        twin._mask = self._mask
        twin._root = self.root
        return twin

    @property
    def root(self) -> Matcher:
        """The compiled grammar this was copied from, however often."""
        return self._root or self

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. Raises MatcherError where the grammar forbids one."""
        self._mask = None
        if not self._matcher.consume_tokens(list(token_ids)):
            raise MatcherError(f"the grammar does not allow the tokens chosen: {self._why()}")

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that were chosen earlier, on another matcher of the same grammar.

        llguidance renews the work budget of its lexer only when it computes a mask; without one
        before each token a long replay exhausts the budget of a single step. Raises MatcherError.
        """
        for token_id in token_ids:
            self._mask = None
            self.mask()
            self.take([token_id])

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        self._mask = None
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise MatcherError(f"the grammar's state could not be taken back: {self._why()}")

    def mask(self) -> Words:
        """Which ids may follow: bit i % 32 of word i // 32; end tokens where the answer is
        complete. Read only. Raises DeadEnd where none may, MatcherError where it failed."""
        if self._mask is None:
            words = np.zeros(self._vocabulary.mask_words, np.uint32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if self._matcher.is_error():
                raise MatcherError(f"the grammar's matcher failed: {self._why()}")
            words = words[: self._vocabulary.num_words]
            if not words.any():
                raise DeadEnd("the grammar leaves no token to go on with, and no end")
            words.setflags(write=False)
            self._mask = words
        return self._mask

    def no_mask(self) -> Words:
        """One that allows nothing."""
        return np.zeros(self._vocabulary.num_words, np.uint32)

    @property
    def is_complete(self) -> bool:
        """Whether the answer can only end here."""
        if self._matcher.is_stopped():
            return not self._matcher.is_error()
        if not self._matcher.is_accepting():
            return False
        return not without(self.mask(), self._vocabulary.eos_ids).any()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer where it is complete."""
        return self._vocabulary.eos_ids

    def ends_with(self, token_id: int) -> bool:
        """Whether this token, chosen now, ends the answer instead of going on with it."""
        return token_id in self._vocabulary.eos_ids and self._matcher.is_accepting()

    def is_over_with(self, token_id: int) -> bool:
        """Whether the answer is over once it goes on with this token, which the mask allows."""
        if self.ends_with(token_id):
            return True
        mask = self._mask
        self.take([token_id])
        is_over = self.is_complete
        self.go_back(1)
        self._mask = mask
        return is_over

    def forced(self, *, most: int = MAX_FORCED) -> list[int]:
        """The tokens that must follow, as long as just one may: taken, and at most MAX_FORCED.

        None of them ends the answer. They are what masks alone would leave of each step.
        """
        taken: list[int] = []
        # Cheap where nothing is forced; what it promises the masks must confirm.
        if not self._matcher.compute_ff_tokens():
            return taken
        while len(taken) < min(most, MAX_FORCED) and not self._matcher.is_stopped():
            token_id = only_id(self.mask())
            if token_id is None or token_id in self._vocabulary.eos_ids:
                break
            self.take([token_id])
            taken.append(token_id)
        return taken

    def _why(self) -> str:
        said = self._matcher.get_error().partition("\n<")[0].partition("<state>")[0].strip()
        if said == "NoExtensionBias":  # llguidance's word for a grammar that goes round in circles
            said = "no text ever ends it, or nothing begins it"
        return said[:200] or "no reason was given"


def only_id(mask: Words) -> int | None:
    """The one id a mask allows; None where it allows several."""
    words = mask.nonzero()[0]
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    if bits & (bits - 1):
        return None
    return int(words[0]) * 32 + bits.bit_length() - 1


def without(mask: Words, token_ids: Sequence[int]) -> Words:
    """A copy of a mask that does not allow these."""
    fewer = mask.copy()
    for id_ in token_ids:
        fewer[id_ // 32] &= np.uint32(~(1 << (id_ % 32)) & 0xFFFFFFFF)
    return fewer
