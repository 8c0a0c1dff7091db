"""What several engines report, as one: counters and gauges added, lists joined.

Frozen records in, frozen records out; knows no engine. Always holds: a sum of one is that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from quire.base.cache_usage import CacheReport, OwnerUsage
from quire.base.engine_snapshot import EngineSnapshot, Int32s
from quire.base.engine_stats import EngineStats
from quire.base.kv_store import BreakerState
from quire.engine.model_card import ModelCard

# Makes one number of several: sum or max.
Join = Callable[[list[Any]], Any]

# The greatest of all, not the sum: engines of one server have one proposer.
_LATEST = frozenset({"last_step_ms", "proposer", "breaker"})
_NAMES = tuple(field.name for field in fields(EngineStats))
# Sizes, in spite of their names; and what a supervised engine adds up itself.
_NO_TOTALS = frozenset({"blocks_total", "tier_blocks_total", "restarts_total"})
_TOTALS = tuple(
    name
    for name in _NAMES
    if (name.endswith("_total") and name not in _NO_TOTALS) or name == "preemption_cost_counts"
)


def only_totals(stats: EngineStats) -> EngineStats:
    """Return the counters of an engine that has ended, without its gauges."""
    store = stats.kv_store
    return EngineStats(
        **{name: getattr(stats, name) for name in _TOTALS},
        proposer=stats.proposer,
        kv_store=None if store is None else replace(store, breaker=BreakerState.CLOSED.value),
    )


def sum_of_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the sum; tuples are added by place."""
    return _joined_stats(parts, sum)


def greatest_of_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the greatest of each count, of several views of one engine."""
    return _joined_stats(parts, max)


def _joined_stats(parts: Sequence[EngineStats], join: Join) -> EngineStats:
    if len(parts) == 1:
        return parts[0]
    return EngineStats(
        **{name: _joined(name, [getattr(one, name) for one in parts], join) for name in _NAMES}
    )


def sum_of_cards(cards: Sequence[ModelCard]) -> ModelCard:
    """Return the first card with what all have room for."""
    return replace(
        cards[0],
        num_blocks=sum(card.num_blocks for card in cards),
        max_num_seqs=sum(card.max_num_seqs for card in cards),
    )


def notes_of(parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the lines about the start of all engines."""
    several = (f"engines {len(parts)}, each with as much memory",) if len(parts) > 1 else ()
    return (*parts[0], *several)


def _joined(name: str, values: list[Any], join: Join) -> Any:
    """Return the values of a field as one, by `join` (sum or max)."""
    return max(values) if name in _LATEST else _join_all(values, join)


def _join_all(values: list[Any], join: Join) -> Any:
    """Join numbers, and records and tuples of them by place; None where no engine has the counts.

    Pairs of a name and a number are joined by name.
    """
    present = values if None not in values else [one for one in values if one is not None]
    if not present:
        return None
    first = present[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        parts = {name: [getattr(one, name) for one in present] for name in names}
        return replace(first, **{name: _joined(name, parts[name], join) for name in names})
    if isinstance(first, tuple):
        if any(one and isinstance(one[0], tuple) and isinstance(one[0][0], str) for one in present):
            return _join_by_name(present, join)
        places = zip_longest(*present)
        return tuple(_join_all(list(place), join) for place in places)
    return join(present)


def _join_by_name(
    parts: Sequence[tuple[tuple[str, int], ...]], join: Join
) -> tuple[tuple[str, int], ...]:
    joined: dict[str, int] = {}
    for name, count in (pair for part in parts for pair in part):
        joined[name] = join([joined.get(name, 0), count])
    return tuple(joined.items())


def sum_of_reports(parts: Sequence[CacheReport], num_prefixes: int) -> CacheReport:
    """Return the sum of what caches hold, with the prefixes that spared most tokens."""
    first = parts[0]
    counts = {
        field.name: sum(getattr(one, field.name) for one in parts)
        for field in fields(CacheReport)
        if field.name not in ("prefix_caching", "block_size", "prefixes", "owners")
    }
    prefixes = sorted(
        (prefix for one in parts for prefix in one.prefixes),
        key=lambda prefix: prefix.tokens * prefix.hits,
        reverse=True,
    )
    blocks: dict[tuple[str, str], int] = {}
    for owner in (owner for one in parts for owner in one.owners):
        key = owner.tenant, owner.salt
        blocks[key] = blocks.get(key, 0) + owner.blocks
    owners = tuple(
        OwnerUsage(tenant=tenant, salt=salt, blocks=count)
        for (tenant, salt), count in blocks.items()
    )
    return replace(first, **counts, prefixes=tuple(prefixes[:num_prefixes]), owners=owners)


def sum_of_snapshots(parts: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Return one snapshot: totals added, requests and maps one after the other.

    Requests keep the number that their engine gave them. Limits and prices are those of the first.
    """
    counts = {
        name: sum(getattr(one, name) for one in parts)
        for name in (
            *("steps_total", "steps_in_flight", "slots_total", "running_total"),
            *("waiting_total", "held_total", "blocks_total"),
        )
    }
    offsets = np.cumsum([0, *(len(one.owners) for one in parts)])
    run_owners: list[Int32s] = [
        one.run_owners + np.int32(offset) for one, offset in zip(parts, offsets, strict=False)
    ]
    return replace(
        parts[0],
        **counts,
        running=tuple(request for one in parts for request in one.running),
        waiting=tuple(request for one in parts for request in one.waiting),
        owners=tuple(owner for one in parts for owner in one.owners),
        run_lengths=np.concatenate([one.run_lengths for one in parts]),
        run_owners=np.concatenate(run_owners),
        tiers=tuple(tier for one in parts for tier in one.tiers),
    )
