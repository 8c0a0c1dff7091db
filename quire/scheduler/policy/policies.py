"""The scheduling policies by name: one table, from which all lists of the names follow.

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

# Makes a policy of --policy-aging and the weights of tenants.
_Make = Callable[[float, Mapping[str, float]], Policy]
# config/groups.py has the same names in the same order, as it imports no scheduler.
_MAKERS: Mapping[str, _Make] = {
    "fcfs": lambda aging, weights: FirstCome(),
    "priority": lambda aging, weights: PriorityFirst(aging),
    "sjf": lambda aging, weights: ShortestFirst(aging),
    "fair": lambda aging, weights: FairShare(weights),
    "edf": lambda aging, weights: EarliestDeadline(aging),
}
POLICY_NAMES = tuple(_MAKERS)


def make_policy(
    name: str, *, aging: float = 1.0, weights: Mapping[str, float] | None = None
) -> Policy:
    """Return the policy of that name.

    aging: how much waiting counts; 1 is each policy's default, 0 is not at all. weights: of tenants
    for fair share, 1 for those not named. Raises SettingError for another name.
    """
    if name not in _MAKERS:
        raise SettingError(f"scheduling_policy is {name!r}; allowed: {', '.join(POLICY_NAMES)}")
    return _MAKERS[name](aging, weights or {})
