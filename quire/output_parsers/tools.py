"""Tools: the functions a request offers, as far as reading an answer needs to know them.

Which names there are, and of which types their parameters may be: dialects that write values
without quotes (XML, Python) are turned into JSON by that. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERY = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MOST_LEVELS = 8


class Tools:
    """Functions by name, each with the JSON schema of its parameters (an empty one where none)."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.schemas = dict(schemas)

    def has(self, name: str) -> bool:
        """Whether a function is offered."""
        return name in self.schemas

    def parameters(self, name: str) -> tuple[str, ...]:
        """The names of a function's parameters, in the order of its schema."""
        return tuple(self._properties(name))

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types a parameter may have; "string" alone where its schema does not say."""
        schema = self._properties(name).get(parameter)
        if not isinstance(schema, Mapping):
            return frozenset({"string"})
        return _types(schema, _MOST_LEVELS) or frozenset({"string"})

    def _properties(self, name: str) -> Mapping[str, Any]:
        properties = self.schemas.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}


def _types(schema: Any, levels: int) -> frozenset[str]:
    """The types a schema names itself or in its branches; all where it says by reference."""
    if not isinstance(schema, Mapping) or levels == 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    if "$ref" in schema:
        return _EVERY
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
