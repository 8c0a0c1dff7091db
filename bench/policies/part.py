"""Part: runs of a measurement under way, in a file, so that it can be stopped and begun again.

Knows what was asked, and no run made for another question. Always holds: the file is whole after
each run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Part:
    """asked: what was asked, in what JSON can say or has a name; runs for anything else are not
    known."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self._path = path
        self._asked = json.loads(json.dumps(asked, default=str))
        self._runs: dict[str, list[Mapping[str, Any]]] = {}
        if path.exists():
            found = json.loads(path.read_text())
            if found["asked"] == self._asked:
                self._runs = found["runs"]

    def known(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Runs of this kind made before."""
        return tuple(self._runs.get(kind, ()))

    def keeper(self, kind: str) -> Callable[[Mapping[str, Any]], None]:
        """What keeps a run of this kind."""

        def keep(run: Mapping[str, Any]) -> None:
            self._runs.setdefault(kind, []).append(run)
            whole = self._path.with_suffix(".new")
            whole.write_text(json.dumps({"asked": self._asked, "runs": self._runs}) + "\n")
            whole.replace(self._path)

        return keep

    def remove(self) -> None:
        """The measurement is complete."""
        self._path.unlink(missing_ok=True)
