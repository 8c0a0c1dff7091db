"""Features: the parts of a router that its configuration file adds, and their neutral forms.

A router without a file has no aliases, no hedging, no quotas and no cascades. Knows how the parts
are made of the file, and nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quire.router.cascade import Cascade
from quire.router.hedging import Hedger
from quire.router.lanes import Lanes
from quire.router.model_names import ModelNames
from quire.router.quotas import Quotas
from quire.router.route_file import RouteFile


@dataclass(slots=True, kw_only=True)
class Features:
    """hedger, lanes, quotas: None where they are off. is_redis_down: None without Redis."""

    names: ModelNames = field(default_factory=lambda: ModelNames({}))
    cascades: Mapping[str, Cascade] = field(default_factory=dict)
    hedger: Hedger | None = None
    lanes: Lanes | None = None
    quotas: Quotas | None = None
    is_redis_down: Callable[[], bool] | None = None

    @property
    def counts_usage(self) -> bool:
        """Whether the usage of answers is read."""
        return self.quotas is not None or bool(self.cascades)


def features_of(
    file: RouteFile, quotas: Quotas | None, is_redis_down: Callable[[], bool] | None = None
) -> Features:
    """Return the features of a configuration file."""
    hedging = file.hedging
    return Features(
        names=ModelNames(file.models, file.default_model),
        cascades={name: Cascade(name, table) for name, table in file.cascades.items()},
        hedger=None if hedging is None else Hedger(hedging.share, hedging.percentile),
        lanes=None if file.lanes is None else Lanes(file.lanes),
        quotas=quotas,
        is_redis_down=is_redis_down,
    )
