"""Where pictures come from: matplotlib, which is an extra, drawing into files.

Knows no picture. Always holds: matplotlib is imported only when something is drawn or about to be.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quire.base.errors import SettingError


def check_plots() -> None:
    """Raise SettingError where matplotlib is missing; asked before an hour is measured."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise SettingError(
            "a picture needs matplotlib: pip install 'matplotlib>=3.8', or leave --png out"
        ) from error


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files and nowhere else."""
    check_plots()
    import_module("matplotlib").use("Agg")
    return import_module("matplotlib.pyplot")
