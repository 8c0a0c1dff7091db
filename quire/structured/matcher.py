"""Matcher: the parse state of one answer in its grammar, and the mask of allowed tokens.

Wraps llguidance's matcher; knows token ids, not requests. Invariants: the mask depends only on the
grammar and the tokens taken; a failed matcher raises each time it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.structured.vocabulary import LoadedVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.structured.thinking import FreeText

Words = NDArray[np.uint32]
# Most forced tokens returned at once: a step computes no more for one row.
MAX_FORCED = 64
# Every DeadEnd begins so.
NO_TOKEN_LEFT = "the grammar leaves no token"


class MatcherError(Exception):
    """A matcher cannot continue; its request fails."""


class DeadEnd(MatcherError):
    """The tokens taken so far are no prefix of an answer."""


class TrackerError(MatcherError):
    """The tracker refuses the tokens or fails; that of any matcher of the grammar would, too."""


@contextmanager
def _failing_alone() -> Iterator[None]:
    """Turn what a tracker raises into a TrackerError, which fails one row of a step only."""
    try:
        yield
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise TrackerError(f"uniqueItems could not be followed: {type(e).__name__}: {e}") from e


class Tracker(Protocol):
    """Follows an answer beside llguidance (unique_tracker.py, thinking.py)."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def dead_end(self) -> str:
        """Return why `narrowed` leaves nothing of a mask, and what to do."""

    def copy(self) -> Tracker: ...

    def take(self, token_ids: Sequence[int]) -> bool: ...

    def go_back(self, num_tokens: int) -> None: ...

    def narrowed(self, mask: Words) -> Words: ...


class Matcher:
    """`take` advances by tokens; `mask` and `forced` return what may or must follow.

    trackers: of what llguidance does not know: arrays of distinct items, budgets of reasoning.
    """

    def __init__(
        self,
        matcher: LLMatcher | FreeText,
        vocabulary: LoadedVocabulary,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._trackers = tuple(trackers)
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
        trackers = [tracker.copy() for tracker in self._trackers]
        twin = Matcher(self._matcher.deep_copy(), self._vocabulary, trackers)
        twin._mask = self._mask
        twin._root = self.root
        return twin

    @property
    def num_tracker_bytes(self) -> int:
        """Return the approximate memory of what the trackers remember for all answers."""
        return sum(tracker.num_bytes for tracker in self._trackers)

    @property
    def root(self) -> Matcher:
        """The compiled grammar this was copied from, however often."""
        return self._root or self

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. Raises MatcherError where the grammar forbids one."""
        self._mask = None
        if not self._matcher.consume_tokens(list(token_ids)):
            raise MatcherError(f"the grammar does not allow the tokens chosen: {self._why()}")
        for tracker in self._trackers:
            with _failing_alone():
                is_allowed = tracker.take(token_ids)
            if not is_allowed:
                raise TrackerError("the tokens chosen repeat an item of an array with uniqueItems")

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens that were chosen earlier, on another matcher of the same grammar.

        llguidance renews the work budget of its lexer only when it computes a mask; without one
        before each token a long replay exhausts the budget of a single step. Raises MatcherError.
        """
        words = np.empty(self._vocabulary.mask_words, np.uint32)  # one for all; nothing reads it
        place, num_bytes = words.ctypes.data, words.nbytes
        for token_id in token_ids:
            self._matcher.unsafe_compute_mask_ptr(place, num_bytes)
            self.take([token_id])

    def go_back(self, num_tokens: int) -> None:
        """Roll back the last tokens."""
        self._mask = None
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise MatcherError(f"the grammar's state could not be taken back: {self._why()}")
        for tracker in self._trackers if num_tokens else ():
            tracker.go_back(num_tokens)

    def mask(self) -> Words:
        """Return the allowed ids, bit i % 32 of word i // 32; end tokens if the answer is
        complete. Read-only. Raises DeadEnd if there are none, MatcherError if it failed."""
        if self._mask is None:
            words = self._grammar_mask()
            for tracker in self._trackers:
                with _failing_alone():
                    narrowed = tracker.narrowed(words)
                if words.any() and not narrowed.any():
                    raise DeadEnd(f"{NO_TOKEN_LEFT}: {tracker.dead_end}")
                words = narrowed
            if not words.any():
                raise DeadEnd(f"{NO_TOKEN_LEFT} to go on with, and no end")
            words.setflags(write=False)
            self._mask = words
        return self._mask

    def _grammar_mask(self) -> Words:
        """Compute the ids that llguidance allows. Raises MatcherError if it failed."""
        words = np.zeros(self._vocabulary.mask_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise MatcherError(f"the grammar's matcher failed: {self._why()}")
        return words[: self._vocabulary.num_words]

    def no_mask(self) -> Words:
        """Return a mask that allows nothing."""
        return np.zeros(self._vocabulary.num_words, np.uint32)

    @property
    def is_complete(self) -> bool:
        """Return whether the answer can only end here."""
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
        """Return whether this token, chosen now, ends the answer instead of extending it."""
        return token_id in self._vocabulary.eos_ids and self._matcher.is_accepting()

    def is_over_with(self, token_id: int) -> bool:
        """Return whether the answer is complete after this token, which the mask allows."""
        if self.ends_with(token_id):
            return True
        mask = self._mask
        self.take([token_id])
        is_over = self.is_complete
        self.go_back(1)
        self._mask = mask
        return is_over

    def forced(self, *, most: int = MAX_FORCED) -> list[int]:
        """Take and return the tokens that must follow, at most MAX_FORCED.

        None of them ends the answer. Each is the only token its mask allows.
        """
        taken: list[int] = []
        # Cheap if nothing is forced; the masks must confirm what it reports.
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
        message = self._matcher.get_error().partition("\n<")[0].partition("<state>")[0].strip()
        if message == "NoExtensionBias":  # llguidance's name for a grammar that never terminates
            message = "no text ever ends it, or nothing begins it"
        return message[:200] or "no reason was given"


def only_id(mask: Words) -> int | None:
    """Return the only id a mask allows; None if it allows several."""
    words = mask.nonzero()[0]
    if len(words) != 1:
        return None
    bits = int(mask[words[0]])
    if bits & (bits - 1):
        return None
    return int(words[0]) * 32 + bits.bit_length() - 1


def without(mask: Words, token_ids: Sequence[int] | NDArray[np.int64]) -> Words:
    """Return a copy of a mask without these ids."""
    fewer, ids = mask.copy(), np.asarray(token_ids, np.int64)
    np.bitwise_and.at(fewer, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return fewer
