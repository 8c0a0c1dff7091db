"""Closing objects: fewer values, never none, and no change if parts validate a value together."""

from __future__ import annotations

from typing import Any

import jsonschema
import pydantic
import pytest

from quire.structured.closed import closed
from tests.cases import each_case

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = {**PERSON, "additionalProperties": False}


class Owner(pydantic.BaseModel):
    name: str


class Pet(pydantic.BaseModel):
    owners: list[Owner]
    home: Owner | None = None
    marks: dict[str, int] = {}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (PERSON, CLOSED),
        ({"type": "array", "items": PERSON}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [PERSON, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$defs": {"p": PERSON}, "$ref": "#/$defs/p"},
            {"$defs": {"p": CLOSED}, "$ref": "#/$defs/p"},
        ),
        ({"additionalProperties": PERSON}, {"additionalProperties": CLOSED}),
        (
            {"properties": {"a": PERSON, "properties": PERSON}},
            {"properties": {"a": CLOSED, "properties": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_an_object_that_lists_its_properties_has_no_others(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@each_case(
    "schema",
    [
        True,
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**PERSON, "additionalProperties": True},
        {**PERSON, "additionalProperties": {"type": "string"}},
        {**PERSON, "patternProperties": {"^x": {}}},
        {**PERSON, "required": ["name", "age"]},
        {**PERSON, "minProperties": 2},
        {**PERSON, "enum": [{"name": "a", "age": 3}]},
        {"allOf": [PERSON, {"properties": {"age": {"type": "integer"}}}]},
        {**PERSON, "anyOf": [{"required": ["name"]}, {"required": ["age"]}]},
        {**PERSON, "$ref": "#/$defs/p", "$defs": {"p": {"properties": {"age": {}}}}},
        {**PERSON, "dependentRequired": {"name": ["age"]}},
        {**PERSON, "not": {"required": ["age"]}},
        {"enum": [PERSON]},
        {"default": PERSON, "const": PERSON},
        {"properties": 3},
        "no schema",
    ],
)
def test_schemas_on_other_properties_are_unchanged(schema: Any) -> None:
    assert closed(schema) == schema


def test_the_schema_of_a_class_allows_only_its_fields() -> None:
    schema = closed(Pet.model_json_schema())
    value: dict[str, Any] = {"owners": [{"name": "Ann"}], "home": None, "marks": {"x": 1}}
    jsonschema.validate(value, schema)
    for wrong in ({**value, "age": 3}, {**value, "home": {"name": "Bo", "age": 3}}):
        jsonschema.validate(wrong, Pet.model_json_schema())
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
