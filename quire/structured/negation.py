"""Negate simple schemas, by keywords that llguidance supports.

    negation({"type": "string", "minLength": 2})    # another type, or a maxLength of 1

Knows JSON Schema's keywords, but no grammars and no tokens. Invariant: the result allows exactly
the values that the schema forbids; what cannot be expressed is answered with None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.structured.disjoint import TYPES

MAX_NUMBERS = 32  # of a list that is negated, as bounds between them
MAX_LETTERS = 1_000  # of the strings of such a list, as a regular expression
# Characters that JSON escapes: llguidance's [^"] allows an escaped quote.
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')
_MARKS = frozenset(r".+*?()|[]{}^$#&-~")
ANY = r"[\s\S]"


def negation(schema: Any) -> Any:
    """Return a schema for the values this one forbids; None if it is not a simple one."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    said = {name: value for name, value in schema.items() if name not in _NOTES}
    if not said:
        return False
    parts = [_negated(name, value) for name, value in said.items()]
    if len(parts) > 1 and not _APART.issuperset(said):
        return None  # keywords that depend on each other
    if any(part is None for part in parts):
        return None
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _negated(keyword: str, value: Any) -> Any:
    rule = _NEGATIONS.get(keyword)
    return None if rule is None else rule(value)


def _not_types(value: Any) -> Any:
    types = {value} if isinstance(value, str) else set(value) if isinstance(value, list) else None
    if types is None or "integer" in types - ({"integer"} if "number" in types else set()):
        return None  # no type names the numbers that are not integers
    rest = [name for name in TYPES if name not in types]
    return {"type": rest} if rest else False


def _not_values(values: Any) -> Any:
    """Return a schema for all values but these; None if arrays or objects are among them."""
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    numbers = sorted({value for value in values if type(value) in (int, float)})
    texts = sorted({value for value in values if isinstance(value, str)})
    booleans = [one for one in (False, True) if not any(value is one for value in values)]
    if len(numbers) > MAX_NUMBERS or sum(map(len, texts)) > MAX_LETTERS:
        return None
    if any(_ESCAPED.search(text) for text in texts):
        return None
    types = ["object", "array"]
    if None not in values:
        types.append("null")
    others: list[Any] = [{"type": types}]
    if booleans:
        others.append({"enum": booleans})
    lows: list[Any] = [{"exclusiveMinimum": value} for value in numbers]
    highs: list[Any] = [{"exclusiveMaximum": value} for value in numbers]
    pairs = zip([{}, *lows], [*highs, {}], strict=True)
    others += [{"type": "number", **low, **high} for low, high in pairs]
    others.append({"type": "string", **({"pattern": _other_texts(texts)} if texts else {})})
    return {"anyOf": others}


def _other_texts(texts: list[str]) -> str:
    """Return a regular expression for all texts but these, by the first letter that differs."""
    ways = []
    starts = sorted({text[:end] for text in texts for end in range(len(text) + 1)})
    for start in starts:
        following = {text[len(start)] for text in texts if text.startswith(start) and text != start}
        if start not in texts:
            ways.append(_literal(start))
        letters = "".join(map(_literal, sorted(following)))
        ways.append(_literal(start) + (f"[^{letters}]" if letters else ANY) + f"{ANY}*")
    return f"^(?:{'|'.join(ways)})$"


def _literal(text: str) -> str:
    """Quote a text for regular expressions, those of Rust and of Python."""
    return "".join(f"\\{letter}" if letter in _MARKS else letter for letter in text)


def _not_required(value: Any) -> Any:
    if not isinstance(value, list):
        return None
    lacks = [{"type": "object", "properties": {name: False}} for name in value]
    return _either(lacks)


def _not_properties(value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    has = []
    for name, schema in value.items():
        other = negation(schema)
        if other is None:
            return None
        if other is not False:
            has.append({"type": "object", "properties": {name: other}, "required": [name]})
    return _either(has)


def _not_any(value: Any) -> Any:
    parts = [negation(one) for one in value] if isinstance(value, list) else [None]
    return None if any(part is None for part in parts) else {"allOf": parts}


def _not_all(value: Any) -> Any:
    parts = [negation(one) for one in value] if isinstance(value, list) else [None]
    return None if any(part is None for part in parts) else _either(parts)


def _beyond(kind: str, keyword: str, step: int) -> Callable[[Any], Any]:
    """Return the negation of a bound."""

    def negate(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if step and (not isinstance(value, int) or value + step < 0):
            return False if value == 0 and step < 0 else None
        return {"type": kind, keyword: value + step}

    return negate


_NEGATIONS: Mapping[str, Callable[[Any], Any]] = {
    "not": lambda value: value,
    "const": lambda value: _not_values([value]),
    "enum": lambda value: _not_values(value),
    "type": _not_types,
    "required": _not_required,
    "properties": _not_properties,
    "anyOf": _not_any,
    "allOf": _not_all,
    "minimum": _beyond("number", "exclusiveMaximum", 0),
    "maximum": _beyond("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": _beyond("number", "maximum", 0),
    "exclusiveMaximum": _beyond("number", "minimum", 0),
    "minLength": _beyond("string", "maxLength", -1),
    "maxLength": _beyond("string", "minLength", 1),
    "minItems": _beyond("array", "maxItems", -1),
    "maxItems": _beyond("array", "minItems", 1),
}
_NOTES = frozenset({"$comment", "comment", "description", "title"})
# Keywords that do not depend on their siblings.
_APART = frozenset(_NEGATIONS)


def _either(schemas: list[Any]) -> Any:
    if not schemas:
        return False
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
