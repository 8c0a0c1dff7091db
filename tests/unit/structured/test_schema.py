"""Schemas for llguidance: a rewritten schema allows the same values, according to `jsonschema`."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from quire.base.errors import InvalidParameter
from quire.base.grammar import grammar, json_schema
from quire.structured.compiler import GrammarCompiler
from quire.structured.evaluate import Evaluator, Undecided, equal
from quire.structured.schema import for_llguidance, negation, path_of
from quire.structured.schema_form import malformed
from tests.cases import each_case
from tests.unit.structured.conftest import Accepts, json_text

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2.5, 7, "", "a", "ab", "abc", [], [1], [1, 2], ["a", "a"]),
    *({}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}, {"a": "x", "c": None}, {"kind": "x", "n": 1}),
    {"kind": "y", "s": "t"},
]
_KIND_X = {
    "type": "object",
    "properties": {"kind": {"const": "x"}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
}
_KIND_Y = {
    "type": "object",
    "properties": {"kind": {"const": "y"}, "s": {"type": "string"}},
    "required": ["kind", "s"],
}
REWRITTEN: dict[str, Any] = {
    "listed values and not": {"enum": VALUES, "not": {"type": ["string", "object"]}},
    "listed values and contains": {"enum": VALUES, "contains": {"const": 2}},
    "listed values that differ": {"enum": VALUES, "type": "array", "uniqueItems": True},
    "listed values, if and else": {
        "enum": VALUES,
        "if": {"type": "object"},
        "then": {"required": ["a"]},
        "else": {"not": {"type": "number"}},
    },
    "a list within all of": {"allOf": [{"enum": VALUES}, {"not": {"not": {"minLength": 2}}}]},
    "one of listed values": {"enum": VALUES, "oneOf": [{"minimum": 1}, {"type": "integer"}]},
    "not types": {"not": {"type": ["object", "array", "null", "number"]}},
    "not required": {"not": {"required": ["a"]}},
    "not two required": {"not": {"required": ["a", "b"]}},
    "not properties": {"not": {"properties": {"a": {"type": "number"}}}},
    "not not": {"not": {"not": {"type": "string", "maxLength": 1}}},
    "not any": {
        "type": ["number", "string"],
        "not": {"anyOf": [{"type": "number"}, {"minLength": 2}]},
    },
    "not all": {"not": {"allOf": [{"type": "object"}, {"required": ["b"]}]}},
    "not bounds": {"type": "number", "not": {"maximum": 0}},
    "not long": {"type": "string", "not": {"minLength": 2}},
    "not of several parts": {"not": {"type": "object", "required": ["a"]}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "dependent schemas": {
        "type": "object",
        "dependentSchemas": {"kind": {"properties": {"n": {"minimum": 1}}, "required": ["n"]}},
    },
    "dependent required": {"type": "object", "dependentRequired": {"a": ["b"], "kind": []}},
    "one of types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    "one of kinds": {"oneOf": [_KIND_X, _KIND_Y]},
    "one of references": {
        "oneOf": [{"$ref": "#/definitions/x"}, {"$ref": "#/definitions/y"}],
        "definitions": {"x": _KIND_X, "y": _KIND_Y},
    },
    "one of required": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "one of kinds that must be there": {
        "type": "object",
        "properties": {"kind": {"type": "string"}},
        "required": ["kind"],
        "oneOf": [
            {"properties": {"kind": {"enum": ["x"]}}},
            {"properties": {"kind": {"const": "y"}, "s": {"const": "u"}}},
        ],
    },
    "one of closed objects": {
        "oneOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
        ]
    },
}


def judge_of(schema: Any) -> Any:
    """Return jsonschema's validator of the last draft with all the schema's keywords."""
    if "dependencies" in schema:
        return jsonschema.Draft7Validator(schema)
    return jsonschema.Draft201909Validator(schema)


@each_case("name", REWRITTEN)
def test_a_rewritten_schema_allows_the_same_values(name: str, accepts: Accepts) -> None:
    schema = REWRITTEN[name]
    judge = judge_of(schema)
    rewritten = jsonschema.Draft201909Validator(for_llguidance(schema))
    wanted = [value for value in VALUES if judge.is_valid(value)]
    assert wanted
    assert len(wanted) < len(VALUES)
    assert [value for value in VALUES if rewritten.is_valid(value)] == wanted
    allowed = json_schema(schema)
    assert [value for value in VALUES if accepts(allowed, json_text(value))] == wanted


def test_supported_schemas_are_unchanged() -> None:
    for schema in (
        {"type": "object", "properties": {"not": {"type": "string"}, "format": {"const": 1}}},
        {"type": "string", "format": "date-time", "minLength": 3},
        {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
        {"not": {"pattern": "a"}},
        True,
        {"allOf": 3, "oneOf": "x", "enum": 7, "type": [{}], "dependencies": 4},
    ):
        assert for_llguidance(schema) == schema


def test_an_undefined_format_is_ignored_and_a_defined_one_is_kept() -> None:
    assert for_llguidance({"type": "string", "format": "topic"}) == {"type": "string"}
    assert for_llguidance({"type": "string", "format": "iri"})["format"] == "iri"


# Malformed keywords: (schema, words of the error), each with the place and what is allowed there.
MALFORMED: list[tuple[Any, str]] = [
    ({"type": "strng"}, '(at #/type); did you mean "string"? array, boolean, integer, null,'),
    ({"items": {"type": ["str", "null"]}}, '"str" (at #/items/type); did you mean "string"?'),
    ({"type": "any"}, "leave type out to allow any value"),
    ({"type": None}, "the type null (at #/type); array, boolean"),
    ({"properties": []}, "[] at #/properties; an object of schemas by name"),
    ({"properties": {"a/b": "text"}}, '"text" at #/properties/a~1b; a schema is allowed'),
    ({"required": "a"}, '"a" at #/required; a list of property names'),
    ({"properties": {"a": {"required": True}}}, "true at #/properties/a/required; a list of"),
    ({"anyOf": [{"enum": []}]}, "[] at #/anyOf/0/enum; a list of at least one value"),
    ({"allOf": []}, "[] at #/allOf; a list of at least one schema"),
    ({"minimum": 1, "exclusiveMinimum": True}, "true at #/exclusiveMinimum; a number is"),
    ({"minLength": -1}, "-1 at #/minLength; a whole number from 0"),
    ({"multipleOf": 0}, "0 at #/multipleOf; a number above 0"),
    ({"dependentRequired": {"a": "b"}}, '"b" at #/dependentRequired/a; a list of property names'),
    ({"additionalProperties": "no"}, '"no" at #/additionalProperties; a schema is allowed'),
    ({"$ref": "#/$defs/nope"}, 'does not exist in it; define it there, as in "$defs": {"nope"'),
]


@each_case(("schema", "said"), MALFORMED)
def test_a_malformed_keyword_is_named_with_its_path(schema: Any, said: str) -> None:
    assert said in (malformed(schema) or "")


def test_schemas_of_any_draft_are_well_formed() -> None:
    for schema in (
        *REWRITTEN.values(),
        {"properties": {"type": {"type": "string"}, "enum": {"const": "type"}}, "x-more": 1},
        {"items": [{}, True], "additionalItems": False, "prefixItems": []},
        {"$id": "https://a/b", "$ref": "#/nowhere/here"},
        {"$ref": "#anchor", "enum": None, "default": {"type": 5}, "exclusiveMinimum": 0.5},
    ):
        assert malformed(schema) is None


REFUSED: list[tuple[Any, str]] = [
    (
        {"properties": {"a/b": {"type": "array", "items": {"uniqueItems": True}}}},
        "uniqueItems (at #/properties/a~1b/items/uniqueItems)",
    ),
    ({"properties": {"not": {}}, "contains": {"const": 1}}, "contains (at #/contains)"),
    (
        {"anyOf": [{}, {"if": {}, "then": {}}]},
        "if (at #/anyOf/1/if), then (at #/anyOf/1/then)",
    ),
    ({"items": {"not": {"pattern": "a"}}}, "not (at #/items/not)"),
    ({"items": {"format": "iri"}}, '"iri" (at #/items/format)'),
    ({"$ref": "https://example.com/schema.json"}, "which is not fetched"),
    ({"$ref": "#/definitions/absent"}, "does not exist"),
    ({"type": "thing"}, 'the schema has the type "thing"'),
    (
        {"items": {"pattern": "(?=a)b"}},
        '"(?=a)b" (at #/items/pattern), which cannot be used: look-',
    ),
    (
        {"patternProperties": {"(": {}}},
        "(at #/patternProperties/(), which cannot be used: unclosed",
    ),
    (
        {"type": "string", "minLength": 5, "maxLength": 3},
        "minLength (5) is greater than maxLength (3) (at #); loosen it",
    ),
    ({"enum": [1, 2], "not": {"type": "integer"}}, "no value fits it"),
    (False, "schema is false"),
]


@each_case(("schema", "said"), REFUSED)
def test_an_unusable_schema_is_rejected_by_keyword_and_path(
    schema: Any, said: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(InvalidParameter) as error:
        compiler.matcher(json_schema(schema, param="response_format"))
    assert said in str(error.value)
    assert str(error.value).startswith("response_format: the schema ")
    assert error.value.param == "response_format"
    assert "<state>" not in str(error.value)


@each_case(("schema", "said"), REFUSED[:-1])
def test_a_schema_after_reasoning_is_rejected_by_keyword_and_path(
    schema: Any, said: str, compiler: GrammarCompiler
) -> None:
    """It is then inside a Lark grammar, which the client does not know."""
    options = {"lenient": False, "coerce_one_of": False}
    written = json.dumps({**for_llguidance(schema), "x-guidance": options})
    lark = f"start: thinking words\nthinking[lazy]: /(.|\\n)*<\\/think>/\nwords: %json {written}"
    with pytest.raises(InvalidParameter) as error:
        compiler.matcher(grammar(lark, param="response_format"))
    assert said in str(error.value)
    assert str(error.value).startswith("response_format: the schema ")
    assert "%json" not in str(error.value)


def test_the_path_is_that_of_a_keyword_not_of_a_property_of_its_name() -> None:
    schema = {"properties": {"not": {"type": "string"}}, "items": [{}, {"not": {}}]}
    assert path_of(schema, "not") == "#/items/1/not"
    assert path_of(schema, "contains") == ""


@pytest.mark.parametrize("schema", [{"pattern": "a"}, {"items": {}}, {"multipleOf": 2}, 3])
def test_only_plain_negations_are_rewritten(schema: Any) -> None:
    assert negation(schema) is None


def test_the_evaluator_guesses_nothing() -> None:
    beyond: list[Any] = [
        {"pattern": "a"},
        {"patternProperties": {}},
        {"$ref": "https://example.com"},
        {"$ref": "#/nowhere"},
        {"$ref": "#", "type": "string"},
        {"minimum": True},
        {"multipleOf": 0.1},
        {"unevaluatedItems": False},
        {"enum": 3},
        [],
    ]
    for schema in beyond:
        with pytest.raises(Undecided):
            Evaluator(schema).allows(schema, 5)
    loop = {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
    with pytest.raises(Undecided):
        Evaluator(loop).allows(loop, 1)


def test_values_are_compared_as_in_json() -> None:
    assert equal({"a": [1, 2.0]}, {"a": [1.0, 2]})
    assert not equal(True, 1)
    assert not equal([0], [False])
    assert not equal({"a": 1}, {"b": 1})


@each_case("name", sorted(REWRITTEN))
def test_the_evaluator_agrees_with_jsonschema(name: str) -> None:
    schema = REWRITTEN[name]
    judge = judge_of(schema)
    for value in VALUES:
        assert Evaluator(schema).allows(schema, value) == judge.is_valid(value), json.dumps(value)
