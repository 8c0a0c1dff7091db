"""Decide whether JSON that a schema allows may begin as a tool call does: {"name": NAME, KEY: ...

    may_begin(schema, names={"add"}, key="parameters")

Relies on the order in which llguidance writes an object's properties: listed ones in their order,
then required ones that are not listed, then others. Knows no tool call format and no tokens.
Invariant: False is certain; if it is undecidable, or takes too long, the answer is True.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.structured.evaluate import Evaluator, Undecided, resolved
from quire.structured.schema import Schema

MAX_LOOKS = 200  # visited schemas, each possibly nested in the last
NAME = "name"
_NOTES = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "title"}
)
# An object described by no other keywords is written in the order of its properties.
_OWN = _NOTES | {
    "additionalProperties",
    "maxProperties",
    "minProperties",
    "patternProperties",
    "properties",
    "required",
    "type",
}
_BRANCHES = frozenset({"$ref", "anyOf", "oneOf"})


def may_begin(schema: Any, *, names: Collection[str], key: str, in_list: bool = False) -> bool:
    """Return whether a value may be an object that begins with one of the names and then the key.

    in_list: also consider a list with such an object as its first entry.
    """
    return _Search(schema, names, key).may(schema, in_list=in_list, alone=True)


class _Search:
    """Search one document."""

    def __init__(self, root: Any, names: Collection[str], key: str) -> None:
        self._root = root
        self._names = tuple(names)
        self._key = key
        self._looks = 0

    def may(self, schema: Any, *, in_list: bool, alone: bool) -> bool:
        """Return whether the schema allows such a beginning.

        alone: no other schema constrains the value's properties.
        """
        self._looks += 1
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or self._looks > MAX_LOOKS:
            return True
        if not self._fits_listed(schema, in_list=in_list):
            return False
        branches = [name for name in schema if name in _BRANCHES]
        apart = alone and len(branches) == 1 and schema.keys() <= {*_NOTES, "type", *branches}
        for name in branches:
            ways = [schema[name]] if name == "$ref" else schema[name]
            if name == "$ref":
                try:
                    ways = [resolved(self._root, schema[name])]
                except Undecided:
                    return True
            if isinstance(ways, list) and not any(
                self.may(way, in_list=in_list, alone=apart) for way in ways
            ):
                return False
        parts = schema.get("allOf", [])
        if isinstance(parts, list) and not all(
            self.may(part, in_list=in_list, alone=False) for part in parts
        ):
            return False
        if in_list:
            return self.may(_first_entry(schema), in_list=False, alone=True)
        return self._may_as_object(schema, ordered=alone and schema.keys() <= _OWN)

    def _fits_listed(self, schema: Schema | Mapping[str, Any], *, in_list: bool) -> bool:
        """Return whether the schema's type and its list of values allow it."""
        types = schema.get("type", ())
        types = (types,) if isinstance(types, str) else types
        if (
            isinstance(types, list | tuple)
            and types
            and ("array" if in_list else "object") not in types
        ):
            return False
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return True
        if in_list:
            values = [value[0] for value in values if isinstance(value, list) and value]
        return any(
            isinstance(value, dict) and {NAME, self._key} <= value.keys() for value in values
        )

    def _may_as_object(self, schema: Mapping[str, Any], *, ordered: bool) -> bool:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return True
        if "patternProperties" in schema and others is False:
            others = True
        if not all(self._has(properties.get(name, others), name) for name in (NAME, self._key)):
            return False
        if not ordered:
            return True
        listed = [*properties, *(name for name in required if name not in properties)]
        after = _follows(listed, required, -1, NAME)
        return after is not None and _follows(listed, required, after, self._key) is not None

    def _has(self, schema: Any, name: str) -> bool:
        """Return whether a property may be present with a value that a call has."""
        if schema is False or name != NAME:
            return schema is not False
        try:
            of = Evaluator(self._root)
            return any(of.allows(schema, value) for value in self._names)
        except Undecided:
            return True


def _first_entry(schema: Mapping[str, Any]) -> Any:
    """Return the schema of a list's first entry."""
    entries = schema.get("prefixItems", schema.get("items", True))
    return entries[0] if isinstance(entries, list) and entries else entries


def _follows(listed: list[str], required: list[str], at: int, name: str) -> int | None:
    """Return the place of a property if it may come next after the one at `at`; else None."""
    place = listed.index(name) if name in listed else len(listed)
    if place < at or (place == at and place < len(listed)):
        return None
    return None if any(between in required for between in listed[at + 1 : place]) else place
