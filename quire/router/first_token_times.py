"""FirstTokenTimes: how long a replica takes to the first token, by the length of the prompt.

Kept for each replica in classes of prompts: in a class, lengths differ by less than a factor of
two. A whole answer begins when it is complete, so its class is also that of the tokens it may have.
Is given times and reads no clock. Always holds: nothing is predicted from fewer than 20 answers.
"""

from __future__ import annotations

from collections import defaultdict, deque

MIN_SAMPLES = 20
_MAX_SAMPLES = 256


class FirstTokenTimes:
    """The newest times of each class."""

    def __init__(self) -> None:
        self._of_class: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=_MAX_SAMPLES)
        )

    def note(self, prompt_tokens: int, seconds: float, answer_tokens: int = 0) -> None:
        """Note the time of one answer. answer_tokens: of a whole one, at most."""
        self._of_class[prompt_tokens.bit_length(), answer_tokens.bit_length()].append(seconds)

    def predicted_s(
        self, prompt_tokens: int, percentile: float, answer_tokens: int = 0
    ) -> float | None:
        """Return the time within which that percentage of answers begins; None if not known."""
        known = self._of_class.get((prompt_tokens.bit_length(), answer_tokens.bit_length()), ())
        if len(known) < MIN_SAMPLES:
            return None
        ordered = sorted(known)
        return ordered[min(int(percentile / 100 * len(ordered)), len(ordered) - 1)]
