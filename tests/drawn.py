"""How many cases a property draws: a third in the default suite, all with QUIRE_DRAWN_CASES.

`make exact` sets it. Knows no property. Always holds: what finds a planted fault has fixed seeds,
and does not depend on this.
"""

from __future__ import annotations

import os

DRAWS_ALL = "QUIRE_DRAWN_CASES" in os.environ


def examples(num: int) -> int:
    """Return how many of `num` cases are drawn."""
    return num if DRAWS_ALL else -(-num // 3)
