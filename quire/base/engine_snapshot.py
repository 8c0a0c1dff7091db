"""EngineSnapshot: the queue, the running batch and the KV blocks of an engine at one moment.

Frozen records of numbers for an admin's view. Always holds: nothing here is a prompt, a text, a
token or a client's id: requests are named by their number of arrival, salts by keyed digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


class BlockUse(StrEnum):
    """What a KV block is used for."""

    FREE = "free"
    RUNNING = "running"  # of one running request
    SHARED = "shared"  # of several running requests
    PINNED = "pinned"  # named by a step in flight or a copy, and by no running request
    CACHED = "cached"  # free, and a prefix may find it
    PROTECTED = "protected"  # cached, and used more than once: allocated last


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOwner:
    """The number of blocks with one use and owner.

    request: of RUNNING ones, else None. tenant, salt: of the request, or of the request that
    computed cached blocks; salt is a keyed digest in hex, "" for none.
    """

    use: BlockUse
    blocks: int
    request: int | None = None
    tenant: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSnapshot:
    """A request that runs or waits. request: its number of arrival in this engine.

    age_ms: since its arrival. known_tokens: of the prompt and the output so far; computed_tokens:
    of these, with keys and values in the cache. max_tokens: the most it may have. blocks: of the
    pool, shared ones counted whole.
    """

    request: int
    tenant: str
    age_ms: float
    prompt_tokens: int
    known_tokens: int
    computed_tokens: int
    cached_tokens: int
    max_tokens: int
    blocks: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSnapshot:
    """A KV tier. fetching: blocks on their way back into the pool."""

    tier: str
    blocks_total: int
    blocks_used: int
    fetching: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """Milliseconds of a step's parts, learned from the steps that this engine has timed.

    fixed_ms: of each step; token_ms: of each token row; score_ms: of each row through the head;
    position_ms: of each pair of a token and a position it attends to; read_ms: of each position
    read. steps_timed: the number of steps they were learned from; 0: proportions only.
    """

    steps_timed: int
    fixed_ms: float
    token_ms: float
    score_ms: float
    position_ms: float
    read_ms: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineSnapshot:
    """The state of one engine between two steps.

    limits: of the scheduler, by name (quire/scheduler/limits.py); 0 where there is none.

    running and waiting list the first requests only, in their order; the totals count all. The map
    has one cell for each `blocks_per_cell` blocks and shows the first of them: run_lengths[i] cells
    belong to owners[run_owners[i]]. The counts in `owners` are of all blocks.
    """

    steps_total: int
    steps_in_flight: int
    slots_total: int
    running_total: int
    waiting_total: int
    held_total: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]
    block_size: int
    blocks_total: int
    blocks_per_cell: int
    owners: tuple[BlockOwner, ...]
    run_lengths: Int32s
    run_owners: Int32s
    tiers: tuple[TierSnapshot, ...]
    limits: Mapping[str, float]
    step_prices: StepPrices
