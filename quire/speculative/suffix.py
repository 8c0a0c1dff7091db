"""The longest recent match of a text's last tokens, and what followed it: plain twin of the native
SuffixIndex.

The place where the last match goes on is compared first, then occurrences of the last MIN_MATCH
tokens backwards, the MAX_CANDIDATES latest ones, up to MAX_MATCH tokens; the longest match wins,
among equal ones the first that was compared. Of a pair of tokens that occurs often, the true place
is seldom among the latest ones; where the last match goes on is known at no cost. Drafts are the
tokens behind it. Where these reach the end of the text they go on with themselves, so that a
repetition is continued. A slot may share a history of other texts, of which a longer match than
that of its own text wins. Chains of occurrences by hash cost 12 bytes and one insertion per token,
where a suffix automaton would cost some hundred bytes for matches that are longer than they need to
be: what follows a match of 32 tokens is hardly more certain than what follows one of 8.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.speculative.plain_history import MAX_CANDIDATES, MAX_MATCH, PlainTokenHistory

Int32s = NDArray[np.int32]

MIN_MATCH = 2


class PlainSuffixIndex:
    """One text per slot, which only grows until it is forgotten. See the native class."""

    def __init__(self, num_slots: int) -> None:
        self._known = [0] * num_slots
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(num_slots)]
        self._others: list[PlainTokenHistory | None] = [None] * num_slots
        # Where the last match ended, and for how many tokens of the tail it was found.
        self._kept: list[tuple[int, int]] = [(0, 0)] * num_slots
        self._kept_in_others: list[tuple[int, int]] = [(0, 0)] * num_slots  # likewise

    def forget(self, slot: int) -> None:
        """Begin another text."""
        self._known[slot] = 0
        self._ends[slot] = {}
        self._kept[slot] = 0, 0
        self.share(slot, None)

    def share(self, slot: int, others: PlainTokenHistory | None) -> None:
        """Propose from `others` as well, where these have a longer match than the text of `slot`.

        None: from its own text only.
        """
        self._others[slot] = others
        self._kept_in_others[slot] = 0, 0

    def finds_any(
        self, tokens: Int32s, slots: NDArray[np.intp], lengths: Int32s, least: int
    ) -> bool:
        """Return whether `propose` finds something for any of `slots` that follows a match of
        `least` tokens. lengths: by slot."""
        for slot in slots.tolist():
            text = tokens[slot, : lengths[slot]].tolist()
            self._learn(slot, text)
            kept = self._kept[slot], self._kept_in_others[slot]
            drafts, match = self._continuation(slot, text, 1)
            self._kept[slot], self._kept_in_others[slot] = kept  # a question changes nothing
            if drafts and match >= least:
                return True
        return False

    def propose(
        self,
        tokens: Int32s,
        slots: NDArray[np.intp],
        lengths: Int32s,
        limits: Int32s,
        ids: Int32s,
        counts: Int32s,
        matches: Int32s,
    ) -> None:
        """Fill ids[i] with what may follow the first lengths[i] tokens of tokens[slots[i]].

        matches[i]: is set to the length of the match that this follows; 0: none was found.
        """
        for row, slot in enumerate(slots.tolist()):
            text = tokens[slot, : lengths[row]].tolist()
            self._learn(slot, text)
            drafts, matches[row] = self._continuation(slot, text, int(limits[row]))
            ids[row, : len(drafts)] = drafts
            counts[row] = len(drafts)

    def follow(self, slot: int, text: Int32s, tail: Int32s, limit: int) -> Int32s:
        """Return what follows the last tokens of `tail` in the whole `text` of the slot.

        An empty tail is followed by the start of the text, and a single token by what follows it
        there.
        """
        end = self._end_in_text(slot, text.tolist(), tail.tolist())
        if end:
            self._kept[slot] = end, len(tail)
        return text[end : end + limit] if end or not len(tail) else text[:0]

    def aligns(self, slot: int, text: Int32s, tail: Int32s, least: int) -> bool:
        """Return whether `follow` would find something, after a match of `least` tokens or of all
        of `tail`."""
        whole, last = text.tolist(), tail.tolist()
        end = self._end_in_text(slot, whole, last)
        if not end:
            return not last and len(whole) > 0
        length = _match_length(whole, end, last)
        return end < len(whole) and length >= min(least, len(last))

    def _end_in_text(self, slot: int, text: list[int], tail: list[int]) -> int:
        """Return where the last tokens of `tail` match; 0: at the start, or nowhere."""
        self._learn(slot, text)
        if len(tail) > 1:
            return self._longest(slot, text, tail, before=len(text))
        return int(len(tail) > 0 and text[:1] == tail)

    def _learn(self, slot: int, text: list[int]) -> None:
        for end in range(max(self._known[slot], MIN_MATCH), len(text) + 1):
            self._ends[slot].setdefault(tuple(text[end - MIN_MATCH : end]), []).append(end)
        self._known[slot] = len(text) + 1

    def _continuation(self, slot: int, text: list[int], limit: int) -> tuple[list[int], int]:
        """Return the drafts, and the length of the match that they follow."""
        end = self._longest(slot, text, text, before=len(text))
        length = _match_length(text, end, text) if end else 0
        if end:
            self._kept[slot] = end, len(text)
        others = self._others[slot]
        if others is not None and length < MAX_MATCH:
            kept_end, kept_length = self._kept_in_others[slot]
            goes_on = kept_end and len(text) >= kept_length
            following = kept_end + len(text) - kept_length if goes_on else 0
            match = others.longest_match(text, following)
            if match.end:
                self._kept_in_others[slot] = match.end, len(text)
            if match.length > length:
                return others.continuation(match, limit), match.length
        if not end:
            return [], 0
        period = len(text) - end
        whole = list(text)
        for _ in range(limit):
            whole.append(whole[len(whole) - period])
        return whole[len(text) :], length

    def _longest(self, slot: int, text: list[int], tail: list[int], *, before: int) -> int:
        """Return where the longest match of the last tokens of `tail` ends; 0 for none."""
        if len(tail) < MIN_MATCH:
            return 0
        ends = self._ends[slot].get(tuple(tail[-MIN_MATCH:]), [])
        ends = [end for end in reversed(ends) if end < before][:MAX_CANDIDATES]
        kept_end, kept_length = self._kept[slot]
        following = kept_end + len(tail) - kept_length
        if len(tail) >= kept_length and following < before:
            ends.insert(0, following)
        best, best_end = MIN_MATCH - 1, 0
        for end in ends:
            length = _match_length(text, end, tail)
            if length > best:
                best, best_end = length, end
        return best_end


def _match_length(text: list[int], end: int, tail: list[int]) -> int:
    most, length = min(MAX_MATCH, end, len(tail)), 0
    while length < most and text[end - 1 - length] == tail[-1 - length]:
        length += 1
    return length
