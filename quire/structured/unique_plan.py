"""Find the arrays of a schema that must have distinct items, to track them during generation.

    planned(schema)     # (the schema without uniqueItems, {"places": [...], "items": [...]})

llguidance's grammars cannot remember items, so `uniqueItems` is enforced beside them
(unique_state.py). The plan says where such arrays are in a document: a place stands for all values
that one position of the document may have, under all alternatives of the schema. Knows JSON
Schema's keywords, but no grammars and no tokens. Invariants: the plan is JSON; if an array's
uniqueness depends on more than its position, NotTrackable is raised with path and reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from quire.structured.disjoint import types_of
from quire.structured.evaluate import Undecided, resolved

MAX_ALTERNATIVES = 64  # of one position
MAX_PLACES = 2_000
MAX_ITEMS = 32  # different ones, each a grammar
MAX_LOOKS = 50_000  # at schemas
MAX_DEPTH = 64  # references and combinations around one position
_COMBINATIONS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_NAMED_SCHEMAS = _DEFINITIONS | {
    *("dependencies", "dependentSchemas", "patternProperties", "properties"),
}
# Subschemas that cannot be followed by position.
_UNFOLLOWED = (
    *("additionalItems", "contains", "dependencies", "dependentSchemas", "else", "if", "not"),
    *("patternProperties", "prefixItems", "propertyNames", "then", "unevaluatedItems"),
    "unevaluatedProperties",
)
# Keywords of arrays and objects, and annotations: they say nothing about scalars.
_BESIDE_SCALARS = frozenset(
    {
        *("$comment", "$schema", "$id", "comment", "default", "deprecated", "description"),
        *("examples", "readOnly", "title", "writeOnly"),
        *("items", "minItems", "maxItems", "uniqueItems"),
        *("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    }
)

Flat = tuple[Mapping[str, Any], ...]  # schemas that a value must satisfy together


class NotTrackable(Exception):
    """The items of an array cannot be tracked by its position."""

    def __init__(self, at: Mapping[str, Any], why: str) -> None:
        super().__init__(why)
        self.at = at


def planned(schema: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return a schema without uniqueItems, and the plan to enforce it; None if it has none.

    Raises NotTrackable.
    """
    if not _Reach(schema).of(schema):
        return schema, None
    plan = _Planner(schema).plan()
    return _stripped(schema), plan


def _stripped(value: Any) -> Any:
    """Return a schema without the uniqueItems keyword; property names and values stay."""
    if isinstance(value, list):
        return [_stripped(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    new: dict[str, Any] = {}
    for name, entry in value.items():
        if name in _NAMED_SCHEMAS and isinstance(entry, Mapping):
            new[name] = {key: _stripped(one) for key, one in entry.items()}
        elif name in ("enum", "const", "default", "examples"):
            new[name] = entry
        elif name != "uniqueItems" or entry is not True:
            new[name] = _stripped(entry)
    return new


class _Reach:
    """Decide whether uniqueItems applies to a part of a value, through references too."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, bool] = {}

    def of(self, schema: Any) -> bool:
        """Return whether a schema has the keyword, or a subschema of it."""
        known = self._known.get(id(schema))
        if known is None:
            known = self._known[id(schema)] = self._found(schema)
        return known

    def _found(self, schema: Any) -> bool:
        waiting, met = [schema], set[int]()
        while waiting:
            at = waiting.pop()
            if id(at) in met:
                continue
            met.add(id(at))
            if isinstance(at, list):
                waiting += at
            elif isinstance(at, Mapping):
                if at.get("uniqueItems") is True:
                    return True
                waiting += [
                    entry
                    for name, entry in at.items()
                    if name not in _DEFINITIONS and isinstance(entry, list | Mapping)
                ]
                if isinstance(at.get("$ref"), str):
                    waiting.append(self._resolved(at["$ref"]))
        return False

    def _resolved(self, reference: str) -> Any:
        try:
            return resolved(self._root, reference)
        except Undecided:
            return True  # llguidance rejects it by name


class _Planner:
    """Visits the places of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._reach = _Reach(root)
        self._indexes: dict[frozenset[tuple[int, ...]], int] = {}
        self._waiting: list[tuple[int, list[Flat]]] = []
        self._places: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []
        self._looks = 0

    def plan(self) -> dict[str, Any]:
        """Return the plan; the place of the whole document is the first."""
        self._place(self._alternatives([self._root], self._root), self._root)
        while self._waiting:
            index, flats = self._waiting.pop()
            self._visit(self._places[index], flats)
        return {"places": self._places, "items": self._items}

    def _place(self, flats: list[Flat], at: Any) -> int | None:
        """Return the index of a position's place; None if no such array is in its values."""
        if not any(self._reach.of(part) for flat in flats for part in flat):
            return None
        key = frozenset(tuple(sorted({id(part) for part in flat})) for flat in flats)
        if key not in self._indexes:
            if len(self._places) >= MAX_PLACES:
                raise NotTrackable(at, f"the schema has more than {MAX_PLACES} positions")
            self._indexes[key] = len(self._places)
            self._places.append({"unique": None, "items": None, "named": {}, "others": None})
            self._waiting.append((self._indexes[key], flats))
        return self._indexes[key]

    def _visit(self, place: dict[str, Any], flats: list[Flat]) -> None:
        for flat in flats:
            for part in flat:
                self._check_unfollowed(part)
        arrays = [flat for flat in flats if _may_be(flat, "array", list)]
        unique = [flat for flat in arrays if _is_unique(flat)]
        if unique:
            place["unique"] = self._unique(arrays, unique)
        elif arrays:
            place["items"] = self._below(arrays, "items", None)
        objects = [flat for flat in flats if _may_be(flat, "object", Mapping)]
        names = {name for flat in objects for part in flat for name in _named(part)}
        place["named"] = {
            name: self._below(objects, "additionalProperties", name) for name in sorted(names)
        }
        place["others"] = self._below(objects, "additionalProperties", None)

    def _check_unfollowed(self, part: Mapping[str, Any]) -> None:
        for keyword in _UNFOLLOWED:
            if keyword in part and self._reach.of(part[keyword]):
                raise NotTrackable(part, f"it is below {keyword}")
        if isinstance(part.get("items"), list) and self._reach.of(part["items"]):
            raise NotTrackable(part, "it is below a list of items")

    def _below(self, flats: list[Flat], rest: str, name: str | None) -> int | None:
        """Return the place of a named property, or of the items or properties that `rest` covers.

        A subschema that every alternative lacks allows anything.
        """
        found: list[Flat] = []
        for flat in flats:
            schemas = [
                part.get(rest, True)
                if name is None
                else _named(part).get(name, part.get(rest, True))
                for part in flat
            ]
            found += self._alternatives(schemas, flat[0] if flat else self._root)
        place = self._place(_distinct(found), flats[0][0] if flats and flats[0] else self._root)
        if place is not None and any(
            "patternProperties" in part for flat in flats for part in flat
        ):
            at = next(part for flat in flats for part in flat if "patternProperties" in part)
            raise NotTrackable(at, "it is beside patternProperties")
        return place

    def _unique(self, arrays: list[Flat], unique: list[Flat]) -> int:
        """Return the index of the items of arrays at a position; all must agree on them."""
        at = next(part for part in unique[0] if part.get("uniqueItems") is True)
        if len(unique) < len(arrays):
            raise NotTrackable(at, "another alternative allows an array at this place without it")
        found: dict[str, int] = {}
        for flat in arrays:
            schema = self._scalar_items(flat, at)
            least = [part.get("minItems", 0) for part in flat]
            num = max([value for value in least if type(value) is int], default=0)
            text = json.dumps(schema, sort_keys=True)
            found[text] = max(num, found.get(text, 0))
        if len(found) > 1:
            raise NotTrackable(at, "alternatives at this place have arrays of different items")
        [(text, num)] = found.items()
        entry = {"schema": json.loads(text), "min_items": num}
        if entry not in self._items:
            self._items.append(entry)
        if len(self._items) > MAX_ITEMS:
            raise NotTrackable(at, f"the schema has more than {MAX_ITEMS} different kinds of items")
        return self._items.index(entry)

    def _scalar_items(self, flat: Flat, at: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schema of an array's items, all scalars, without references."""
        for part in flat:
            if "enum" in part or "const" in part:
                raise NotTrackable(at, "the array is one of a list of values")
            if "prefixItems" in part or isinstance(part.get("items"), list):
                raise NotTrackable(at, "the array has items with schemas of their own")
        items = self._alternatives([part.get("items", True) for part in flat], at)
        for item in items:
            if not _is_scalar(item):
                raise NotTrackable(
                    at,
                    "its items may be arrays or objects, and only strings, numbers, booleans and "
                    "null are compared",
                )
        choices = [{"allOf": [_scalar_part(part) for part in item]} for item in items]
        return choices[0] if len(choices) == 1 else {"anyOf": choices}

    def _alternatives(self, schemas: Sequence[Any], at: Any) -> list[Flat]:
        """Return the alternatives of values that satisfy all these schemas, without combinations:
        each a tuple of schemas, of which only the own keywords apply, all together."""
        flats: list[Flat] = [()]
        for schema in schemas:
            more = self._expanded(schema, at, 0)
            flats = [(*one, *other) for one, other in product(flats, more)]
            if len(flats) > MAX_ALTERNATIVES:
                raise NotTrackable(at, f"a value has more than {MAX_ALTERNATIVES} alternatives")
        return _distinct(flats)

    def _expanded(self, schema: Any, at: Any, depth: int) -> list[Flat]:
        self._looks += 1
        if self._looks > MAX_LOOKS:
            raise NotTrackable(at, "the schema has too many alternatives to follow")
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [()]
        if depth > MAX_DEPTH:
            raise NotTrackable(at, "its references do not end")
        flats: list[Flat] = [(schema,)]
        for choices in self._combined(schema):
            more = [flat for one in choices for flat in self._expanded(one, at, depth + 1)]
            flats = [(*one, *other) for one, other in product(flats, more)]
            if len(flats) > MAX_ALTERNATIVES:
                raise NotTrackable(at, f"a value has more than {MAX_ALTERNATIVES} alternatives")
        return _distinct(flats)

    def _combined(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Yield lists of schemas; a value satisfies one of each list."""
        if isinstance(schema.get("$ref"), str):
            try:
                yield [resolved(self._root, schema["$ref"])]
            except Undecided:
                yield [True]  # llguidance rejects it by name
        for part in schema.get("allOf", ()):
            yield [part]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                yield schema[keyword]


def _distinct(flats: Iterable[Flat]) -> list[Flat]:
    """Return alternatives without repetition, and without repeated schemas in them."""
    kept: dict[frozenset[int], Flat] = {}
    for flat in flats:
        parts = {id(part): part for part in flat}
        kept.setdefault(frozenset(parts), tuple(parts.values()))
    return list(kept.values())


def _named(part: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = part.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _is_unique(flat: Flat) -> bool:
    return any(part.get("uniqueItems") is True for part in flat)


def _may_be(flat: Flat, name: str, kind: Any) -> bool:
    """Return whether an alternative may allow values of a type."""
    for part in flat:
        if name not in types_of(part):
            return False
        listed = part.get("enum", [part["const"]] if "const" in part else None)
        if isinstance(listed, list) and not any(isinstance(value, kind) for value in listed):
            return False
    return True


def _is_scalar(flat: Flat) -> bool:
    return not _may_be(flat, "array", list) and not _may_be(flat, "object", Mapping)


def _scalar_part(part: Mapping[str, Any]) -> dict[str, Any]:
    left_out = _COMBINATIONS | _DEFINITIONS | _BESIDE_SCALARS
    return {name: value for name, value in part.items() if name not in left_out}
