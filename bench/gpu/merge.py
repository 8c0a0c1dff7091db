"""Merge several calls of the GPU check: python -m bench.gpu.merge FILE... --out FILE

Of each section the best result is used: the last one that passed; else the last one started.
Rejects files of other code, another machine, or dry runs: results must be comparable. With
--allow-other-code the sections of other code (a check that was mended between two calls, say) are
taken too, and keep the digest of theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.result import write
from bench.gpu.sections import SECTIONS

Result = dict[str, Any]


def main() -> int:
    """Merge files and return the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--allow-other-code", action="store_true")
    arguments = parser.parse_args()
    results = [json.loads(file.read_text(encoding="utf-8")) for file in arguments.files]
    try:
        merged = merge(results, allow_other_code=arguments.allow_other_code)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    write(arguments.out, merged)
    for name, section in merged["sections"].items():
        print(f"{name}: {section['status']}")
    return 0


def merge(results: Sequence[Result], *, allow_other_code: bool = False) -> Result:
    """Return one merged result, in the order of the sections. Raises ValueError."""
    first = results[0]
    for result in results:
        if result["what"].startswith("dry run"):
            raise ValueError("one of these is a dry run: it measured nothing; leave it out")
        for part in ("machine",) if allow_other_code else ("code", "machine"):
            one, other = (_compared(part, each) for each in (first, result))
            if one != other:
                raise ValueError(
                    f"the {part} differs: {one} and {other}; figures of one result are of one kind "
                    "of machine and one state of the code: run the older sections again"
                )
    best: dict[str, Any] = {}
    for result in results:
        for name, section in result["sections"].items():
            if name not in best or _rank(section) >= _rank(best[name]):
                own = {} if result["code"] == first["code"] else {"code": result["code"]}
                best[name] = own | section
    merged = {**first, "sections": {name: best[name] for name in SECTIONS if name in best}}
    others: list[Any] = []
    for result in results:
        for machine in (result["machine"], *result.get("other_machines", ())):
            if machine not in [first["machine"], *others]:
                others.append(machine)
    return merged | ({"other_machines": others} if others else {})


def _compared(part: str, result: Result) -> Any:
    """Return what results depend on: names of cards and packages. A driver may differ; it
    is reported.
    """
    if part != "machine":
        return result[part]
    gpus = result[part]["gpus"]
    names = [str(card).partition(",")[0] for card in gpus] if isinstance(gpus, list) else gpus
    return names, result[part]["packages"]


def _rank(section: dict[str, Any]) -> int:
    """Return the rank of a status: passed, started, not started."""
    if section["status"] == "ok":
        return 2
    return 0 if section["status"].startswith("not begun") else 1


if __name__ == "__main__":
    sys.exit(main())
