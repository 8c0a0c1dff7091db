"""LoadReport: what one replica reports of its load, for scaling (scaling.py).

The predicted time to first token is that of a request of no tokens that arrives now: the waiting
prompts, at the prices that the engine has learned from its own steps. Knows no Ray. Always holds:
reading it costs the engine at most one snapshot in `_PRICES_S`; nothing is predicted before steps
were timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.api.engine_protocol import Engine
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import QuireError
from quire.deploy.ray_serve.scaling import RUNNING, SLOTS, TTFT_MS, WAITING_TOKENS

_PRICES_S = 10.0


class LoadReport:
    """Reads the load of an engine. now_s: the clock."""

    def __init__(self, engine: Engine, now_s: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._now_s = now_s
        self._snapshot: EngineSnapshot | None = None
        self._read_s = -math.inf

    async def read(self) -> dict[str, float]:
        """Return the numbers by name."""
        stats = self._engine.stats
        report = {
            RUNNING: float(stats.running),
            SLOTS: float(self._engine.card.max_num_seqs),
            WAITING_TOKENS: float(stats.waiting_tokens),
        }
        snapshot = await self._prices() if stats.waiting_tokens else None
        report[TTFT_MS] = 0.0 if snapshot is None else predicted_ttft_ms(stats, snapshot)
        return report

    async def _prices(self) -> EngineSnapshot | None:
        """Return a snapshot that is recent enough for its prices; None where there is none."""
        if self._now_s() - self._read_s >= _PRICES_S:
            self._read_s = self._now_s()
            try:
                self._snapshot = await self._engine.engine_snapshot()
            except QuireError:  # the engine is gone, which check_health reports
                self._snapshot = None
        return self._snapshot


def predicted_ttft_ms(stats: EngineStats, snapshot: EngineSnapshot) -> float:
    """Return the milliseconds until the prompts that wait now are computed."""
    prices = snapshot.step_prices
    if not prices.steps_timed:
        return 0.0
    step_tokens = max(snapshot.limits.get("max_num_batched_tokens", 0.0), 1.0)
    steps = math.ceil(stats.waiting_tokens / step_tokens)
    return steps * prices.fixed_ms + stats.waiting_tokens * prices.token_ms
