"""Which fixed numbers of drafts are clearly slower than the best one.

Reads rounds and measures nothing. Always holds: the best one and the side without drafts stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.speculation.cells import GOAL_CONTROL, Cell
from bench.speculation.rounds import Round, best_side, clipped, side_ratio

# A fixed k is left out after so many rounds if its share of the best one's speed is less; later,
# if its interval is below what the control must reach. Rounds of several answers, and those of a
# large model in large batches, differ less, as they hold the drafts of many requests.
POOR_SHARES, LONG_POOR_SHARES = {1: 0.6, 2: 0.8}, {1: 0.75, 2: 0.85}
LARGE_BATCH = 16
SOME_ROUNDS, LOW_SHARE = 4, GOAL_CONTROL


def slower_sides(cell: Cell, all_rounds: Sequence[Round], names: Sequence[str]) -> list[str]:
    """Return those of `names` that are clearly not the best of them."""
    is_long = cell.batch >= LARGE_BATCH or cell.shares_engines
    poor_shares = LONG_POOR_SHARES if is_long else POOR_SHARES
    rounds = clipped(all_rounds)
    best = best_side(rounds, names)
    poor = poor_shares[min(len(rounds), max(poor_shares))]
    slower = []
    for name in names:
        share = side_ratio(rounds, best, name)
        is_low = share.high < LOW_SHARE and len(rounds) >= SOME_ROUNDS
        if name not in ("off", best) and (share.value < poor or is_low):
            slower.append(name)
    return slower
