"""make_room: preempts where running requests need more blocks than are free.

Rows are served in the order of the policy's keys. A row that lacks blocks takes them from requests
behind it, never from those before; if that does not suffice it waits, without losing anything. So
the first row always advances, and keys grow with the time of arrival: no request is preempted
forever. A victim that a plan in flight still names is not preempted but left out of this step: its
results land first, and by the next step either a request has ended, or it is preempted then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.cache.manager import CacheManager
from quire.scheduler.running_batch import Bools, Index, Int32s
from quire.scheduler.step_budget import BlockShares


def make_room(
    index: Index,
    needs: Int32s,
    *,
    cache: CacheManager,
    victims: Callable[[Index], Index],
    tenants: BlockShares,
    in_flight: Bools,
    preempt: Callable[[int], None],
) -> Bools:
    """Return which rows may go on with what they need; call `preempt` for each victim.

    index: slots of the rows in order of service; needs[i]: blocks row i lacks; in_flight[i]:
    whether a plan in flight names it. victims: returns slots with the first victim first. Blocks
    that `tenants` reserve for others are not taken.
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
        slot = int(index[row])
        for victim in victims(index[row + 1 :][goes_on[row + 1 :]]).tolist():
            if reserved <= cache.num_free - tenants.reserved_from_slot(slot) + promised:
                break
            if not tenants.may_lose(victim, slot):
                continue
            goes_on[row_of[victim]] = False
            if in_flight[row_of[victim]]:
                promised += cache.num_freed_by(victim)
            else:
                preempt(victim)
        kept = tenants.reserved_from_slot(slot)
        goes_on[row] = reserved <= cache.num_free - kept
        if not goes_on[row] and kept:  # what it waits for is not what those behind it may take
            reserved -= int(needs[row])
    return goes_on
