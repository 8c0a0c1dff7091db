"""python -m bench.memory PART ...: what KV memory costs and what its policies save, part by part.

Each part is a file of this directory with a `main(arguments)`; its docstring says what it measures.
It writes JSON with a machine card into bench/results by default.
"""

from __future__ import annotations

import sys
from importlib import import_module

# Each part imports what it needs, so that it runs without the packages of others.
PARTS = ("groups", "paging", "plots", "preemption", "prefix", "warm")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        raise SystemExit(f"which part? one of: {', '.join(PARTS)}")
    import_module(f"bench.memory.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
