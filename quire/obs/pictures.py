"""Drawing with matplotlib, an extra, into files: import checks and lines that stay visible.

Always holds: matplotlib is imported only when something is drawn or about to be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.base.errors import SettingError

COLOURS = ("#2a78d6", "#e0701a", "#1b9e63", "#c43c4a", "#7d5bbe", "#8a6a4f", "#d26bb0")
_FORMATS = (".png", ".pdf", ".svg")
_MARKS = "osD^vP*"
_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))


def check_plots() -> None:
    """Raise SettingError where matplotlib is missing; called before an hour is measured."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise SettingError(
            "a picture needs matplotlib: pip install 'quire-llm[bench]', or leave --png out"
        ) from error


def check_picture(path: Path) -> None:
    """Raise SettingError where a picture cannot be drawn or written, before an hour is measured."""
    if path.suffix not in _FORMATS:
        raise SettingError(f"--png {path} is no picture; {', '.join(_FORMATS)} are allowed endings")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise SettingError(
            f"--png {path} cannot be written; name a file in a directory that exists and is yours"
        )
    check_plots()


def pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw into files only."""
    check_plots()
    import_module("matplotlib").use("Agg")
    return import_module("matplotlib.pyplot")


def draw_lines(
    panel: Any, at: Mapping[str, Sequence[float]], values: Mapping[str, Sequence[float]]
) -> None:
    """Draw a line for each name so that overlapping ones stay distinguishable.

    Equal series become one line with all their names in the legend. The others get narrower and
    their markers smaller from name to name, so that a line below shows on both sides of one above.
    A name keeps its colour and marker in every panel.
    """
    names = list(values)
    groups = equal_series({name: (*at[name], *values[name]) for name in names})
    for depth, group in enumerate(groups):
        number = names.index(group[0])
        panel.plot(
            at[group[0]],
            values[group[0]],
            color=COLOURS[number % len(COLOURS)],
            marker=_MARKS[number % len(_MARKS)],
            linestyle=_DASHES[depth % len(_DASHES)],
            linewidth=max(4.5 - 1.3 * depth, 1.4),
            markersize=max(10.0 - 1.5 * depth, 4.0),
            alpha=0.5 if depth == 0 and len(groups) > 1 else 1.0,
            label=" = ".join(group),
        )


def equal_series(series: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return the names grouped by equal values, in order; NaN equals NaN."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, values in series.items():
        groups.setdefault(tuple(f"{value:.9g}" for value in values), []).append(name)
    return list(groups.values())


def use_log_scale(panel: Any) -> None:
    """Make the y axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    ticker = import_module("matplotlib.ticker")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(ticker.NullFormatter())
