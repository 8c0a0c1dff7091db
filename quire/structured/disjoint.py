"""Decide whether two schemas exclude each other, and list the values of a schema that has few.

    Disjoint(document).excludes(one, other)     # True: no value is valid under both
    finite_values(schema, document)             # [1, 2] or None

Knows JSON Schema's keywords, but no grammars and no tokens. Invariant: True and lists are exact; a
question that is undecidable here, or takes too long, is answered with False or None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.structured.evaluate import Evaluator, Undecided, equal, resolved, type_of

TYPES = ("null", "boolean", "object", "array", "number", "string")
MAX_COMPARISONS = 2_000  # of schemas, for one question
MAX_DEPTH = 8
MAX_FINITE = 64  # values of a schema that counts as finite
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")
_ESCAPED = re.compile(r"[\\^$.|?*+()\[\]{}/-]")
_REPEATED = frozenset("?*{")


class Disjoint:
    """Compare schemas of one document, in which references are resolved."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_COMPARISONS

    def excludes(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether no value can be valid under both schemas."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            return False
        one, other = seen(self._root, one), seen(self._root, other)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return one is False or other is False
        return self._by_parts(one, other, depth) or self._by_type(one, other, depth)

    def _by_parts(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Compare the values if one schema lists them, or the schemas they are composed of."""
        for a, b in ((one, other), (other, one)):
            listed = listed_values(a)
            if listed is not None and self._allows_none(b, listed):
                return True
            if any(self.excludes(part, b, depth + 1) for part in _list(a, "allOf")):
                return True
            for keyword in ("anyOf", "oneOf"):
                branches = _list(a, keyword)
                if branches and all(self.excludes(part, b, depth + 1) for part in branches):
                    return True
        return False

    def _allows_none(self, schema: Mapping[str, Any], values: list[Any]) -> bool:
        known = listed_values(schema)
        if known is not None and len(known) * len(values) <= MAX_COMPARISONS:
            return not any(equal(value, one) for value in values for one in known)
        if len(values) > MAX_FINITE:
            return False
        try:
            evaluator = Evaluator(self._root)
            return not any(evaluator.allows(schema, value) for value in values)
        except Undecided:
            return False

    def _by_type(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Return whether they exclude each other for each type that both allow."""
        for name in types_of(one) & types_of(other):
            if name == "object":
                apart = self._objects(one, other, depth) or self._objects(other, one, depth)
                apart = apart or _ranges_apart(one, other, "minProperties", "maxProperties")
            elif name == "array":
                apart = self._arrays(one, other, depth)
            elif name == "string":
                apart = _ranges_apart(one, other, "minLength", "maxLength")
                apart = apart or _prefixes_apart(one.get("pattern"), other.get("pattern"))
            else:
                apart = name == "number" and _numbers_apart(one, other)
            if not apart:
                return False
        return True

    def _objects(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Compare a property that `one` requires: `other` forbids it, or no value fits both."""
        required, has, others = (one.get("required", []), *(_properties(s) for s in (one, other)))
        if not isinstance(required, list) or has is None or others is None:
            return False
        is_exact = "patternProperties" not in other
        rest = other.get("additionalProperties", True) if is_exact else True
        return any(
            self.excludes(has.get(name, True), others.get(name, rest), depth + 1)
            for name in required
        )

    def _arrays(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Compare the lengths, or an entry that both must have."""
        if _ranges_apart(one, other, "minItems", "maxItems"):
            return True
        low = max(_number(one, "minItems") or 0, _number(other, "minItems") or 0)
        return any(
            self.excludes(entry_schema(one, at), entry_schema(other, at), depth + 1)
            for at in range(int(min(low, MAX_DEPTH)))
        )


def seen(root: Any, schema: Any) -> Any:
    """Resolve a reference; keywords beside a reference can only narrow it."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        try:
            schema = resolved(root, schema["$ref"])
        except Undecided:
            return schema
    return schema


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types a schema may allow; integers are numbers."""
    named = schema.get("type")
    if named is None:
        return frozenset(TYPES)
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else TYPES
    return frozenset("number" if name == "integer" else name for name in names)


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values a schema lists: it allows no others, though perhaps not all of them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def finite_values(schema: Any, root: Any, depth: int = 0) -> list[Any] | None:
    """Return all values a schema allows, each once; None if there are many or it is undecided."""
    target = seen(root, schema)
    if not isinstance(target, Mapping) or depth > MAX_DEPTH:
        return [] if target is False else None
    candidates = _candidates(target, root, depth)
    if candidates is None or len(candidates) > MAX_FINITE:
        return None
    try:
        evaluator, values = Evaluator(root), list[Any]()
        for value in candidates:
            if not any(equal(value, known) for known in values) and evaluator.allows(schema, value):
                values.append(value)
    except Undecided:
        return None
    return values


def _candidates(schema: Mapping[str, Any], root: Any, depth: int) -> list[Any] | None:
    """Return values of which a schema allows some, and no others."""
    listed = listed_values(schema)
    if listed is not None:
        return listed
    for keyword in ("anyOf", "oneOf"):
        parts = [finite_values(part, root, depth + 1) for part in _list(schema, keyword)]
        if parts and all(part is not None for part in parts):
            return [value for part in parts for value in part or ()]
    for part in _list(schema, "allOf"):
        values = finite_values(part, root, depth + 1)
        if values is not None:
            return values
    return _values_by_type(schema)


def _values_by_type(schema: Mapping[str, Any]) -> list[Any] | None:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list):
        return None
    values: list[Any] = []
    for name in names:
        low, high = schema.get("minimum"), schema.get("maximum")
        if name == "null":
            values.append(None)
        elif name == "boolean":
            values += [False, True]
        elif name == "integer" and type(low) is int and type(high) is int:
            if high - low >= MAX_FINITE:
                return None
            values += range(low, high + 1)
        else:
            return None
    return values


def entry_schema(schema: Mapping[str, Any], at: int) -> Any:
    """Return the schema of an array's entry at a place."""
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    if not isinstance(first, list):
        return True
    return first[at] if at < len(first) else rest


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else None


def _number(schema: Mapping[str, Any], keyword: str) -> float | None:
    value = schema.get(keyword)
    return value if type_of(value) in ("integer", "number") else None


def _ranges_apart(one: Mapping[str, Any], other: Mapping[str, Any], least: str, most: str) -> bool:
    for a, b in ((one, other), (other, one)):
        low, high = _number(a, least), _number(b, most)
        if low is not None and high is not None and low > high:
            return True
    return False


def _numbers_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Compare the bounds; exclusive ones are numbers, or flags as in draft 4."""
    for a, b in ((one, other), (other, one)):
        for low_name, high_name, may_touch in (
            ("minimum", "maximum", a.get("exclusiveMinimum") is True),
            ("exclusiveMinimum", "maximum", True),
            ("minimum", "exclusiveMaximum", True),
            ("exclusiveMinimum", "exclusiveMaximum", True),
        ):
            low, high = _number(a, low_name), _number(b, high_name)
            is_open = may_touch or (high_name == "maximum" and b.get("exclusiveMaximum") is True)
            if low is not None and high is not None and (low > high or (is_open and low == high)):
                return True
    return False


def _prefixes_apart(one: Any, other: Any) -> bool:
    """Compare the literal prefixes of two anchored patterns."""
    a, b = _prefix(one), _prefix(other)
    return not a.startswith(b) and not b.startswith(a)


def _prefix(pattern: Any) -> str:
    """Return the literal prefix of every match of an anchored regular expression."""
    if not isinstance(pattern, str) or not pattern.startswith("^") or "|" in pattern:
        return ""
    letters, at = "", 1
    while at < len(pattern):
        step = 1
        letter = pattern[at]
        if letter == "\\" and _ESCAPED.match(pattern, at + 1):
            letter, step = pattern[at + 1], 2
        elif _SPECIAL.match(letter):
            break
        if pattern[at + step : at + step + 1] in _REPEATED:
            break
        letters += letter
        at += step
    return letters
