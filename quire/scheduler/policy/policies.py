"""The scheduling policies by name: fcfs, priority, sjf, fair, edf.

Policies that favour some requests age all of them: waiting makes up for what others are favoured
by, so that every request is served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.base.errors import SettingError
from quire.scheduler.policy.earliest_deadline import EarliestDeadline
from quire.scheduler.policy.fair_share import FairShare
from quire.scheduler.policy.first_come import FirstCome
from quire.scheduler.policy.policy import Policy
from quire.scheduler.policy.priority import PriorityFirst
from quire.scheduler.policy.shortest_first import ShortestFirst

_BY_NAME: Mapping[str, Callable[[float], Policy]] = {
    "priority": PriorityFirst,
    "sjf": ShortestFirst,
    "edf": EarliestDeadline,
}
POLICY_NAMES = ("fcfs", "priority", "sjf", "fair", "edf")


def make_policy(
    name: str, *, aging: float = 1.0, weights: Mapping[str, float] | None = None
) -> Policy:
    """Return the policy of that name.

    aging: how much waiting counts; 1 is each policy's default, 0 is not at all. weights: of tenants
    for fair share, 1 for those not named. Raises SettingError for another name.
    """
    if name == "fcfs":
        return FirstCome()
    if name == "fair":
        return FairShare(weights or {})
    if name not in _BY_NAME:
        raise SettingError(f"scheduling_policy is {name!r}; allowed: {', '.join(POLICY_NAMES)}")
    return _BY_NAME[name](aging)
