"""Strict JSON for files and requests from outside.

Size is limited, duplicate keys are refused (which of two values counts is undefined), NaN
and Infinity are refused (they are not JSON), and nesting too deep is an error, not a crash. Knows
nothing of what the document means.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from quire.base import json_strings
from quire.base.json_fault import json_fault
from quire.base.show import show

MAX_DIGITS = 40
MAX_DEPTH = 64
_TOO_DEEP = f"it is nested too deeply (more than {MAX_DEPTH} levels); make it flatter"


def parse_object(raw: bytes, *, limit_bytes: int, yields: bool = False) -> dict[str, Any]:
    """Return the JSON object in `raw` (UTF-8). Raises ValueError saying what is wrong with it.

    yields: let other threads run between numbers, and between pieces of strings with escapes, at
    some cost for each.
    """
    if len(raw) > limit_bytes:
        raise ValueError(f"it has {len(raw)} bytes; at most {limit_bytes} are allowed")
    strings = None
    # A shorter text cannot have so many escapes.
    if yields and len(raw) > json_strings.MAX_ESCAPES and json_strings.has_many_escapes(raw):
        strings = json_strings.Unescaped(raw)
    try:
        text = (raw if strings is None else strings.text).decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it is not JSON: it begins with a byte order mark; leave that out")
        document = (_YIELDING_DECODER if yields else _DECODER).decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON: {json_fault(error) if strings is None else error.msg}"
        ) from error
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except ValueError as error:
        raise ValueError(
            str(error) if strings is None else strings.described(str(error))
        ) from error
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:  # fewer cannot be deeper
        _check_depth(document)
    if strings is not None:
        document = strings.restored(document)
    if not isinstance(document, dict):
        raise ValueError(f"it is {show(document)}; an object is expected")
    return document


def _check_depth(document: Any) -> None:
    """Independent of the parser's stack: later readers of the document may have less."""
    level = [document] if isinstance(document, list | dict) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, list | dict)]
    if level:
        raise ValueError(_TOO_DEEP)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = sorted(key for key, count in counts.items() if count > 1)[:5]
        raise ValueError(f"key {', '.join(map(show, twice))} is given twice; keep one")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not JSON; write a finite number")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(
            f"it holds a number of {len(digits)} digits; at most {MAX_DIGITS} are allowed"
        )
    return int(digits)


def _real(digits: str) -> float:
    return float(digits)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_int=_whole
)
_YIELDING_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates,
    parse_constant=_refuse_constant,
    parse_int=_whole,
    parse_float=_real,
)
