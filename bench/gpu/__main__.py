"""Run the sections of the GPU check one after the other, each in a process of its own.

A section that fails, hangs or breaks the device fails alone: its process is ended when its share of
the time is over, and its output is kept in the result. The result file is written whenever a
section reports something. Exit code 0 if every section that ran passed.

If one call is too short for all sections, make several with --only (the log and the result list
what was not started), each with its own --out, and then merge the results: python -m
bench.gpu.merge DIR/gpu-check.json ... --out bench/results/gpu-check.json, which is committed after
python -m bench.readme_table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.card import machine_card
from bench.gpu.result import code_digest, write
from bench.gpu.sections import SECTIONS
from bench.gpu.supervise import supervised

MIN_S = 20.0  # a section is not started with less time left
LAST_WORDS = 1500  # characters of a failed section's output
Section = dict[str, Any]


def main() -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="bench/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--time-budget-s", type=float, default=1500.0)
    names = ", ".join(SECTIONS)
    parser.add_argument("--only", default="", help=f"sections, with commas between, of {names}")
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="tiny shapes, CPU tensors")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name] or list(SECTIONS)
    if unknown := sorted(set(wanted) - set(SECTIONS)):
        parser.error(f"no section {', '.join(unknown)}; there are {names}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Section] = {}
    result: dict[str, Any] = {
        "what": "quire on a GPU" if not arguments.dry_run_on_cpu else "dry run: no measurement",
        "code": code_digest(),
        "machine": machine_card(),
        "sections": sections,
    }
    ends = time.monotonic() + arguments.time_budget_s
    for name in wanted:

        def keep(section: Section, name: str = name) -> None:
            sections[name] = section
            write(arguments.out / "gpu-check.json", result)

        left_s = ends - time.monotonic()
        if left_s < MIN_S:
            keep({"status": "not begun: the time is over"})
        else:
            keep(_run(name, arguments, min(left_s, SECTIONS[name].max_s), keep))
        print(f"{name}: {_status_of(sections[name])}", flush=True)
    return 0 if all(section["status"] == "ok" for section in sections.values()) else 1


def _status_of(section: Section) -> str:
    """Return a section's status; for a failed one also the last line of its output."""
    lines = [line for line in section.get("last_words", "").splitlines() if line.strip()]
    return f"{section['status']}: {lines[-1].strip()}" if lines else str(section["status"])


def _run(
    name: str, arguments: argparse.Namespace, max_s: float, keep: Callable[[Section], None]
) -> Section:
    """Return one section's result, with a status in any case."""
    command = [sys.executable, "-m", "bench.gpu.child", name]
    environment = dict(os.environ)
    if arguments.dry_run_on_cpu:
        command.append("--dry-run-on-cpu")
        environment["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command += ["--report", str(report), "--max-s", str(max_s)]

        def found(status: str) -> Section:
            section: Section = {"status": status, "seconds": round(time.monotonic() - began, 1)}
            if report.exists():
                section |= json.loads(report.read_text(encoding="utf-8"))
            return section

        # A killed process may have written half a UTF-8 character.
        place = arguments.out / "gpu-check.log"
        with place.open("a+", encoding="utf-8", errors="replace") as log:
            print(f"== {name}", file=log, flush=True)
            first = log.tell()
            status = supervised(
                command,
                environment=environment,
                log=log,
                max_s=max_s,
                look=lambda: keep(found("begun, and not ended")),
            )
            section = found(status)
            if status != "ok":
                log.seek(first)
                section["last_words"] = log.read()[-LAST_WORDS:]
        return section


if __name__ == "__main__":
    sys.exit(main())
