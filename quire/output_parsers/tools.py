"""Hold the functions a request offers: names and parameter types, as parsers need them.

Formats with unquoted values (XML, Python) are converted to JSON by these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_LEVELS = 8


class Tools:
    """Functions by name, each with the JSON schema of its parameters, or an empty schema."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.schemas = dict(schemas)

    def has(self, name: str) -> bool:
        """Return whether the request offers this function."""
        return name in self.schemas

    def parameters(self, name: str) -> tuple[str, ...]:
        """Return the names of a function's parameters, in the order of its schema."""
        return tuple(self._properties(name))

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types a parameter may have; only "string" if its schema does not say."""
        schema = self._properties(name).get(parameter)
        if not isinstance(schema, Mapping):
            return frozenset({"string"})
        return _types(schema, _MAX_LEVELS) or frozenset({"string"})

    def _properties(self, name: str) -> Mapping[str, Any]:
        properties = self.schemas.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


def _types(schema: Any, levels: int) -> frozenset[str]:
    """Return the types of a schema and its branches; all types if it has a reference."""
    if not isinstance(schema, Mapping) or levels == 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    if "$ref" in schema:
        return _ALL_TYPES
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    found = {_type_of(value) for value in values} if isinstance(values, list) else set()
    for branches in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(branches)
        for branch in listed if isinstance(listed, list) else ():
            found |= _types(branch, levels - 1)
    return frozenset(found)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
