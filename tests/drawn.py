"""How many cases a test has: a third in the default suite, all with QUIRE_DRAWN_CASES.

`make exact` sets it. Knows no test. Always holds: what finds a planted fault has fixed seeds,
and does not depend on this.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

DRAWS_ALL = "QUIRE_DRAWN_CASES" in os.environ
Value = TypeVar("Value")


def examples(num: int) -> int:
    """Return how many of `num` cases are drawn."""
    return num if DRAWS_ALL else -(-num // 3)


def each_third(values: Iterable[Value], *case: object) -> list[Value]:
    """Return a third of the values, which third depends on the case: over some cases, all."""
    return list(values) if DRAWS_ALL else list(values)[zlib.crc32(repr(case).encode()) % 3 :: 3]
