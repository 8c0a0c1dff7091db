"""PrefillLoad: how fast an engine computes prompts, and how many it has to compute first.

A prefill engine sends it when a decode engine connects, so that the decode engine can predict how
long a prompt would take there. Plain numbers; knows no engine and no connection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLoad:
    """queue_ms: until the prompts that it has are computed. A prompt takes fixed_ms for each step
    of at most step_tokens tokens, token_ms for each token, and position_ms for each position that
    one attends to. is_measured: False where these are guesses, because few steps were timed."""

    queue_ms: float = 0.0
    fixed_ms: float = 0.0
    token_ms: float = 0.0
    position_ms: float = 0.0
    step_tokens: int = 1
    is_measured: bool = False

    def as_fast_as(self, other: PrefillLoad) -> PrefillLoad:
        """Return it with the speed of `other`, unless its own is measured."""
        return self if self.is_measured else replace(other, queue_ms=self.queue_ms)

    def span_ms(self, start: int, end: int) -> float:
        """Return what computing positions start .. end - 1 adds to steps."""
        tokens = end - start
        positions = tokens * start + tokens * (tokens + 1) / 2
        return tokens * self.token_ms + positions * self.position_ms

    def prompt_ms(self, start: int, end: int) -> float:
        """Return what computing positions start .. end - 1 takes, in steps of its own."""
        num_steps = math.ceil((end - start) / self.step_tokens)
        return num_steps * self.fixed_ms + self.span_ms(start, end)
