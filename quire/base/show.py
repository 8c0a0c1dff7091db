"""Show a value in an error message: as JSON, cut short, whatever its size.

Nothing huge is written out before it is cut: of a list, an object or a text only the beginning is
looked at. Knows the values JSON has; anything else is shown as Python writes it.
"""

from __future__ import annotations

import json
from typing import Any

MAX_SHOWN_CHARS = 60
_MAX_ENTRIES = 6
_MAX_LEVELS = 3
_MAX_DIGITS = 40
_CUT = "..."


def show(value: Any) -> str:
    """At most MAX_SHOWN_CHARS characters on one line."""
    text = _shown(value, _MAX_LEVELS)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - len(_CUT)] + _CUT


def _shown(value: Any, levels: int) -> str:
    if isinstance(value, str):
        return json.dumps(value[:MAX_SHOWN_CHARS], ensure_ascii=not _is_text(value))
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int):
        is_long = value.bit_length() > 3 * _MAX_DIGITS
        return f"a number of {value.bit_length()} bits" if is_long else str(value)
    if isinstance(value, list | tuple):
        if levels == 0 and value:
            return f"[{_CUT}]"
        entries = [_shown(entry, levels - 1) for entry in value[:_MAX_ENTRIES]]
        return f"[{_listed(entries, len(value))}]"
    if isinstance(value, dict):
        if levels == 0 and value:
            return f"{{{_CUT}}}"
        firsts = [pair for pair, _ in zip(value.items(), range(_MAX_ENTRIES), strict=False)]
        entries = [f"{_shown(key, 0)}: {_shown(entry, levels - 1)}" for key, entry in firsts]
        return f"{{{_listed(entries, len(value))}}}"
    return repr(value)


def _is_text(value: str) -> bool:
    """Return whether the beginning is valid Unicode that prints on a line."""
    return value[:MAX_SHOWN_CHARS].isprintable()


def _listed(entries: list[str], num_entries: int) -> str:
    return ", ".join([*entries, *([_CUT] if num_entries > len(entries) else [])])
