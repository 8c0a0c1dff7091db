"""Run one section of the GPU check in this process: `python -m bench.gpu.child NAME --report FILE`.

A section's findings are written as they come, so that a section ended for its time has reported
what it had.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.result import write
from bench.gpu.sections import SECTIONS
from bench.gpu.stage import Stage


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("name", choices=list(SECTIONS))
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--max-s", type=float, required=True)
    parser.add_argument("--dry-run-on-cpu", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}

    def report(what: str, value: Any) -> None:
        found[what] = value
        write(arguments.report, {"found": found})
        print(f"{what}: {json.dumps(value)}", flush=True)

    if arguments.dry_run_on_cpu:
        from bench.gpu.interpreter import mend

        mend()
    module, _, function = SECTIONS[arguments.name].function.partition(":")
    stage = Stage(
        is_dry=arguments.dry_run_on_cpu,
        ends=time.monotonic() + 0.9 * arguments.max_s,
        report=report,
    )
    getattr(importlib.import_module(module), function)(stage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
