"""Objects that list their properties and say nothing of others, closed: nothing else is written.

By JSON Schema such an object may have any further property, and programs that make schemas of
classes leave it at that. A model held to it may write properties nobody asked for until it runs out
of tokens, and a function called with them fails. Closed, a schema allows fewer values, all of which
it allowed before. Always holds: what says that others may come (additionalProperties,
patternProperties), or is put together of parts that each know some, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.structured.schema import each_schema

# Keywords by which several schemas judge one value, or properties that are not listed count.
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
# Each says what a value may be; two of them in one place judge it together.
_WHOLES = frozenset({"$ref", "anyOf", "oneOf", "properties"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "minProperties", "enum", "const"})


def closed(schema: Any) -> Any:
    """The schema with such objects closed; one that is put together of parts as it is."""
    places = list(each_schema(schema))
    if any(at.keys() & _SEVERAL or len(at.keys() & _WHOLES) > 1 for _, at in places):
        return schema
    return _closed(schema, {id(at) for _, at in places})


def _closed(value: Any, schemas: set[int]) -> Any:
    """value: a schema or a part of one. schemas: which objects are schemas, by identity."""
    if isinstance(value, list):
        return [_closed(entry, schemas) for entry in value]
    if not isinstance(value, Mapping):
        return value
    new = {name: _closed(entry, schemas) for name, entry in value.items()}
    if id(value) in schemas and _is_silent(value):
        new["additionalProperties"] = False
    return new


def _is_silent(schema: Mapping[str, Any]) -> bool:
    """Whether it lists properties, wants no others, and does not say whether there may be some."""
    listed, wanted = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, Mapping) or not listed or schema.keys() & _OPEN:
        return False
    return isinstance(wanted, list) and all(name in listed for name in wanted)
