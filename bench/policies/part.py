"""Part: runs of an unfinished measurement, in a file, so that it can be stopped and continued.

Runs made for other settings are ignored. The file is whole after each run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class Part:
    """asked: the settings, in JSON values or names; runs for other settings are ignored."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self._path = path
        self._asked = json.loads(json.dumps(asked, default=str))
        self._runs: dict[str, list[Mapping[str, Any]]] = {}
        if path.exists():
            found = json.loads(path.read_text())
            if found["asked"] == self._asked:
                self._runs = found["runs"]

    def known(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Return earlier runs of this kind."""
        return tuple(self._runs.get(kind, ()))

    def keeper(self, kind: str) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that stores a run of this kind."""

        def keep(run: Mapping[str, Any]) -> None:
            self._runs.setdefault(kind, []).append(run)
            whole = self._path.with_suffix(".new")
            whole.write_text(json.dumps({"asked": self._asked, "runs": self._runs}) + "\n")
            whole.replace(self._path)

        return keep

    def remove(self) -> None:
        """Remove the file: the measurement is complete."""
        self._path.unlink(missing_ok=True)
