"""uniqueItems where a grammar can keep it: entries that cannot be equal, or that have few values.

Knows JSON Schema's keywords; no grammar and no tokens. Always holds: what is listed are all arrays
the schema allows; what cannot be decided is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

from quire.structured.disjoint import Disjoint, entry_schema, finite_values, types_of
from quire.structured.evaluate import Evaluator, Undecided

MAX_PLACES = 16  # of an array whose entries are compared in pairs
MAX_ENTRIES = 8_000  # of all arrays listed for one schema


def is_always_unique(schema: Mapping[str, Any], root: Any) -> bool:
    """Return whether no array that the schema's other keywords allow repeats an entry."""
    if "array" not in types_of(schema):
        return True
    most = _max_items(schema)
    if most is None or most > MAX_PLACES:
        return False
    disjoint = Disjoint(root)
    entries = [entry_schema(schema, at) for at in range(most)]
    return all(
        disjoint.excludes(one, other) for at, one in enumerate(entries) for other in entries[:at]
    )


def unique_arrays(schema: Mapping[str, Any], root: Any, most: int) -> list[list[Any]] | None:
    """Return all arrays without repetition that a schema allows, at most `most` of them.

    None where its entries have too many values, or it has keywords that cannot be decided.
    """
    values = _entry_values(schema, root)
    if values is None:
        return None
    limit = _max_items(schema)
    longest = len(values) if limit is None else min(limit, len(values))
    least = schema.get("minItems", 0)
    if not isinstance(least, int) or isinstance(least, bool):
        return None
    num_arrays = num_entries = 0
    count = 1
    for length in range(longest + 1):
        if length >= least:
            num_arrays, num_entries = num_arrays + count, num_entries + length * count
        count *= len(values) - length
        if num_arrays > most or num_entries > MAX_ENTRIES:
            return None
    try:
        evaluator = Evaluator(root)
        return [
            array
            for array in _arrays(values, least, longest)
            if evaluator.allows(_without_values(schema), array)
        ]
    except Undecided:
        return None


def _entry_values(schema: Mapping[str, Any], root: Any) -> list[Any] | None:
    """Return the values of entries, where all entries have the same schema."""
    if "prefixItems" in schema or isinstance(schema.get("items"), list):
        return None
    return finite_values(schema.get("items", True), root)


def _arrays(values: list[Any], least: int, most: int) -> Iterator[list[Any]]:
    for length in range(max(least, 0), most + 1):
        for array in permutations(values, length):
            yield list(array)


def _without_values(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that arrays of allowed, different values may still fail."""
    return {name: value for name, value in schema.items() if name not in ("items", "uniqueItems")}


def _max_items(schema: Mapping[str, Any]) -> int | None:
    """Return the greatest number of entries; None where it is not bounded."""
    most = schema.get("maxItems")
    bounds = [most] if isinstance(most, int) and not isinstance(most, bool) and most >= 0 else []
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    if rest is False and isinstance(first, list):
        bounds.append(len(first))
    return min(bounds, default=None)
