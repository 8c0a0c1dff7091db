"""Runs the sections of the GPU check one after the other, each in a process of its own.

A section that fails, hangs or breaks the device fails alone: its process is ended when its share of
the time is over, and its words are kept in the result. The result file is written anew after each
section. Exit code 0 where every section that ran passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.card import machine_card
from bench.gpu.sections import SECTIONS

LEAST_S = 20.0  # with less time left a section is not begun
LAST_WORDS = 1500  # characters of a failed section's output


def main() -> int:
    """The check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--time-budget-s", type=float, default=1500.0)
    parser.add_argument("--only", default="", help="sections, with commas between")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="tiny shapes, CPU tensors")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name] or list(SECTIONS)
    if unknown := sorted(set(wanted) - set(SECTIONS)):
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "what": "quire on a GPU" if not arguments.dry_run_on_cpu else "dry run: no measurement",
        "machine": machine_card(),
        "sections": {},
    }
    ends = time.monotonic() + arguments.time_budget_s
    for name in wanted:
        left_s = ends - time.monotonic()
        if left_s < LEAST_S:
            result["sections"][name] = {"status": "not begun: the time is over"}
        else:
            most_s = min(left_s, SECTIONS[name].most_s)
            result["sections"][name] = _run(name, arguments, most_s)
        _write(arguments.out / "gpu-check.json", result)
        print(f"{name}: {result['sections'][name]['status']}", flush=True)
    passed = [section["status"] == "ok" for section in result["sections"].values()]
    return 0 if all(passed) else 1


def _run(name: str, arguments: argparse.Namespace, most_s: float) -> dict[str, Any]:
    """One section's result; whatever happens to it, a status."""
    command = [sys.executable, "-m", "bench.gpu.child", name]
    environment = dict(os.environ)
    if arguments.dry_run_on_cpu:
        command.append("--dry-run-on-cpu")
        environment["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command += ["--told", str(told), "--most-s", str(most_s)]
        with (arguments.out / "gpu-check.log").open("a+", encoding="utf-8") as log:
            print(f"== {name}", file=log, flush=True)
            first = log.tell()
            try:
                code = subprocess.run(
                    command, stdout=log, stderr=log, timeout=most_s, env=environment, check=False
                ).returncode
                status = "ok" if code == 0 else f"failed: exit code {code}"
            except subprocess.TimeoutExpired:
                status = f"failed: not done after {most_s:.0f} s"
            log.seek(first)
            said = log.read()[-LAST_WORDS:]
        section: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        if told.exists():
            section |= json.loads(told.read_text(encoding="utf-8"))
        if status != "ok":
            section["last_words"] = said
        return section


def _write(path: Path, result: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, sort_keys=False) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
