"""A router as a child process.

Knows no replicas. Always holds: it is ready once it is made, and ends with its context.
"""

from __future__ import annotations

import re

from bench.frontend.servers import Child


class Router(Child):
    """`quire route`, ready once it routes."""

    READY = "routing at "

    def __init__(self, *words: str) -> None:
        super().__init__("quire", "route", *words)
        found = re.search(r"routing at http://[0-9.]+:(\d+)", self.output())
        assert found is not None
        self.port = int(found[1])
