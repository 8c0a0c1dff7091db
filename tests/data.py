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
    """The path of an outside file or folder, or a skip that names what is missing."""
    path = _ROOT / relative
    if not path.exists():
        pytest.skip(f"outside data not found: {relative} (set QUIRE_DATA to its folder)")
    return path
