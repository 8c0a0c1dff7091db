"""The routing policies by name.

settings.ROUTING_POLICIES lists the names, so that the command line needs none of the policies.
Always holds: each name there has a policy here, and no other has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.base.errors import SettingError
from quire.router.settings import AUTO, RouterSettings
from quire.routing.block_sets import BlockSets
from quire.routing.least_tokens import LeastTokens
from quire.routing.policy import RoutingPolicy
from quire.routing.power_of_two import PowerOfTwo
from quire.routing.prefix_history import PrefixHistory
from quire.routing.round_robin import RoundRobin
from quire.routing.session_affinity import SessionAffinity
from quire.routing.warm_cache import WarmCache

# Makes a policy of the settings and of what replicas report by KV events.
_Make = Callable[[RouterSettings, BlockSets | None], RoutingPolicy]


def _warm_cache(settings: RouterSettings, sets: BlockSets | None) -> RoutingPolicy:
    backlog_tokens = None if settings.backlog_tokens == AUTO else settings.backlog_tokens
    return WarmCache(PrefixHistory(settings.history_blocks), backlog_tokens, sets)


MAKERS: Mapping[str, _Make] = {
    "warm-cache": _warm_cache,
    "session-affinity": lambda settings, sets: SessionAffinity(),
    "least-tokens": lambda settings, sets: LeastTokens(),
    "power-of-two": lambda settings, sets: PowerOfTwo(),
    "round-robin": lambda settings, sets: RoundRobin(),
}


def make_routing_policy(settings: RouterSettings, sets: BlockSets | None = None) -> RoutingPolicy:
    """Return the policy of the settings. sets: what replicas report by KV events. Raises
    SettingError for reports that the policy does not read."""
    policy = MAKERS[settings.policy](settings, sets)
    if sets is not None and not policy.uses_events:
        raise SettingError(
            f"[kv-events] is for the policy warm-cache and the policy is {settings.policy}; leave "
            "one of the two out"
        )
    return policy
