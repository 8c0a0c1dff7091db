"""OwnLoad: how busy this engine is, as the placement of prompts weighs it.

Prefill engines send it (handing.py), decode engines compare theirs with it (fetching.py). Reads the
scheduler, so it is called in the engine's thread only. Always holds: asking for it changes nothing,
and fits no prices anew once many steps are known.
"""

from __future__ import annotations

from quire.base.prefill_load import PrefillLoad
from quire.scheduler.scheduler import Scheduler


class OwnLoad:
    """The load of `scheduler`."""

    def __init__(self, scheduler: Scheduler) -> None:
        assert scheduler.hand_overs is not None, "the scheduler has an ExchangeMap"
        self._scheduler, self._hand_overs = scheduler, scheduler.hand_overs

    @property
    def num_decoding(self) -> int:
        """Requests that generate."""
        return self._hand_overs.generating()[0]

    def now(self) -> PrefillLoad:
        """Return it. A step of prompts also computes the rows that generate."""
        price, predictor = self._scheduler.speed.latest, self._scheduler.predictor
        num_rows, num_positions = self._hand_overs.generating()
        rows_ms = num_rows * (price.token_ms + price.score_ms)
        return PrefillLoad(
            queue_ms=predictor.drain_ms() if predictor.knows else 0.0,
            fixed_ms=price.fixed_ms + rows_ms + num_positions * (price.position_ms + price.read_ms),
            token_ms=price.token_ms,
            position_ms=price.position_ms,
            step_tokens=self._hand_overs.step_tokens,
            is_measured=predictor.knows,
        )
