"""DraftStats: how many drafts there were and how many of them were right, by place in the draft.

Counts of one scheduler for its metrics; no choice is made by them. Always holds: no more drafts
are accepted at a place than there were.
"""

from __future__ import annotations

from collections.abc import Sequence


class DraftStats:
    """Drafts in all, of rows with at most `max_drafts`.

    drafted_at: how many drafts there were at each position in the draft, from 0 on; as long as the
    longest one. accepted_at: how many of them were accepted.
    """

    def __init__(self, max_drafts: int) -> None:
        self.rows_total = 0
        self.drafted_at: tuple[int, ...] = ()
        self.accepted_at: tuple[int, ...] = ()
        self._drafted, self._accepted = [0] * max_drafts, [0] * max_drafts

    def count(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add rows with so many drafts, of which the first accepted[i] were right."""
        self.rows_total += len(drafted)
        for counts, added in ((self._drafted, drafted), (self._accepted, accepted)):
            for num in added:
                for place in range(num):
                    counts[place] += 1
        longest = max([len(self.drafted_at), *drafted])
        self.drafted_at = tuple(self._drafted[:longest])
        self.accepted_at = tuple(self._accepted[:longest])
