"""Check the form of a JSON schema: which values its keywords may have, and what $ref points at.

llguidance reports some malformed keywords without their place and ignores others. Knows no values
that a schema allows. Invariant: a schema that is valid in any draft up to 2020-12 passes, except
for the booleans that older drafts have as required, exclusiveMinimum and exclusiveMaximum; null
counts as a keyword that is left out, except as `type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.structured.disjoint import TYPES as DISJOINT_TYPES
from quire.structured.evaluate import Undecided, resolved
from quire.structured.schema import LISTS, NAMED, ONE, each_schema, escaped

# What programming languages and other notations call the types.
_OTHER_TYPES = {
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "decimal": "number",
    "str": "string",
    "text": "string",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "map": "object",
    "struct": "object",
    "none": "null",
    "nil": "null",
}
# Keywords that malformed() does not check.
_ANNOTATIONS = frozenset(
    {"type", "const", "title", "description", "default", "example", "examples", "deprecated"}
)
_UNTYPED = ("any", "mixed", "unknown")
TYPES = sorted([*DISJOINT_TYPES, "integer"])
_ALLOWED_TYPES = f"{', '.join(TYPES[:-1])} and {TYPES[-1]} are allowed"

# Yields each entry of a keyword's value that it may not have, with the path below the keyword.
Faults = Callable[[Any], Iterator[tuple[str, Any]]]
_SCHEMA = 'a schema is allowed there, such as {"type": "string"}'
_NAMES = 'a list of property names is allowed there, such as ["name"]'


def malformed(schema: Any) -> str | None:
    """Return what is wrong with the form of a schema, as part of a message; None for nothing."""
    if not _is_schema(schema):
        return f"the schema is {show(schema)}; an object is allowed"
    has_ids = False
    for path, at in each_schema(schema):
        if (said := _wrong_type(path, at)) is not None:
            return said
        for keyword, value in at.items():
            if value is None or keyword not in _FORMS:
                continue
            faults, allowed, allowed_inside = _FORMS[keyword]
            for below, found in faults(value):
                words = allowed_inside if below else allowed
                return f"the schema has {show(found)} at {path}/{keyword}{below}; {words}"
        has_ids = has_ids or "$id" in at
        if not has_ids and (said := _dangling(schema, path, at.get("$ref"))) is not None:
            return said
    return None


def has_keywords(schema: Mapping[str, Any]) -> bool:
    """Return whether any name is a keyword, or a private annotation (x-...)."""
    return any(
        name in _FORMS or name in _ANNOTATIONS or name.startswith(("$", "x-")) for name in schema
    )


def check_form(schema: Any, place: str, *, param: str | None = None) -> None:
    """Refuse a malformed schema. place: where the request has it. Raises InvalidParameter.

    param: the request's field, if it is not `place`.
    """
    if (said := malformed(schema)) is not None:
        raise InvalidParameter(f"{place}: {said}", param=param or place)


def _type_advice(name: Any) -> str:
    """Return what to write in place of an unknown type, and the types that exist."""
    if not isinstance(name, str):
        return _ALLOWED_TYPES
    plain = name.lower()
    if plain in _UNTYPED:
        return f"leave type out to allow any value; {_ALLOWED_TYPES}"
    near = _OTHER_TYPES.get(plain) or next(iter(get_close_matches(plain[:16], TYPES, 1)), "")
    return f'did you mean "{near}"? {_ALLOWED_TYPES}' if near else _ALLOWED_TYPES


def _wrong_type(path: str, at: Mapping[str, Any]) -> str | None:
    if "type" not in at:
        return None
    named = at["type"]
    names = named if isinstance(named, list) and named else [named]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            return f"the schema has the type {show(name)} (at {path}/type); {_type_advice(name)}"
    return None


def _dangling(root: Any, path: str, reference: Any) -> str | None:
    """Return the fault of a reference into the document that points at nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/") or "%" in reference:
        return None
    try:
        resolved(root, reference)
    except Undecided:
        return (
            f"the schema has the $ref {show(reference)} (at {path}/$ref), which does not exist in "
            f"it; define it there, as in {_definition(reference)}, or correct the $ref"
        )
    return None


def _definition(reference: str) -> str:
    parts = reference.split("/")[1:3]
    name = parts[1] if len(parts) > 1 else "name"
    return f'"{parts[0][:20]}": {{{show(name)}: {{"type": "object"}}}}'


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _only(allows: Callable[[Any], bool]) -> Faults:
    def faults(value: Any) -> Iterator[tuple[str, Any]]:
        if not allows(value):
            yield "", value

    return faults


def _each(allows: Callable[[Any], bool], *, empty: bool = True) -> Faults:
    """Return the check of a list of such entries."""

    def faults(value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, list) or not (value or empty):
            yield "", value
            return
        yield from ((f"/{place}", entry) for place, entry in enumerate(value) if not allows(entry))

    return faults


def _named(allows: Callable[[Any], bool]) -> Faults:
    """Return the check of an object of such entries."""

    def faults(value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, Mapping):
            yield "", value
            return
        yield from ((f"/{escaped(name)}", one) for name, one in value.items() if not allows(one))

    return faults


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _items_faults(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (_each(_is_schema) if isinstance(value, list) else _only(_is_schema))(value)


_COUNTS = [f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Contains")]
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ALTERNATIVES = 'a list of at least one schema is allowed there, such as [{"type": "string"}]'
_PROPERTIES = 'an object of schemas by name is allowed there, such as {"name": {"type": "string"}}'
_OWN_NAMES = f"{_NAMES}, beside the properties that it names"
# For each keyword: its check, what is allowed, and what is allowed as an entry of it.
_FORMS: Mapping[str, tuple[Faults, str, str]] = {
    **dict.fromkeys(ONE, (_only(_is_schema), _SCHEMA, "")),
    **dict.fromkeys(LISTS, (_each(_is_schema, empty=False), _ALTERNATIVES, _SCHEMA)),
    **dict.fromkeys(NAMED, (_named(_is_schema), _PROPERTIES, _SCHEMA)),
    **dict.fromkeys(
        [*_COUNTS, "minProperties", "maxProperties"],
        (_only(_is_count), "a whole number from 0 is allowed there", ""),
    ),
    **dict.fromkeys(_BOUNDS, (_only(_is_number), "a number is allowed there", "")),
    **dict.fromkeys(
        ("$ref", "pattern", "format"), (_only(_is_text), "a text is allowed there", "")
    ),
    "items": (_items_faults, _SCHEMA, _SCHEMA),
    "prefixItems": (_each(_is_schema), _ALTERNATIVES, _SCHEMA),
    "dependencies": (
        _named(lambda value: _is_schema(value) or _are_names(value)),
        _PROPERTIES,
        f"{_SCHEMA}, or {_NAMES}",
    ),
    "dependentRequired": (
        _named(_are_names),
        "an object of lists of property names is allowed there",
        _NAMES,
    ),
    "required": (_each(_is_text), _OWN_NAMES, "the name of a property is allowed there"),
    "enum": (
        _each(lambda _: True, empty=False),
        "a list of at least one value is allowed there",
        "",
    ),
    "multipleOf": (
        _only(lambda value: _is_number(value) and value > 0),
        "a number above 0 is allowed there",
        "",
    ),
    "uniqueItems": (
        _only(lambda value: isinstance(value, bool)),
        "true or false is allowed there",
        "",
    ),
}
