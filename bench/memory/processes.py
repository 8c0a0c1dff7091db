"""Run measurements in processes of their own, collect them in a file, and take medians.

The parts of this bench need a fresh engine for each run. A part gives its runs' arguments and a
function that summarizes runs; its own module runs in the child, with its own arguments, and prints
the run as JSON in its last line. Runs accumulate: an existing file is continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.checkpoints import random_checkpoint
from quire.bench.machine import machine_card

SHAPE = "qwen3-0.6b"
Run = dict[str, Any]


def add_places(parser: argparse.ArgumentParser, *, out: Path) -> None:
    """Add the flags of all parts with processes."""
    parser.add_argument("--model", default="")
    parser.add_argument("--tier", default="")
    parser.add_argument("--pack-cache", default="")
    parser.add_argument("--out", type=Path, default=out)


def fill_places(args: argparse.Namespace, part: str) -> None:
    """Fill missing paths: random weights of SHAPE, and directories beside them."""
    checkpoint = random_checkpoint(SHAPE)
    args.model = args.model or str(checkpoint)
    args.tier = args.tier or str(checkpoint.parent / f"tier-{part}")
    args.pack_cache = args.pack_cache or str(checkpoint.parent / "packed")


def child(args: argparse.Namespace, part: str, *flags: str) -> Run:
    """Return what `part` measures with `flags`, in a fresh process."""
    command = [sys.executable, "-m", "bench.memory", part, "--model", args.model]
    command += ["--tier", args.tier, "--pack-cache", args.pack_cache, *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    run: Run = json.loads(done.stdout.splitlines()[-1])
    return run


class Runs:
    """The runs of a file, and their summary. content: the whole file."""

    def __init__(
        self, part: str, out: Path, summary: Callable[[list[Run]], Mapping[str, Any]]
    ) -> None:
        self._part = part
        self._out = out
        self._summary = summary
        self.content: dict[str, Any] = {"runs": []}
        if out.exists():
            self.content = json.loads(out.read_text())

    @property
    def all(self) -> list[Run]:
        """Return all runs, those of earlier calls first."""
        runs: list[Run] = self.content["runs"]
        return runs

    def add(self, run: Run, **about: Any) -> None:
        """Add a run and rewrite the file."""
        self.content["runs"].append(run)
        self.content |= {"bench": f"memory {self._part}", "machine": machine_card(), **about}
        self.content["summary"] = self._summary(self.all)
        self._out.write_text(json.dumps(self.content, indent=1) + "\n")

    def print_summary(self) -> None:
        """Print the summary."""
        print(json.dumps(self.content.get("summary", {}), indent=1))


def median(runs: Iterable[Run], what: str, **where: Any) -> float | None:
    """Return the median of runs[...][what] where all of `where` holds; None if there are none."""
    found = [run[what] for run in runs if all(run[name] == value for name, value in where.items())]
    return statistics.median(found) if found else None
