"""What ends an answer by its text: stop strings, and stop patterns beside them.

Of strings and patterns the one that ends first counts; of those that end at the same character, a
string. A string is cut off the answer unless the request keeps it; what a pattern matches stays.
"""

from __future__ import annotations

from quire.base.sampling_params import SamplingParams
from quire.structured.stop_patterns import StopPatterns
from quire.text.stops import StopStrings


class PatternStops(StopStrings):
    """Stop patterns, and the stop strings of the same request."""

    def __init__(self, sampling: SamplingParams) -> None:
        super().__init__(sampling.stop, include=sampling.include_stop_str_in_output)
        self._patterns = StopPatterns(sampling.stop_regex)

    def copy(self) -> StopStrings:
        """Return an independent copy."""
        twin = super().copy()
        assert isinstance(twin, PatternStops), "a shallow copy"
        twin._patterns = self._patterns.copy()
        return twin

    def push(self, text: str, *, armed: bool = True) -> str:
        """See StopStrings. Raises PatternFailed."""
        if self.matched is not None:
            return super().push(text, armed=armed)
        found = self._patterns.push(text, armed=armed)
        if found is None:
            return super().push(text, armed=armed)
        num_chars, pattern = found
        certain = super().push(text[:num_chars], armed=armed)
        if self.matched is None:
            certain += self.flush()
            self.matched = pattern
        return certain


def stops_of(sampling: SamplingParams) -> StopStrings:
    """Return what ends the answer to a request with stop strings or patterns."""
    if sampling.stop_regex:
        return PatternStops(sampling)
    return StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
