"""Features: the parts of a router that its configuration file adds; the settings in that file.

A router without a file has no aliases, no hedging, no quotas and no cascades. Knows how the parts
are made of the file, and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import UNSET

from quire.router.cascade import Cascade
from quire.router.fleet import Fleet
from quire.router.hedging import Hedger
from quire.router.lanes import Lanes
from quire.router.model_names import ModelNames
from quire.router.quotas import Quotas
from quire.router.route_file import RouteFile, SummariesTable
from quire.router.routed_request import RoutedRequest
from quire.router.settings import RouterSettings
from quire.router.sleepers import Sleepers
from quire.router.tiers import Tiers
from quire.routing.block_sets import BlockSets

_DEFAULTS = RouterSettings()


class PrefixLookUp(Protocol):
    """Finds the KV blocks of prompts (exact_prefixes.py)."""

    async def look_up(self, request: RoutedRequest) -> None:
        """Set the block hashes of a request, where they are known."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Gauges by name."""

    def close(self) -> None:
        """End what follows the replicas."""


@dataclass(slots=True, kw_only=True)
class Features:
    """hedger, summaries, lanes, tiers, sleepers, quotas: None where they are off. is_redis_down:
    None without Redis. sets: of the KV blocks that replicas report; make_look_up: returns what
    follows the replicas of a fleet; both None without KV events."""

    names: ModelNames = field(default_factory=lambda: ModelNames({}))
    cascades: Mapping[str, Cascade] = field(default_factory=dict)
    hedger: Hedger | None = None
    summaries: SummariesTable | None = None
    lanes: Lanes | None = None
    tiers: Tiers | None = None
    sleepers: Sleepers | None = None
    quotas: Quotas | None = None
    is_redis_down: Callable[[], bool] | None = None
    sets: BlockSets | None = None
    make_look_up: Callable[[Fleet], PrefixLookUp] | None = None

    @property
    def counts_usage(self) -> bool:
        """Whether the usage of answers is read."""
        return self.quotas is not None or bool(self.cascades)


def settings_in(file: RouteFile) -> dict[str, Any]:
    """Return the arguments of RouterSettings that a file sets, and the defaults of the others."""
    found = {
        "policy": file.policy,
        "backlog_tokens": file.backlog_tokens,
        "max_open": file.max_open_requests,
        "max_open_per_key": file.max_open_per_key,
        "probe_s": file.probe_seconds,
        "stall_s": file.stall_seconds,
        "silence_s": file.silence_seconds,
        "connect_s": file.connect_seconds,
        "resume_s": file.resume_seconds,
        "wait_s": file.wait_seconds,
        "grace_s": file.grace_seconds,
        "cors_origin": file.cors_origin,
    }
    return {
        name: getattr(_DEFAULTS, name) if value is UNSET else value for name, value in found.items()
    }


def features_of(
    file: RouteFile, quotas: Quotas | None, is_redis_down: Callable[[], bool] | None = None
) -> Features:
    """Return the features of a configuration file."""
    hedging = file.hedging
    return Features(
        names=ModelNames(file.models, file.default_model),
        cascades={name: Cascade(name, table) for name, table in file.cascades.items()},
        hedger=None
        if hedging is None
        else Hedger(hedging.share, hedging.percentile, whole_answers=hedging.whole_answers),
        summaries=file.summaries,
        lanes=None if file.lanes is None else Lanes(file.lanes),
        tiers=None if file.tiers is None else Tiers(file.tiers),
        sleepers=None if file.sleep is None else Sleepers(file.sleep),
        quotas=quotas,
        is_redis_down=is_redis_down,
    )
