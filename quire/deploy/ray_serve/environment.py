"""What the environment of a Ray cluster must say for an application, and what it should.

Variables are read where they count: in an actor of the cluster, not in the program that deploys.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.base.errors import SettingError

_ON = ("1", "true")


def check_environment(environment: Mapping[str, str], ingress: str) -> list[str]:
    """Return what should be set otherwise. Raises SettingError for what must be.

    ingress: as in AppArgs.
    """
    has_haproxy = environment.get("RAY_SERVE_ENABLE_HA_PROXY", "0").lower() in _ON
    if ingress == "direct" and not has_haproxy:
        raise SettingError(
            "RAY_SERVE_ENABLE_HA_PROXY is not 1 in this cluster, so each token would pass through "
            "Serve's Python proxy; start all nodes with RAY_SERVE_ENABLE_HA_PROXY=1, or give "
            "ingress: proxy"
        )
    advice = []
    if environment.get("RAY_AUTH_MODE", "") not in ("token", "k8s"):
        advice.append(
            "RAY_AUTH_MODE is not token: whatever reaches the cluster's ports can run programs on "
            "it; set RAY_AUTH_MODE=token on all nodes"
        )
    if environment.get("RAY_USAGE_STATS_ENABLED", "") != "0":
        advice.append("RAY_USAGE_STATS_ENABLED is not 0, so Ray may send usage statistics")
    return advice
