"""Placement: whether a prompt is computed sooner by another engine, or here beside what runs.

Computing it here delays this request, and each request that generates meanwhile, by what it adds to
their steps. Computing it there delays this request only: by the prompts that the other engine has
before it, by its own computation, and by its blocks on their way, which follow the computation step
by step. The cheaper sum of delays is taken, if moving the blocks also costs less than computing
them. Of the prompt the other engine is assumed to have cached what this one has. Knows no engine
and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.base.prefill_load import PrefillLoad

# A transfer also takes a connection, and a plan to begin and one to go on.
ROUND_TRIP_MS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Positions start .. end - 1 of a prompt, which this engine lacks.

    moving_ms: what their blocks take on their way. here: this engine; num_decoding: its requests
    that generate.
    """

    start: int
    end: int
    moving_ms: float
    here: PrefillLoad
    num_decoding: int

    def after(self, num_tokens: int) -> Placement:
        """Return the placement of the rest, where the first num_tokens come from elsewhere."""
        num_left = max(self.end - self.start - num_tokens, 0)
        share = num_left / max(self.end - self.start, 1)
        return replace(self, start=self.end - num_left, moving_ms=share * self.moving_ms)

    @property
    def local_ms(self) -> float:
        """The sum of delays where the prompt is computed here."""
        compute_ms = self.here.span_ms(self.start, self.end)
        return self.here.queue_ms + (1 + self.num_decoding) * compute_ms

    def remote_ms(self, there: PrefillLoad | None) -> float:
        """Return the delay where the prompt is computed by another engine.

        None: an engine of which nothing is known; it may be fast and idle, and sends its load
        before it is asked for anything.
        """
        if there is None:
            return ROUND_TRIP_MS + self.moving_ms
        there = there.as_fast_as(self.here)
        compute_ms = there.prompt_ms(self.start, self.end)
        # The blocks of the last step follow it; those of earlier ones travel beside it.
        last = min(there.step_tokens / max(self.end - self.start, 1), 1.0)
        moved_ms = max(compute_ms + last * self.moving_ms, self.moving_ms)
        return ROUND_TRIP_MS + there.queue_ms + moved_ms

    @property
    def is_worth_moving(self) -> bool:
        """Whether moving the blocks takes less than computing them here."""
        return ROUND_TRIP_MS + self.moving_ms < self.here.span_ms(self.start, self.end)

    def pays(self, there: PrefillLoad | None) -> bool:
        """Return whether to have the prompt computed there."""
        return self.is_worth_moving and self.remote_ms(there) < self.local_ms
