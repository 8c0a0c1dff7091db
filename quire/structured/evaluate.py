"""Validate JSON values against schemas without regular expressions and remote references.

Used to filter the values a schema lists. Invariants: no regular expression is run and no reference
is fetched; a schema that cannot be decided raises Undecided; the work is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Subschemas evaluated by one Evaluator: references can multiply.
MAX_LOOKS = 20_000
MAX_DEPTH = 200
# Values compared for one document: every value is compared with lists that can be long.
MAX_COMPARED = 200_000


class Undecided(Exception):
    """The schema cannot be decided here."""


class Evaluator:
    """Validates values against schemas of one document, in which references are resolved."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._looks = 0
        self._compared = 0

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two values are equal as JSON. Raises Undecided."""
        self._compared += 1
        if self._compared > MAX_COMPARED:
            raise Undecided
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(self.same, one, other))
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            return one.keys() == other.keys() and all(self.same(one[k], other[k]) for k in one)
        return equal(one, other)

    def allows(self, schema: Any, value: Any, depth: int = 0) -> bool:
        """Return whether `value` is valid under `schema`. Raises Undecided."""
        self._looks += 1
        if self._looks > MAX_LOOKS or depth > MAX_DEPTH:
            raise Undecided
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise Undecided
        for keyword in schema.keys() - _ANNOTATIONS:
            if keyword not in _CHECKS and keyword not in _BESIDE:
                raise Undecided
        if "$ref" in schema:
            if schema.keys() - _ANNOTATIONS - {"$ref"}:
                raise Undecided  # siblings of $ref count in newer drafts only
            return self.allows(resolved(self._root, schema["$ref"]), value, depth + 1)
        return all(
            _CHECKS[keyword](self, schema, value, depth + 1)
            for keyword in schema
            if keyword in _CHECKS
        )


def resolved(root: Any, reference: Any) -> Any:
    """Resolve a reference within the document. Raises Undecided for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise Undecided
    at = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, Mapping) and name in at:
            at = at[name]
        elif isinstance(at, list) and name.isascii() and name.isdigit() and int(name) < len(at):
            at = at[int(name)]
        else:
            raise Undecided
    if reference not in ("#",) and not reference.startswith("#/"):
        raise Undecided  # an anchor
    return at


def equal(one: Any, other: Any) -> bool:
    """Return whether values are equal as JSON: 1 equals 1.0, and true does not equal 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def type_of(value: Any) -> str:
    """Return the JSON type of a value; "integer" for integral numbers, also 1.0."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


_Check = Callable[[Evaluator, Mapping[str, Any], Any, int], bool]


def _of_type(_: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    allowed = schema["type"]
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if not isinstance(allowed, list):
        raise Undecided
    found = type_of(value)
    return found in allowed or (found == "integer" and "number" in allowed)


def _enum(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return any(of.same(value, one) for one in _list(schema["enum"]))


def _const(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return of.same(value, schema["const"])


def _not(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return not of.allows(schema["not"], value, depth)


def _all_of(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return all(of.allows(one, value, depth) for one in _list(schema["allOf"]))


def _any_of(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return any(of.allows(one, value, depth) for one in _list(schema["anyOf"]))


def _one_of(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return sum(of.allows(one, value, depth) for one in _list(schema["oneOf"])) == 1


def _if(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    branch = "then" if of.allows(schema["if"], value, depth) else "else"
    return of.allows(schema.get(branch, True), value, depth)


def _properties(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    """Check properties and additionalProperties, which depend on each other."""
    if not isinstance(value, Mapping):
        return True
    named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(named, Mapping):
        raise Undecided
    return all(of.allows(named.get(key, others), entry, depth) for key, entry in value.items())


def _property_names(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    if not isinstance(value, Mapping):
        return True
    return all(of.allows(schema["propertyNames"], key, depth) for key in value)


def _required(_: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    return not isinstance(value, Mapping) or all(key in value for key in _list(schema["required"]))


def _dependencies(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    if not isinstance(value, Mapping):
        return True
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for key, needs in schema.get(keyword, {}).items():
            if key not in value:
                continue
            if isinstance(needs, list):
                if not all(name in value for name in needs):
                    return False
            elif not of.allows(needs, value, depth):
                return False
    return True


def _items(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    """Check items in both its forms, additionalItems and prefixItems."""
    if not isinstance(value, list):
        return True
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    return all(of.allows(one, entry, depth) for one, entry in zip(first, value, strict=False)) and (
        all(of.allows(rest, entry, depth) for entry in value[len(first) :])
    )


def _contains(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    if not isinstance(value, list):
        return True
    count = sum(of.allows(schema["contains"], entry, depth) for entry in value)
    return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf))


def _unique(of: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    if not isinstance(value, list) or not schema["uniqueItems"]:
        return True
    if len(value) > 100:
        raise Undecided
    return not any(of.same(one, other) for at, one in enumerate(value) for other in value[:at])


def _size(keyword: str, kind: Any, *, least: bool) -> _Check:
    def check(_: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
        bound = schema[keyword]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise Undecided
        if not isinstance(value, kind):
            return True
        size = len(value)
        return size >= bound if least else size <= bound

    return check


def _bound(keyword: str, holds: Callable[[Any, Any], bool]) -> _Check:
    def check(_: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
        bound = schema[keyword]
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise Undecided  # draft 4's exclusiveMinimum: true
        return type_of(value) not in ("integer", "number") or holds(value, bound)

    return check


def _multiple(_: Evaluator, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
    factor = schema["multipleOf"]
    if type_of(value) not in ("integer", "number"):
        return True
    if not isinstance(value, int) or not isinstance(factor, int) or not factor > 0:
        raise Undecided  # the result for floats depends on rounding
    return value % factor == 0


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise Undecided
    return value


_CHECKS: dict[str, _Check] = {
    "type": _of_type,
    "enum": _enum,
    "const": _const,
    "not": _not,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "if": _if,
    "properties": _properties,
    "additionalProperties": _properties,
    "propertyNames": _property_names,
    "required": _required,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": _dependencies,
    "items": _items,
    "prefixItems": _items,
    "additionalItems": _items,
    "contains": _contains,
    "uniqueItems": _unique,
    "minItems": _size("minItems", list, least=True),
    "maxItems": _size("maxItems", list, least=False),
    "minLength": _size("minLength", str, least=True),
    "maxLength": _size("maxLength", str, least=False),
    "minProperties": _size("minProperties", Mapping, least=True),
    "maxProperties": _size("maxProperties", Mapping, least=False),
    "minimum": _bound("minimum", lambda value, bound: bool(value >= bound)),
    "maximum": _bound("maximum", lambda value, bound: bool(value <= bound)),
    "exclusiveMinimum": _bound("exclusiveMinimum", lambda value, bound: bool(value > bound)),
    "exclusiveMaximum": _bound("exclusiveMaximum", lambda value, bound: bool(value < bound)),
    "multipleOf": _multiple,
}
# Read by the checks of other keywords.
_BESIDE = frozenset({"$ref", "then", "else", "minContains", "maxContains"})
_ANNOTATIONS = frozenset(
    {
        "$comment",
        "$defs",
        "$schema",
        "comment",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
