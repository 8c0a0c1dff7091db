"""OutputRate: how many tokens an answer may have been given by a time, by how fast others came.

For a whole answer that its client leaves before its end: what the replica has computed of it is not
known then. Is given times and reads no clock. Always holds: no answer had more tokens by that time
than this says, of the newest ones of its model.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

_NUM_ANSWERS = 64
# Fewer say more of the time to the first token than of the rate.
_MIN_TOKENS = 16


class OutputRate:
    """The newest answers of each model."""

    def __init__(self) -> None:
        self._tokens_per_s: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_NUM_ANSWERS)
        )

    def note(self, model: str, tokens: float, seconds: float) -> None:
        """Note the tokens of an answer, and the time that all of it took."""
        if tokens >= _MIN_TOKENS and seconds > 0:
            self._tokens_per_s[model].append(tokens / seconds)

    def max_tokens(self, model: str, seconds: float) -> float:
        """Return how many tokens the fastest answer had in this time; infinite while none is
        known."""
        known = self._tokens_per_s.get(model)
        return max(known) * seconds if known else math.inf
