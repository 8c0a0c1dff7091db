"""LengthHistory: how long answers are likely to be, from those that ended.

Knows tenants, lengths of prompts and of answers; no text. An average for each tenant and size of
prompt leans on that of the tenant, which leans on that of all tenants, and that on a guess, the
more the fewer answers it has seen. Old answers fade. Always holds: a prediction is at least 1 and
never more than the request may have.
"""

from __future__ import annotations

import math

from quire.base.records import Request

FIRST_GUESS_TOKENS = 256.0
# An average of so few answers counts as much as what it leans on.
_LEAN = 4.0
# What one more answer leaves of the weight of those before: the last 100 or so count.
_KEEP = 0.99
# Averages kept; beyond, the one that was begun first is dropped.
_MAX_AVERAGES = 8192
# Sizes within a tenth are numbered from here on, beyond those within a factor of two.
_TENTHS = 64

_Place = tuple[str, int] | str | None


class LengthHistory:
    """Averages that fade, by (tenant, size of prompt), by tenant, and of all.

    ended: answers that were not learned from yet.
    """

    def __init__(self) -> None:
        self._averages: dict[_Place, tuple[float, float]] = {}  # weight, weighted sum
        self.ended: list[tuple[Request, int]] = []  # not learned from yet

    def learn(self) -> None:
        """Take in the answers in `ended`."""
        ended, self.ended = self.ended, []
        for request, num_output_tokens in ended:
            self.note(request, num_output_tokens)

    def note(self, request: Request, num_output_tokens: int) -> None:
        """Learn from an answer that ended by itself or at its limit."""
        for place in _places(request):
            weight, total = self._averages.get(place, (0.0, 0.0))
            if not weight and len(self._averages) >= _MAX_AVERAGES:
                del self._averages[next(iter(self._averages))]
            self._averages[place] = (_KEEP * weight + 1.0, _KEEP * total + num_output_tokens)

    def predict(self, request: Request, limit: int) -> float:
        """Return how many output tokens `request` is likely to have.

        limit: the most tokens it may have, its prompt included.
        """
        if self.ended:
            self.learn()
        most = float(max(limit - len(request.prompt_ids), 1))
        if not request.stop_ids:  # nothing ends it earlier
            return most
        likely = FIRST_GUESS_TOKENS
        for place in _places(request):
            weight, total = self._averages.get(place, (0.0, 0.0))
            likely = (total + _LEAN * likely) / (weight + _LEAN)
        return min(max(likely, 1.0), most)

    def typical(self) -> float:
        """Return the mean number of output tokens of all answers."""
        if self.ended:
            self.learn()
        weight, total = self._averages.get(None, (0.0, 0.0))
        return (total + _LEAN * FIRST_GUESS_TOKENS) / (weight + _LEAN)


def _places(request: Request) -> tuple[_Place, ...]:
    """Return the averages a request counts in, from the widest to the narrowest.

    Prompts of one size within a factor of two, and, because programs send prompts of much the same
    length, within a tenth.
    """
    tenant, length = request.tenant, len(request.prompt_ids)
    tenth = _TENTHS + int(10 * math.log(length))
    return None, tenant, (tenant, length.bit_length()), (tenant, tenth)
