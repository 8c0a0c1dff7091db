"""StopWatch: predict whether a candidate next token completes a stop string.

The text is produced as the client's output stream produces it (a Detokenizer and StopStrings), so
both find the same string at the same token. Keeps no text beyond a possible beginning of a stop
string; knows no request. Always holds: a prediction does not change the state.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.detokenizer import Detokenizer
from quire.text.stops import StopStrings


class StopWatch:
    """The state of one answer.

    detokenizer, stops: in their state at the answer's start. armed_from: index of the first token
    that may complete a stop string.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, *, armed_from: int) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._armed_from = armed_from

    def copy(self) -> StopWatch:
        """Return an independent copy."""
        return StopWatch(self._detokenizer.copy(), self._stops.copy(), armed_from=self._armed_from)

    def take(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the answer."""
        for text, token in self._detokenizer.spans(token_ids):
            self._stops.push(text, armed=token >= self._armed_from)

    def ends_with(self, token_id: int) -> bool:
        """Return whether this token as the next one completes a stop string."""
        after = self.copy()
        after.take((token_id,))
        return after._stops.matched is not None
