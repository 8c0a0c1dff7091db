"""Forbid additional properties of objects that list their properties and do not mention others.

JSON Schema allows such an object any further property, and generators of schemas from classes rely
on that. A model constrained by it may write unknown properties until it runs out of tokens, and a
function called with them fails. A closed schema allows a subset of the values. Invariant: objects
with additionalProperties or patternProperties, and schemas composed of parts, stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.structured.schema import each_schema

# Keywords that apply several schemas to one value, or that depend on unlisted properties.
_SEVERAL = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "not",
        "propertyNames",
        "then",
        "unevaluatedProperties",
    }
)
# Each describes the whole value; two of them in one schema apply together.
_WHOLES = frozenset({"$ref", "anyOf", "oneOf", "properties"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "minProperties", "enum", "const"})


def closed(schema: Any) -> Any:
    """Return the schema with such objects closed; a composed schema is returned unchanged."""
    places = list(each_schema(schema))
    if any(at.keys() & _SEVERAL or len(at.keys() & _WHOLES) > 1 for _, at in places):
        return schema
    return _closed(schema, {id(at) for _, at in places})


def _closed(value: Any, schemas: set[int]) -> Any:
    """Close a schema or a part of one. schemas: ids of the objects that are schemas."""
    if isinstance(value, list):
        return [_closed(entry, schemas) for entry in value]
    if not isinstance(value, Mapping):
        return value
    new = {name: _closed(entry, schemas) for name, entry in value.items()}
    if id(value) in schemas and _is_silent(value):
        new["additionalProperties"] = False
    return new


def _is_silent(schema: Mapping[str, Any]) -> bool:
    """Return whether it lists properties, requires no others, and does not mention others."""
    listed, wanted = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, Mapping) or not listed or schema.keys() & _OPEN:
        return False
    return isinstance(wanted, list) and all(name in listed for name in wanted)
