"""Result files of the GPU check: written atomically, with a digest of the measured code.

The digest shows whether results of several calls belong to the same code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MEASURED = ("quire", "bench/gpu")  # what a result depends on


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write the file by a rename: a reader finds this version or the previous one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def code_digest(root: Path = ROOT) -> str:
    """Return a digest of the measured code; there may be no repository where it runs."""
    digest = hashlib.sha256()
    for folder in MEASURED:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
