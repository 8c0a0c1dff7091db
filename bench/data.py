"""Locate the external data of benchmarks: real weights and texts.

The only file of bench/ that knows the path: the environment variable QUIRE_DATA, else the directory
`shared/data` beside the repository. Knows no format.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(os.environ.get("QUIRE_DATA") or Path(__file__).parents[2] / "shared" / "data")


def outside(relative: str) -> Path:
    """Return the path of an external file or directory. Raises SystemExit if it is missing."""
    path = _ROOT / relative
    if not path.exists():
        raise SystemExit(f"outside data not found: {relative}; set QUIRE_DATA to its folder")
    return path
