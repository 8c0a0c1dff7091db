"""RequestHistory: what happened to a request, kept for its timeline after its end.

Filled where things happen and read by timeline.py. Knows no policy and no slots' content. Always
holds: bounded in events and waits; no tokens of a request but those of one block.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.base.cache_usage import CacheUsage
from quire.base.records import FinishReason
from quire.base.timeline import EventKind, HistoryEvent, WaitReason
from quire.cache.chain import Owner, Uint64s

# Events and waits that a history keeps.
MAX_EVENTS = 128
# What stops a walk along the queue, and the arrival of the request that it stops at; -1: any.
Obstacle = tuple[WaitReason | None, int]
NO_OBSTACLE: Obstacle = (None, -1)
Obstacles = deque[tuple[float, WaitReason | None, int]]


@dataclass(slots=True)
class SequenceTimes:
    """When things happened, in milliseconds of the engine's clock; NaN before."""

    first_scheduled_ms: float = math.nan
    first_token_ms: float = math.nan
    last_token_ms: float = math.nan


@dataclass(slots=True)
class KVHistory:
    """What became of a request's keys and values.

    cached_tokens, cache_use: found in the prefix cache at its first admission, and why no more.
    num_fetched_blocks: loaded from a tier since it entered the queue, for which it waited
    waited_ms.
    """

    cached_tokens: int = 0
    cache_use: CacheUsage | None = None
    num_fetched_blocks: int = 0
    waited_ms: float = 0.0


@dataclass(slots=True)
class MissPoint:
    """The first full block of a prompt that was not found in the prefix cache.

    token: its first position. digest, parent: of the chain with and without it. was_evicted: it was
    known before. tokens: of the block.
    """

    token: int
    digest: Uint64s
    parent: Uint64s
    was_evicted: bool
    tokens: NDArray[np.int32]
    owner: Owner


@dataclass(slots=True, eq=False)
class RequestHistory:
    """The waits and events of a request, also after its end; holds no tokens of it but a block.

    waits: (ms, reason) that apply to itself, each different from the one before. num_dropped:
    events beyond MAX_EVENTS.
    """

    request_id: str
    arrival: int
    arrival_ms: float
    num_prompt_tokens: int
    times: SequenceTimes
    kv: KVHistory
    events: list[HistoryEvent] = field(default_factory=list)
    waits: list[tuple[float, WaitReason]] = field(default_factory=list)
    num_dropped: int = 0
    miss: MissPoint | None = None
    is_scored: bool = False
    finish_reason: FinishReason | None = None
    ended_ms: float = math.nan
    num_output_tokens: int | None = None

    def note(
        self,
        ms: float,
        kind: EventKind,
        *,
        step: int = 0,
        slot: int = -1,
        start: int = 0,
        known: int = 0,
        detail: str = "",
    ) -> None:
        """Add an event with these fields."""
        self.add(HistoryEvent(ms, kind, step, slot, start, known, detail))

    def add(self, event: HistoryEvent) -> None:
        """Add an event; drop it where there are too many."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.num_dropped += 1

    def wait(self, ms: float, reason: WaitReason) -> None:
        """Note why the request itself is not admitted."""
        waits = self.waits
        if (not waits or waits[-1][1] is not reason) and len(waits) < MAX_EVENTS:
            waits.append((ms, reason))
