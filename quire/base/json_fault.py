"""Say where a text stops being JSON, what it has there, and how the usual mistakes are corrected.

Always holds: a message is one line and shows a few characters of the text, whatever its size.
"""

from __future__ import annotations

import json
import re

from quire.base.show import show

_SHOWN_CHARS = 20
_FORM = re.compile(r"[\w.%+\[\]-]+=")
_PYTHON_NAME = re.compile(r"(True|False|None)\b")


def json_fault(error: json.JSONDecodeError) -> str:
    """Return the fault as part of a message, on one line."""
    text, at = error.doc, error.pos
    rest = text[at : at + _SHOWN_CHARS]
    if not text[at:].strip():
        return f"it ends before its value is complete (line {error.lineno} column {error.colno})"
    what = "more follows the first value" if error.msg == "Extra data" else error.msg
    place = f"{what} at line {error.lineno} column {error.colno}, where it has {show(rest)}"
    advice = _advice(text, at)
    return f"{place}; {advice}" if advice else place


def _advice(text: str, at: int) -> str:
    """Return what to write instead; "" if that is not known."""
    rest = text[at : at + _SHOWN_CHARS]
    if at == 0 and (_FORM.match(rest) or rest.startswith("--")):
        return "it is a form, and forms are not read"
    if rest[0] in "}]" and text[:at].rstrip().endswith(","):
        return "leave the last comma out"
    if rest[0] == "'":
        return 'texts stand in double quotes, as in "a"'
    if _PYTHON_NAME.match(rest):
        return "JSON has true, false and null"
    if rest[0] in "\n\r\t":
        return r"write it as \n, \r or \t"
    return ""
