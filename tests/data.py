"""Locate external data: real weights, tokenizers, texts and traces.

The only file of the tests that knows the path: the environment variable QUIRE_DATA, else the
directory `shared/data` beside the repository. Tests that need a file skip with a reason if it is
missing; each of them has a synthetic counterpart that never skips.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_ROOT = Path(os.environ.get("QUIRE_DATA") or Path(__file__).parents[2] / "shared" / "data")


def outside(relative: str) -> Path:
    """Return the path of an external file or directory, or skip with the missing name."""
    path = _ROOT / relative
    if not path.exists():
        pytest.skip(f"external data not found: {relative} (set QUIRE_DATA to its directory)")
    return path
