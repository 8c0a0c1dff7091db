"""Faults: what happens to replicas while streams run, drawn from a seed.

    kill      SIGKILL of the server; started again at once
    stop      SIGSTOP of the server for some seconds
    drain     SIGTERM; started again once it has ended
    engine    SIGKILL of the engine; the server starts it again itself
    hang      SIGSTOP of the engine; the server notices, and starts it again

Always holds: a fault comes only while another replica is available to the front. The time until
the front no longer uses the replica is its detection, as its answers show: they are late while it
sends on many streams (detections.py reads when it decided).
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from bench.fleet.processes import Front, Replica, Replicas
from bench.fleet.router_log import Injected

KINDS = ("kill", "stop", "drain", "engine", "hang")
_STOPPED_S = (3.0, 8.0)
_LOOK_S = 0.05
_MIN_OPEN = 2
_DETECT_S = 30.0
_READY_S = 120.0


class Faults:
    """pause_s: mean time between two faults. counters: read before each fault, so that what they
    count until the next one belongs to its kind. injected: the faults that are over."""

    def __init__(
        self,
        replicas: Replicas,
        front: Front,
        *,
        seed: int,
        pause_s: float,
        counters: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._replicas = replicas
        self._front = front
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._count: Counter[str] = Counter()
        self._detection_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._undetected: Counter[str] = Counter()
        self._read_counters = counters
        self._last_kind = ""
        self._last_counters: Mapping[str, float] = {}
        self.counted: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.injected: list[Injected] = []

    async def run(self, seconds: float, max_faults: int | None = None) -> None:
        """Inject faults for some time, or so many. Each is over before the next begins."""
        end_s = _now_s() + seconds
        kinds: list[str] = []
        while _now_s() < end_s and (max_faults is None or self.num_faults < max_faults):
            await asyncio.sleep(self._chance.uniform(0.3, 1.7) * self._pause_s)
            if not kinds:  # each kind as often as any other
                kinds = self._chance.sample(KINDS, len(KINDS))
            replica = self._chance.choice(self._replicas.all)
            if await self._others_serve(replica):
                await self._inject(kinds.pop(), replica)

    async def end(self) -> None:
        """Bring all replicas back."""
        for replica in self._replicas.all:
            replica.signal(signal.SIGCONT)
            if not replica.is_running:
                replica.start()

    async def count(self, next_kind: str = "") -> None:
        """Add what the counters have counted since the last fault to its kind."""
        counters = await asyncio.to_thread(self._read_counters)
        if self._last_kind:
            before = self._last_counters
            grown = {name: value - before.get(name, 0.0) for name, value in counters.items()}
            self.counted[self._last_kind].update(grown)
        self._last_kind, self._last_counters = next_kind, counters

    @property
    def num_faults(self) -> int:
        """Faults so far."""
        return self._count.total()

    def summary(self) -> dict[str, Any]:
        """Return the counts, and the times until the router noticed."""
        return {
            kind: {
                "count": self._count[kind],
                "not_noticed": self._undetected[kind],
                "detection_median_s": round(statistics.median(times), 3) if times else None,
                "detection_max_s": round(max(times), 3) if times else None,
            }
            for kind, times in self._detection_s.items()
        }

    async def _inject(self, kind: str, replica: Replica) -> None:
        await self.count(kind)
        self._count[kind] += 1
        injected_s = time.time()  # as in logs
        if kind == "kill":
            replica.signal(signal.SIGKILL)
        elif kind == "stop":
            replica.signal(signal.SIGSTOP)
        elif kind == "drain":
            replica.signal(signal.SIGTERM)
        else:
            replica.signal_engine(signal.SIGKILL if kind == "engine" else signal.SIGSTOP)
        began_s = _now_s()
        limit_s = self._chance.uniform(*_STOPPED_S) if kind == "stop" else _DETECT_S
        is_noticed = await self._until(lambda: not self._is_available(replica), limit_s)
        if is_noticed:
            self._detection_s[kind].append(_now_s() - began_s)
        else:
            self._undetected[kind] += 1
        if kind == "stop":
            await asyncio.sleep(max(limit_s - (_now_s() - began_s), 0.0))
            replica.signal(signal.SIGCONT)
        elif kind in ("kill", "drain"):
            await asyncio.to_thread(replica.wait, _READY_S)
            replica.start()
        if not await self._until(lambda: self._is_available(replica), _READY_S):
            raise SystemExit(f"a replica did not come back after {kind}")
        self.injected.append(Injected(kind, replica.url, injected_s, time.time()))

    async def _others_serve(self, replica: Replica) -> bool:
        """Return whether the front sends requests to another replica: one that has just come back
        may be available and have an open circuit breaker."""
        states = await asyncio.to_thread(self._front.states)
        return any(
            state["available"] and state["open"] >= _MIN_OPEN
            for url, state in states.items()
            if url != replica.url
        )

    def _is_available(self, replica: Replica) -> bool:
        return bool(self._front.states()[replica.url]["available"])

    async def _until(self, condition: Any, limit_s: float) -> bool:
        end_s = _now_s() + limit_s
        while not await asyncio.to_thread(condition):
            if _now_s() > end_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True


def _now_s() -> float:
    return asyncio.get_running_loop().time()
