"""Rewrite JSON schemas for llguidance: express keywords it lacks by keywords it supports.

enum values are filtered by the other keywords; dependencies and simple negations become anyOf, and
so does oneOf with disjoint alternatives; uniqueItems is dropped or expanded; undefined formats are
dropped. Everything else is left for llguidance to reject by name. Invariant: the result allows
exactly the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.structured.disjoint import Disjoint, finite_values, seen, types_of
from quire.structured.evaluate import Evaluator, Undecided, equal
from quire.structured.negation import negation
from quire.structured.unique_items import is_always_unique, unique_arrays

Schema = dict[str, Any]

# Keywords with a schema, a list of schemas, or an object of schemas as value.
ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
NAMED = frozenset(
    {
        "$defs",
        "definitions",
        "dependencies",
        "dependentSchemas",
        "patternProperties",
        "properties",
    }
)
# Formats that some draft of JSON Schema defines. Any other is an annotation.
DEFINED_FORMATS = frozenset(
    {
        "color",
        "date",
        "date-time",
        "duration",
        "email",
        "host-name",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ip-address",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "phone",
        "regex",
        "relative-json-pointer",
        "style",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "utc-millisec",
        "uuid",
    }
)
# Keywords by which enum values are filtered here; llguidance applies the others itself.
_SIFTED = frozenset({"not", "if", "contains", "uniqueItems", "oneOf", "dependencies"})
MAX_DEPENDENCIES = 6  # each doubles the alternatives
MAX_CHOICES = 64
MAX_NEGATED_CHOICES = 5
MAX_KNOWN = 512  # values of alternatives that are lists
MAX_ARRAYS = 2_000  # listed in one document


def for_llguidance(schema: Any) -> Any:
    """Return the schema rewritten for llguidance; a malformed one is returned unchanged."""
    try:
        return _Rewriter(schema).rewritten(schema)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return schema


def path_of(schema: Any, keyword: str, value: Any = None) -> str:
    """Return the path of a keyword (with this value, if given), as "#/properties/a/not".

    The first in document order; "" if there is none.
    """
    for path, at in each_schema(schema):
        if keyword in at and (value is None or at[keyword] == value):
            return "/".join([path, escaped(keyword)])
    return ""


def each_schema(schema: Any, path: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the schema and all its subschemas with their paths."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for keyword, value in schema.items():
        below = f"{path}/{escaped(keyword)}"
        if keyword in ONE and isinstance(value, Mapping):
            yield from each_schema(value, below)
        if keyword in LISTS and isinstance(value, list):
            for place, entry in enumerate(value):
                yield from each_schema(entry, f"{below}/{place}")
        if keyword in NAMED and isinstance(value, Mapping):
            for name, entry in value.items():
                yield from each_schema(entry, f"{below}/{escaped(name)}")


def escaped(name: str) -> str:
    """Return a name as a part of a path (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


class _Rewriter:
    """Rewrites the parts of one document."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_arrays_left = MAX_ARRAYS

    def rewritten(self, schema: Any) -> Any:
        """Return a schema with its subschemas rewritten."""
        if not isinstance(schema, dict):
            return schema
        sifted = self._sifted(schema)
        if sifted is not None:
            return sifted
        new = {keyword: self._below(keyword, value) for keyword, value in schema.items()}
        if isinstance(new.get("format"), str) and new["format"] not in DEFINED_FORMATS:
            del new["format"]
        for rewrite in (
            self._without_dependencies,
            self._without_not,
            self._without_one_of,
            self._without_unique_items,
        ):
            new = rewrite(new)
        return new

    def _below(self, keyword: str, value: Any) -> Any:
        if keyword in LISTS and isinstance(value, list):
            return [self.rewritten(entry) for entry in value]
        if keyword in ONE:
            return self.rewritten(value)
        if keyword in NAMED and isinstance(value, dict):
            return {name: self.rewritten(entry) for name, entry in value.items()}
        return value

    def _sifted(self, schema: Schema) -> Schema | None:
        """Return an enum of the listed values that the other keywords allow.

        None if llguidance applies these keywords itself, no values are listed, or the result cannot
        be decided.
        """
        parts = [schema, *(one for one in schema.get("allOf", ()) if isinstance(one, dict))]
        if all(_SIFTED.isdisjoint(part) for part in parts):
            return None
        lists = [
            part["enum"] if "enum" in part else [part["const"]]
            for part in parts
            if "const" in part or isinstance(part.get("enum"), list)
        ]
        if not lists:
            return None
        try:
            of = Evaluator(self._root)
            kept = [value for value in min(lists, key=len) if of.allows(schema, value)]
        except Undecided:
            return None
        return {"enum": kept}

    def _without_dependencies(self, schema: Schema) -> Schema:
        """Rewrite each dependency: the property is absent, or its requirement holds."""
        keywords = [
            name
            for name in ("dependencies", "dependentRequired", "dependentSchemas")
            if isinstance(schema.get(name), dict)
        ]
        pairs = [(key, needs) for name in keywords for key, needs in schema[name].items()]
        if not keywords or len(pairs) > MAX_DEPENDENCIES:
            return schema
        choices = [
            {
                "anyOf": [
                    {"properties": {key: False}},
                    {"required": [key, *needs]}
                    if isinstance(needs, list)
                    else _both({"properties": {key: True}, "required": [key]}, needs),
                ]
            }
            for key, needs in pairs
            if needs not in ([], {}, True)
        ]
        rest = {name: value for name, value in schema.items() if name not in keywords}
        return _with(rest, choices)

    def _without_not(self, schema: Schema) -> Schema:
        if "not" not in schema:
            return schema
        negated = negation(self._target(schema["not"]))
        if negated is None:
            return schema
        rest = {name: value for name, value in schema.items() if name != "not"}
        return _with(rest, [negated])

    def _without_one_of(self, schema: Schema) -> Schema:
        """Rewrite oneOf as anyOf if its alternatives are disjoint.

        Finite alternatives become an enum of the values that exactly one allows. Others are made
        disjoint by negating the alternatives they overlap with, if these are simple.
        """
        choices = schema.get("oneOf")
        if not isinstance(choices, list) or len(choices) > MAX_CHOICES:
            return schema
        finite = [finite_values(choice, self._root) for choice in choices]
        known = [value for values in finite for value in values or ()]
        if None not in finite and 0 < len(known) <= MAX_KNOWN:
            once = [one for one in known if sum(equal(one, other) for other in known) == 1]
            return self._with_choices(schema, [{"enum": once}])
        shown = [_within(schema, seen(self._root, choice)) for choice in choices]
        disjoint = Disjoint(self._root)
        overlaps: list[list[int]] = [[] for _ in shown]
        for at, one in enumerate(shown):
            for place in range(at):
                if not disjoint.excludes(one, shown[place]):
                    overlaps[at].append(place)
                    overlaps[place].append(at)
        if any(overlaps):
            negated = {at: negation(self._target(choices[at])) for row in overlaps for at in row}
            if len(negated) > MAX_NEGATED_CHOICES or None in negated.values():
                return schema
            choices = [
                {"allOf": [choice, *(negated[at] for at in row)]} if row else choice
                for choice, row in zip(choices, overlaps, strict=True)
            ]
        return self._with_choices(schema, choices)

    def _target(self, schema: Any) -> Any:
        """Resolve a schema that is only a reference."""
        is_reference = isinstance(schema, Mapping) and schema.keys() == {"$ref"}
        return seen(self._root, schema) if is_reference else schema

    def _with_choices(self, schema: Schema, choices: list[Any]) -> Schema:
        rest = {name: value for name, value in schema.items() if name != "oneOf"}
        if "anyOf" in rest:
            return _with(rest, [{"anyOf": choices}])
        return {**rest, "anyOf": choices}

    def _without_unique_items(self, schema: Schema) -> Schema:
        """Drop uniqueItems if no entry can repeat; list all arrays of distinct entries if the
        entries have few values."""
        if "uniqueItems" not in schema:
            return schema
        rest = {name: value for name, value in schema.items() if name != "uniqueItems"}
        if schema["uniqueItems"] is False or is_always_unique(schema, self._root):
            return rest
        if types_of(schema) != {"array"} or schema["uniqueItems"] is not True:
            return schema
        arrays = unique_arrays(schema, self._root, self._num_arrays_left)
        if arrays is None:
            return schema
        self._num_arrays_left -= len(arrays)
        kept: Schema = {name: rest[name] for name in ("$defs", "definitions") if name in rest}
        return {**kept, "enum": arrays}


def _both(one: Any, other: Any) -> Any:
    return {"allOf": [one, other]}


def _with(schema: Schema, more: list[Any]) -> Schema:
    """Return a schema that also requires these."""
    if not more:
        return schema
    return {**schema, "allOf": [*schema.get("allOf", []), *more]}


def _within(schema: Schema, choice: Any) -> Any:
    """Return an alternative with the type, required names and properties of its parent."""
    if not isinstance(choice, dict):
        return choice
    required = [*schema.get("required", []), *choice.get("required", [])]
    beside = {"type": schema["type"]} if "type" in schema else {}
    shown = {**beside, **choice, "required": required}
    if choice.keys().isdisjoint({"additionalProperties", "patternProperties"}):
        shown["properties"] = {**schema.get("properties", {}), **choice.get("properties", {})}
    return shown
