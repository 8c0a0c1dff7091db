"""StopWatch: whether the text of an answer would come to a stop string by its next token.

The text is made as the answer's reader makes it (a Detokenizer and StopStrings), so both see the
same string end at the same token. Keeps no text beyond what could still become a stop string, and
knows no request. Always holds: asking changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.detokenizer import Detokenizer
from quire.text.stops import StopStrings


class StopWatch:
    """detokenizer, stops: at the answer's beginning. armed_from: the first of its tokens that may
    complete a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, *, armed_from: int) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._armed_from = armed_from

    def copy(self) -> StopWatch:
        """Another, as far as this one, that goes its own way."""
        return StopWatch(self._detokenizer.copy(), self._stops.copy(), armed_from=self._armed_from)

    def take(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these."""
        for text, token in self._detokenizer.spans(token_ids):
            self._stops.push(text, armed=token >= self._armed_from)

    def ends_with(self, token_id: int) -> bool:
        """Whether a stop string is complete once the answer goes on with this token."""
        after = self.copy()
        after.take((token_id,))
        return after._stops.matched is not None
