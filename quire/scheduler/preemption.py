"""Preemption: making room when running requests need more blocks than are free.

Rows are served in the order of the policy's keys. A row that lacks blocks takes them from requests
behind it, never from those before; if that does not suffice it waits, without losing anything.
So the first row always gets on, and keys grow with the time of arrival: nobody is preempted
forever. A victim that is still named by a plan in flight is not preempted but left out of this
step: its results land first, and by the next step either somebody ended, or it is preempted then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.policy import Policy
from quire.scheduler.state import Bools, Index, Int32s


def make_room(
    index: Index,
    needs: Int32s,
    *,
    cache: CacheManager,
    policy: Policy,
    in_flight: Bools,
    preempt: Callable[[int], None],
) -> Bools:
    """Which rows may go on with what they need; `preempt` is called for each victim.

    index: slots of the rows in order of service; needs[i]: blocks row i lacks; in_flight[i]:
    whether a plan in flight names it.
    """
    goes_on = np.ones(len(index), np.bool_)
    row_of = np.empty(1 + int(index.max()), np.intp)
    row_of[index] = np.arange(len(index))
    reserved = 0  # blocks of earlier rows, given or waited for
    for row in needs.nonzero()[0].tolist():
        if not goes_on[row]:
            continue
        reserved += int(needs[row])
        promised = 0
        for victim in policy.victims(index[row + 1 :][goes_on[row + 1 :]]).tolist():
            if reserved <= cache.num_free + promised:
                break
            goes_on[row_of[victim]] = False
            if in_flight[row_of[victim]]:
                promised += cache.num_freed_by(victim)
            else:
                preempt(victim)
        goes_on[row] = reserved <= cache.num_free
    return goes_on
