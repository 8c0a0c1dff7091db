"""The policies by name.

settings.POLICIES lists the names, so that the command line needs none of the policies. Always
holds: each name there has a policy here.
"""

from __future__ import annotations

from quire.router.settings import RouterSettings
from quire.routing.block_sets import BlockSets
from quire.routing.fewest_tokens import FewestTokens
from quire.routing.policy import Policy
from quire.routing.power_of_two import PowerOfTwo
from quire.routing.prefix_history import PrefixHistory
from quire.routing.round_robin import RoundRobin
from quire.routing.session_affinity import SessionAffinity
from quire.routing.warm_cache import WarmCache


def make_policy(settings: RouterSettings, sets: BlockSets | None = None) -> Policy:
    """Return the policy of the settings. sets: what replicas report by KV events."""
    if settings.policy == "round-robin":
        return RoundRobin()
    if settings.policy == "least-tokens":
        return FewestTokens()
    if settings.policy == "power-of-two":
        return PowerOfTwo()
    if settings.policy == "session-affinity":
        return SessionAffinity()
    return WarmCache(PrefixHistory(settings.history_blocks), settings.backlog_tokens, sets)
