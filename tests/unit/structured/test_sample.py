"""External real schemas: nearly all compile; instances are judged as labelled.

The labelled sample is external data; a few schemas of our own, with instances, never skip.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from bench.structured import reason_of
from quire.base.errors import InvalidParameter
from quire.base.grammar import json_schema
from quire.structured.compiler import GrammarCompiler
from quire.structured.evaluate import Undecided, resolved
from tests.conftest import SHOWN
from tests.data import outside
from tests.unit.structured.conftest import Accepts, json_text

SAMPLES = ("Github_easy", "Glaiveai2K", "Handwritten", "Synthesized")
MIN_SHARE = 0.95
EACH = 4  # every fourth schema, for the suite's time; bench/structured.py has them all
# Valid instances of the sample that are rejected, each with a reason.
NOT_TAKEN = {
    "Github_easy---o21053": "a pattern with two unbounded repeats is more states than are allowed",
}
OWN: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "when": {"type": "string", "format": "date-time"},
                "lines": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}},
                        "required": ["sku"],
                        "additionalProperties": {"type": "number"},
                    },
                },
            },
            "required": ["id", "lines"],
            "additionalProperties": False,
        },
        [
            {"id": "12345678-1234-1234-1234-123456789abc", "lines": [{"sku": "AB123", "x": 1.5}]},
            {
                "id": "12345678-1234-1234-1234-123456789abc",
                "when": "2026-11-22T08:00:00Z",
                "lines": [{"sku": "AB123"}, {"sku": "ZZ000"}],
            },
        ],
        [
            {"id": "12345678-1234-1234-1234-123456789abc", "lines": []},
            {"id": "1", "lines": [{"sku": "AB123"}]},
            {"id": "12345678-1234-1234-1234-123456789abc", "lines": [{"sku": "ab123"}]},
            {"lines": [{"sku": "AB123"}]},
        ],
    ),
    (
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": {"type": ["integer", "null"]},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                }
            },
        },
        [{"value": 1}, {"value": None, "children": [{"value": 2, "children": []}]}],
        [{"value": "1"}, {"children": []}, {"value": 1, "children": [{}]}],
    ),
]


@pytest.mark.parametrize("number", range(len(OWN)))
def test_own_schemas_accept_only_valid_instances(number: int, accepts: Accepts) -> None:
    schema, valid, invalid = OWN[number]
    grammar = json_schema(schema)
    assert [value for value in valid if not accepts(grammar, json_text(value))] == []
    assert [value for value in invalid if accepts(grammar, json_text(value))] == []


def test_the_sample_compiles_and_its_instances_are_distinguished(
    compiler: GrammarCompiler,
    accepts: Accepts,
    consumes: Accepts,
    record_property: Callable[[str, object], None],
) -> None:
    """Masks are computed for the first valid instance of each schema; they decide no instance."""
    refused: Counter[str] = Counter()
    wrong: list[str] = []
    num_schemas = num_valid = num_invalid = 0
    for sample in SAMPLES:
        with outside(f"schemas/maskbench-{sample}.jsonl").open(encoding="utf-8") as lines:
            for line in islice(lines, None, None, EACH):
                case = json.loads(line)
                grammar = json_schema(case["schema"])
                num_schemas += 1
                try:
                    compiler.matcher(grammar)
                except InvalidParameter as error:
                    refused[reason_of(str(error))] += 1
                    continue
                with_masks = next((test for test in case["tests"] if test["valid"]), None)
                for test in case["tests"]:
                    judge = accepts if test is with_masks else consumes
                    num_valid += test["valid"]
                    num_invalid += not test["valid"]
                    is_taken = judge(grammar, json_text(test["data"]))
                    if test["valid"] and not is_taken:
                        written = as_written(case["schema"], test["data"])
                        is_taken = judge(grammar, json_text(written))
                    if is_taken != test["valid"] and case["name"] not in NOT_TAKEN:
                        wrong.append(f"{case['name']}: {json_text(test['data'])[:200]}")
    share = 1 - refused.total() / num_schemas
    record_property(
        SHOWN,
        f"schemas: {share:.1%} of {num_schemas} compile, {num_valid} valid and "
        f"{num_invalid} invalid instances; refused: {dict(refused.most_common())}",
    )
    assert wrong == []
    assert share >= MIN_SHARE


def as_written(schema: Any, value: Any) -> Any:
    """Return the value as an answer has it: properties in the order of the schema, integral numbers
    without a fraction.
    """
    return _ordered(schema, schema, value)


def _ordered(root: Any, schema: Any, value: Any) -> Any:
    below = _named(root, schema)
    if isinstance(value, list):
        items = below.get("[]", {})
        return [_ordered(root, items, entry) for entry in value]
    if isinstance(value, dict):
        order = list(below)
        keys = sorted(value, key=lambda key: order.index(key) if key in order else len(order))
        return {key: _ordered(root, below.get(key, {}), value[key]) for key in keys}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _named(root: Any, schema: Any, depth: int = 0) -> dict[str, Any]:
    """Yield the schemas of named properties and of items, at every level."""
    found: dict[str, Any] = {}
    if not isinstance(schema, dict) or depth > 8:
        return found
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        with contextlib.suppress(Undecided):
            found |= _named(root, resolved(root, schema["$ref"]), depth + 1)
    found |= schema.get("properties", {})
    if isinstance(schema.get("items"), dict):
        found["[]"] = schema["items"]
    for keyword in ("allOf", "anyOf", "oneOf"):
        for one in schema.get(keyword, ()):
            found = {
                **found,
                **{k: v for k, v in _named(root, one, depth + 1).items() if k not in found},
            }
    return found
