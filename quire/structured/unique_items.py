"""Decide uniqueItems for entries that cannot be equal, or that have few values.

Knows JSON Schema's keywords, but no grammars and no tokens. Invariant: the listed arrays are all
that the schema allows; an undecidable question is answered with None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from quire.structured.disjoint import Disjoint, entry_schema, finite_values, types_of
from quire.structured.evaluate import Evaluator, Undecided

MAX_PLACES = 16  # length of an array with entries compared in pairs
MAX_ENTRIES = 8_000  # of all arrays listed for one schema


def is_always_unique(schema: Mapping[str, Any], root: Any) -> bool:
    """Return whether no array that the schema's other keywords allow repeats an entry."""
    if "array" not in types_of(schema):
        return True
    longest = _max_items(schema)
    if longest is None or longest > MAX_PLACES:
        return False
    disjoint = Disjoint(root)
    entries = [entry_schema(schema, at) for at in range(longest)]
    return all(
        disjoint.excludes(one, other) for at, one in enumerate(entries) for other in entries[:at]
    )


def unique_arrays(schema: Mapping[str, Any], root: Any, limit: int) -> list[list[Any]] | None:
    """Return all arrays without repetition that a schema allows, at most `limit` of them.

    None if its entries have too many values, or it has keywords that cannot be decided.
    """
    values = _entry_values(schema, root)
    if values is None:
        return None
    max_items = _max_items(schema)
    longest = len(values) if max_items is None else min(max_items, len(values))
    shortest = schema.get("minItems", 0)
    if not isinstance(shortest, int) or isinstance(shortest, bool):
        return None
    num_arrays = num_entries = 0
    count = 1
    for length in range(longest + 1):
        if length >= shortest:
            num_arrays, num_entries = num_arrays + count, num_entries + length * count
        count *= len(values) - length
        if num_arrays > limit or num_entries > MAX_ENTRIES:
            return None
    try:
        evaluator = Evaluator(root)
        return [
            array
            for array in _arrays(values, shortest, longest)
            if evaluator.allows(_without_values(schema), array)
        ]
    except Undecided:
        return None


def _entry_values(schema: Mapping[str, Any], root: Any) -> list[Any] | None:
    """Return the values of entries if all entries have the same schema."""
    if "prefixItems" in schema or isinstance(schema.get("items"), list):
        return None
    return finite_values(schema.get("items", True), root)


def _arrays(values: list[Any], shortest: int, longest: int) -> Iterator[list[Any]]:
    for length in range(max(shortest, 0), longest + 1):
        for array in permutations(values, length):
            yield list(array)


def _without_values(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that an array of allowed, distinct values may still violate."""
    return {name: value for name, value in schema.items() if name not in ("items", "uniqueItems")}


def _max_items(schema: Mapping[str, Any]) -> int | None:
    """Return the maximum number of entries; None if it is unbounded."""
    limit = schema.get("maxItems")
    bounds: list[int] = []
    if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0:
        bounds.append(limit)
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    if rest is False and isinstance(first, list):
        bounds.append(len(first))
    return min(bounds, default=None)
