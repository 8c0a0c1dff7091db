"""Describe a JSON Schema in a few words for a table of fields: "number, 0 to 100 (1)".

Knows the kinds of schemas that field_schemas.py makes, and no HTML. Null is not mentioned: every
optional field may be null.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

_KINDS = {"string": "text", "boolean": "true or false", "array": "list", "integer": "integer"}
_MAX_SHOWN = 7


def words_of(schema: Schema) -> str:
    """Return type and bounds."""
    if "const" in schema:
        return _value(schema["const"])
    if "enum" in schema:
        return _listed([_value(value) for value in schema["enum"] if value is not None])
    if "anyOf" in schema:
        kinds = [words_of(one) for one in schema["anyOf"] if one != {"type": "null"}]
        return _listed(list(dict.fromkeys(kinds)))
    if schema.keys() <= {"description", "x-quire"}:
        return "anything"
    kinds = schema.get("type", "anything")
    named = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if kind != "null"]
    return _listed([_with_bounds(kind, schema) for kind in named])


def default_of(schema: Schema) -> str:
    """Return the default value; "" if there is none."""
    return _value(schema["default"]) if "default" in schema else ""


def _with_bounds(kind: str, schema: Schema) -> str:
    if kind == "array":
        return _list_words(schema)
    if kind == "object":
        return _object_words(schema)
    words = _KINDS.get(kind, kind)
    if kind == "string" and "maxLength" in schema:
        return f"text of {schema.get('minLength', 0)} to {schema['maxLength']:,} characters"
    if kind not in ("integer", "number"):
        return words
    least, above, most = (schema.get(bound) for bound in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None:
        return f"{words}, above {_value(above)} to {_value(most)}"
    if least is not None and most is not None:
        return f"{words}, {_value(least)} to {_value(most)}"
    return f"{words} from {_value(least)}" if least is not None else words


def _list_words(schema: Schema) -> str:
    entry = words_of(schema["items"]) if "items" in schema else "anything"
    if entry.startswith("integer, 0 to "):  # token ids
        entry = f"token ids{entry.removeprefix('integer')}"
    elif entry in ("text", "object"):
        entry += "s"
    most = schema.get("maxItems")
    return f"list of {entry}" if most is None else f"list (at most {most:,}) of {entry}"


def _object_words(schema: Schema) -> str:
    names = list(schema.get("properties", ()))
    if not names:
        return "object"
    shown = ", ".join(names[:_MAX_SHOWN])
    return f"{{{shown}{', ...' if len(names) > _MAX_SHOWN else ''}}}"


def _value(value: Any) -> str:
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _number(value)
    return json.dumps(value, ensure_ascii=False)


def _number(value: int) -> str:
    """Return the number; near a large power of two as that power."""
    for power in (31, 63):
        for near, words in ((2**power - 1, f"2^{power} - 1"), (-(2**power), f"-2^{power}")):
            if value == near:
                return words
    return f"{value:,}"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(words) if len(words) <= 2 else f"{', '.join(words[:-1])} or {words[-1]}"
