"""Negations: what a schema forbids, as `jsonschema` judges it, and as grammars take it."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.grammar import json_schema
from quire.structured.negation import MAX_LETTERS, MAX_NUMBERS, negation
from tests.drawn import examples
from tests.unit.structured.conftest import Accepts, json_text
from tests.unit.structured.test_disjoint import DEFS, SCALARS, SCHEMAS, VALUES

_LETTERS = st.text("ab.é]^-$", max_size=3)
_SCALARS = st.one_of(
    _LETTERS, st.integers(-2, 3), st.sampled_from([0.5, 1.0, 1.5, True, False, None])
)


@settings(max_examples=examples(150), deadline=None)
@given(schema=SCHEMAS)
def test_a_negation_allows_what_the_schema_forbids(schema: Any) -> None:
    other = negation(schema)
    if other is not None:
        judges = [
            jsonschema.Draft202012Validator({"$defs": DEFS, "allOf": [one]})
            for one in (schema, other)
        ]
        for value in VALUES:
            assert judges[0].is_valid(value) != judges[1].is_valid(value)


@settings(max_examples=examples(150), deadline=None)
@given(values=st.lists(_SCALARS, min_size=1, max_size=6), others=st.lists(_SCALARS, max_size=6))
def test_listed_values_are_forbidden_and_no_others(values: list[Any], others: list[Any]) -> None:
    allows = jsonschema.Draft202012Validator(negation({"enum": values}))
    lists = jsonschema.Draft202012Validator({"enum": values})
    for value in [*values, *others, *SCALARS, [], {}, [1]]:
        assert allows.is_valid(value) != lists.is_valid(value)


NEGATED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a string": (
        {"type": "string", "not": {"const": "a.b"}},
        ["", "a", "axb", "a.", "a.bc", "é", "a.b\n"],
        ["a.b"],
    ),
    "several strings": (
        {"type": "string", "not": {"enum": ["none", "no", "n/a", "-]^"]}},
        ["n", "non", "nones", "n/", "x", '""', "-]"],
        ["none", "no", "n/a", "-]^"],
    ),
    "values of several types": (
        {"type": ["string", "number", "boolean", "null"], "not": {"enum": [1, "x", True, None]}},
        [0, 2, 1.5, "", "xx", False],
        [1, "x", True, None],
    ),
    "a property that names the alternative and may be absent": (
        {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind}}} for kind in ("x", "y")
            ]
        },
        [{"kind": "x"}, {"kind": "y"}, {"kind": "y", "more": 1}],
        [{}, {"more": 1}, {"kind": "z"}],
    ),
    "strings beside one of them": (
        {"oneOf": [{"type": "string", "maxLength": 4}, {"enum": ["auto", "fixed"]}]},
        ["", "aut", "fixe", "fixed"],
        ["auto", "fixed."],
    ),
}


@pytest.mark.parametrize("name", NEGATED)
def test_what_can_be_negated_is_a_grammar(name: str, accepts: Accepts) -> None:
    schema, good, bad = NEGATED[name]
    judge = jsonschema.Draft202012Validator(schema)
    assert [judge.is_valid(one) for one in good + bad] == [True] * len(good) + [False] * len(bad)
    allowed = json_schema(schema)
    assert [value for value in good if not accepts(allowed, json_text(value))] == []
    assert [value for value in bad if accepts(allowed, json_text(value))] == []


def test_long_lists_and_what_json_escapes_are_not_negated() -> None:
    assert negation({"enum": ["a" * (MAX_LETTERS + 1)]}) is None
    assert negation({"enum": list(range(MAX_NUMBERS + 1))}) is None
    assert negation({"const": [1]}) is None
    assert negation({"const": 'a"'}) is None
