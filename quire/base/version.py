"""Return the version of this package, installed or run from a checkout.

The distribution is called `quire-llm`; another project has the name `quire` on the package index,
so its metadata must not be read by mistake.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

DISTRIBUTION = "quire-llm"
UNKNOWN = "unknown"


def installed_version(checkout: Path = Path(__file__).parents[2]) -> str:
    """Return the version in the checkout's pyproject.toml, else that of the distribution.

    The checkout comes first: it is the code that runs, whatever else is installed.
    """
    project = project_table(checkout)
    if project is not None:
        return str(project["version"])
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return UNKNOWN  # files copied without their metadata


def project_table(checkout: Path) -> dict[str, Any] | None:
    """Return the `[project]` table of a checkout of Quire; None if there is no checkout."""
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    return project if project.get("name") == DISTRIBUTION else None
