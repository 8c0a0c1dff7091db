"""Disjoint schemas, listed values and unique arrays, compared with `jsonschema`.

Over drawn schemas and many values.
"""

from __future__ import annotations

import itertools
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import InvalidParameter
from quire.base.grammar import json_schema
from quire.structured.compiler import GrammarCompiler
from quire.structured.disjoint import Disjoint, finite_values
from quire.structured.evaluate import equal
from quire.structured.schema import for_llguidance
from tests.cases import each_case
from tests.drawn import examples
from tests.unit.structured.conftest import Accepts, json_text

SCALARS: list[Any] = [None, True, False, 0, 1, 2, 3, 1.5, -1, "", "a", "b", "ab", "http://x", "./x"]
VALUES: list[Any] = [
    *SCALARS,
    *([one] for one in SCALARS),
    *(list(pair) for pair in itertools.product([0, 1, "a", True, None], repeat=2)),
    *([1, 2, 3], [1, 2, 1], ["a", "b", "ab"], [[1], [1]], [{}, {}]),
    {},
    *({"a": one} for one in SCALARS),
    *({"a": one, "b": other} for one in (0, "a", None) for other in (1, "b")),
    *({"b": one} for one in (0, "a")),
    *({"c": 1}, {"a": [1]}, {"a": {"b": 1}}, {"a": 1, "c": 2}),
]
_TYPES = ["null", "boolean", "object", "array", "number", "integer", "string"]
_NUMBERS = st.integers(-1, 3)
_COUNTS = st.integers(0, 3)
PATTERNS = ["^a", "^b", "^ab?", "^http", r"^\./", "a", "^a|b", "^a*b", r"^\.?x", "^https?:"]
_PATTERNS = st.sampled_from(PATTERNS)


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw schemas with up to four keywords, some with subschemas."""
    named = st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    several = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(_TYPES) | st.lists(st.sampled_from(_TYPES), min_size=1),
            "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=4),
            "const": st.sampled_from(VALUES),
            "minimum": _NUMBERS,
            "maximum": _NUMBERS,
            "exclusiveMinimum": _NUMBERS,
            "exclusiveMaximum": _NUMBERS,
            "minLength": _COUNTS,
            "maxLength": _COUNTS,
            "pattern": _PATTERNS,
            "properties": named,
            "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.just({"^b": False}),
            "minProperties": _COUNTS,
            "maxProperties": _COUNTS,
            "items": inner,
            "prefixItems": several,
            "minItems": _COUNTS,
            "maxItems": _COUNTS,
            "uniqueItems": st.booleans(),
            "allOf": several,
            "anyOf": several,
            "oneOf": several,
            "$ref": st.sampled_from(["#/$defs/one", "#/$defs/other"]),
        },
    ).map(lambda schema: dict(itertools.islice(schema.items(), 4)))


# Few keywords a schema, of any kind: of all keywords drawn, four are kept, in a drawn order.
LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from(_TYPES).map(lambda name: {"type": name}),
    st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3).map(lambda some: {"enum": some}),
    st.sampled_from(SCALARS).map(lambda one: {"const": one}),
)


def _some(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(keywords(inner), st.randoms(use_true_random=False)).map(_shuffled)


def _shuffled(drawn: tuple[dict[str, Any], Any]) -> dict[str, Any]:
    schema, random = drawn
    names = sorted(schema)
    random.shuffle(names)
    return {name: schema[name] for name in names[:3]}


def _of_type(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({"type": st.just(name)}, optional=fields)


_NAMES = st.lists(st.sampled_from("abc"), max_size=2, unique=True)
_NAMED = st.dictionaries(st.sampled_from("ab"), LEAVES, max_size=2)
# Whether two of one type overlap depends on the drawn bounds.
TWO_OF_A_TYPE = st.one_of(
    [
        st.tuples(kind, kind)
        for kind in (
            _of_type("string", minLength=_COUNTS, maxLength=_COUNTS),
            _of_type("string", pattern=_PATTERNS),
            _of_type("number", minimum=_NUMBERS, exclusiveMaximum=_NUMBERS),
            _of_type("integer", exclusiveMinimum=_NUMBERS, maximum=_NUMBERS),
            _of_type("object", required=_NAMES, properties=_NAMED, additionalProperties=LEAVES),
            _of_type(
                "object",
                required=_NAMES,
                additionalProperties=LEAVES,
                patternProperties=st.just({"^[ab]": True}),
            ),
            _of_type("object", minProperties=_COUNTS, maxProperties=_COUNTS),
            _of_type("array", minItems=_COUNTS, maxItems=_COUNTS, items=LEAVES),
            _of_type("array", minItems=_COUNTS, prefixItems=st.lists(LEAVES, min_size=1)),
        )
    ]
)
SCHEMAS = st.recursive(LEAVES, _some, max_leaves=5)
DEFS = {"one": {"type": "string"}, "other": {"enum": [1, "a", [1]]}}


def valid(schema: Any) -> list[Any]:
    """Return the values that jsonschema accepts."""
    judge = jsonschema.Draft202012Validator(schema)
    return [value for value in VALUES if judge.is_valid(value)]


@settings(max_examples=examples(600), deadline=None)
@given(pair=TWO_OF_A_TYPE | st.tuples(SCHEMAS, SCHEMAS))
def test_no_value_matches_two_disjoint_schemas(pair: tuple[Any, Any]) -> None:
    one, other = pair
    root = {"$defs": DEFS}
    if Disjoint(root).excludes(one, other):
        assert valid({**root, "allOf": [one, other]}) == []


def test_patterns_are_disjoint_by_their_first_letters() -> None:
    apart = []
    for pair in itertools.combinations(PATTERNS, 2):
        if Disjoint({}).excludes(*({"type": "string", "pattern": one} for one in pair)):
            assert valid({"allOf": [{"type": "string", "pattern": one} for one in pair]}) == []
            apart.append(pair)
    assert ("^http", r"^\./") in apart
    assert ("^a", "^b") in apart


@settings(max_examples=examples(150), deadline=None)
@given(schema=SCHEMAS)
def test_listed_values_are_the_valid_ones(schema: Any) -> None:
    listed = finite_values(schema, {"$defs": DEFS})
    if listed is not None:
        whole = {"$defs": DEFS, "allOf": [schema]}
        judge = jsonschema.Draft202012Validator(whole)
        assert all(judge.is_valid(value) for value in listed)
        for value in valid(whole):
            assert any(equal(value, one) for one in listed)


@settings(max_examples=examples(200), deadline=None)
@given(
    schema=st.one_of(
        st.lists(SCHEMAS, min_size=2, max_size=3).map(lambda some: {"oneOf": some}),
        SCHEMAS.map(lambda entry: {"type": "array", "items": entry, "uniqueItems": True}),
        st.lists(SCHEMAS, min_size=2, max_size=3).map(
            lambda some: {"prefixItems": some, "items": False, "uniqueItems": True}
        ),
        SCHEMAS,
    )
)
def test_a_rewritten_schema_allows_the_same_values(schema: Any) -> None:
    whole = {"$defs": DEFS, **schema} if isinstance(schema, dict) else schema
    assert valid(for_llguidance(whole)) == valid(whole)


DECIDED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "unique of a list": (
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
        [[], ["a"], ["b", "a"], [1, "b", "a"]],
        [["a", "a"], [1, "b", 1], ["c"]],
    ),
    "unique of five": (
        {"type": "array", "items": {"enum": list("abcde")}, "uniqueItems": True, "minItems": 2},
        [["a", "b"], ["e", "d", "c", "b", "a"]],
        [["a"], ["a", "b", "a"]],
    ),
    "unique booleans and null": (
        {"type": "array", "items": {"type": ["boolean", "null"]}, "uniqueItems": True},
        [[True, None, False], []],
        [[True, True], [None, None]],
    ),
    "unique small integers": (
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 30},
            "uniqueItems": True,
            "maxItems": 2,
        },
        [[1], [30, 7]],
        [[7, 7], [31], [1, 2, 3]],
    ),
    "unique by reference": (
        {
            "type": "array",
            "items": {"$ref": "#/$defs/color"},
            "uniqueItems": True,
            "$defs": {"color": {"enum": ["red", "green"]}},
        },
        [["red"], ["green", "red"]],
        [["red", "red"]],
    ),
    "at most one entry": (
        {"type": "array", "items": {"type": "string"}, "maxItems": 1, "uniqueItems": True},
        [[], ["any"]],
        [["a", "b"]],
    ),
    "entries of different types": (
        {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
            "items": False,
            "uniqueItems": True,
        },
        [["1", 1, None], ["x"]],
        [["x", "x"]],
    ),
    "nothing need be unique": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
        [[1, 1]],
        [["a"]],
    ),
    "unique within all of": (
        {
            "allOf": [
                {"type": "array", "minItems": 2},
                {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
            ]
        },
        [["a", "b"], ["c", "b", "a"]],
        [["a"], ["a", "a"]],
    ),
    "one of ranges": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "exclusiveMinimum": 3}]},
        [3, 4, 5.5],
        [2.5],
    ),
    "one of lengths": (
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 5}]},
        ["", "ab", "abcde"],
        ["abc"],
    ),
    "one of prefixes": (
        {
            "oneOf": [
                {"type": "string", "pattern": "^https?://.+$"},
                {"type": "string", "pattern": r"^\./.+$"},
            ]
        },
        ["http://x", "./x"],
        ["x", "/x"],
    ),
    "one of lists that overlap": (
        {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}, {"const": 3}]},
        ["a", "c", 3],
        ["b"],
    ),
    "one of a thing and a list of it": (
        {
            "oneOf": [{"$ref": "#/$defs/x"}, {"type": "array", "items": {"$ref": "#/$defs/x"}}],
            "$defs": {"x": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        },
        [{"n": 1}, [{"n": 1}]],
        [1, [1]],
    ),
    "one of kinds within kinds": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {
                        "meta": {
                            "type": "object",
                            "properties": {"kind": {"const": kind}},
                            "required": ["kind"],
                        }
                    },
                    "required": ["meta"],
                }
                for kind in ("x", "y")
            ]
        },
        [{"meta": {"kind": "x"}}, {"meta": {"kind": "y"}}],
        [{"meta": {"kind": "z"}}, {"meta": {}}],
    ),
}


@each_case("name", DECIDED)
def test_decidable_schemas_become_grammars(name: str, accepts: Accepts) -> None:
    schema, good, bad = DECIDED[name]
    judge = jsonschema.Draft202012Validator(schema)
    assert [judge.is_valid(value) for value in good + bad] == [True] * len(good) + [False] * len(
        bad
    )
    allowed = json_schema(schema)
    assert [value for value in good if not accepts(allowed, json_text(value))] == []
    assert [value for value in bad if accepts(allowed, json_text(value))] == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"items": {"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}}, "oneOf (at #/items/oneOf)"),
    ],
)
def test_undecidable_schemas_are_rejected(
    schema: Any, said: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidParameter) as error:
        compiler.matcher(json_schema(schema))
    assert said in str(error.value)
