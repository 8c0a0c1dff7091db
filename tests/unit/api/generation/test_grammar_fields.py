"""response_format and structured_outputs: the grammars they request, and rejections by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.api.generation.grammar_fields import grammar_asked_for
from quire.base.errors import InvalidParameter
from quire.base.grammar import GrammarKind
from tests.cases import each_case

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"type": "integer"}}}
SCHEMA_FORM = 'schema is (given as|needed:) {"type": "json_schema", "json_schema": {"name": "...",'
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


def response_format(kind: str, **rest: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **rest}}


@pytest.mark.parametrize("given", [{}, response_format("text")])
def test_a_text_format_requests_no_grammar(given: dict[str, Any]) -> None:
    assert grammar_asked_for(given) is None


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}, {"strict": None}])
def test_a_schema_keeps_its_property_order_whatever_strict_is(
    strict: dict[str, Any],
) -> None:
    grammar = grammar_asked_for(
        response_format("json_schema", json_schema={"name": "x", "schema": SCHEMA, **strict})
    )
    assert grammar is not None
    assert (grammar.kind, grammar.param) == (GrammarKind.JSON_SCHEMA, "response_format")
    assert list(json.loads(grammar.text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_be_beside_the_type(kind: str) -> None:
    named = {"name": "x", "schema": SCHEMA, "strict": True}
    found = grammar_asked_for(response_format(kind, **named))
    assert found == grammar_asked_for(response_format("json_schema", json_schema=named))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": SCHEMA}, "json_schema", None),
        ({"json": json.dumps(SCHEMA)}, "json_schema", None),
        ({"json_object": True}, "json_schema", '{"type":"object"}'),
        ({"json_object": False, "regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"], "regex": None}, "choice", '["a","b"]'),
        ({"grammar": "start: /a/", "disable_fallback": True}, "grammar", "start: /a/"),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag", None),
    ],
)
def test_each_form_of_structured_outputs_is_a_grammar(
    given: dict[str, Any], kind: str, text: str | None
) -> None:
    grammar = grammar_asked_for({"structured_outputs": given})
    assert grammar is not None
    assert (grammar.kind, grammar.param) == (kind, "structured_outputs")
    assert text is None or grammar.text == text


def test_white_space_is_configurable() -> None:
    def whitespace(**options: Any) -> str | None:
        grammar = grammar_asked_for({"structured_outputs": {"json": SCHEMA, **options}})
        assert grammar is not None
        return grammar.whitespace

    assert whitespace() is None
    assert whitespace(disable_any_whitespace=True) == ""
    assert whitespace(whitespace_pattern="[ ]?") == "[ ]?"


@each_case(
    ("given", "said"),
    [
        (response_format("yaml"), "one of text, json_object"),
        ({"response_format": "json"}, "an object with a type"),
        (response_format("text", extra=1), "extra"),
        (response_format("json_object", schema="{}"), "object is allowed, not its"),
        (response_format("json_object", schema={}, more=1), "more"),
        (response_format("json_schema", schema={}, json_schema={"schema": {}}), SCHEMA_FORM),
        (response_format("json_object", name="x"), SCHEMA_FORM),
        (response_format("object", properties={}), SCHEMA_FORM),
        (response_format("regex", regex="a"), 'write it as structured_outputs: {"regex": ...}'),
        (response_format("json_schema"), f"json_schema is missing; .*{SCHEMA_FORM}"),
        (response_format("json_schema", json_schema={"type": "object"}), SCHEMA_FORM),
        (
            response_format("json_schema", json_schema={"schema": "{}"}),
            "object is allowed, not its",
        ),
        (
            response_format("json_schema", json_schema={"schema": {"parameters": {}}}),
            'schema has "parameters" and no keyword of JSON Schema',
        ),
        (response_format("json_schema", json_schema={"schema": {}, "more": 1}), "more"),
        (response_format("json_schema", json_schema={"schema": {}, "strict": 1}), "strict"),
        (response_format("json_schema", json_schema={"schema": {}, "name": 1}), "name"),
        ({"structured_outputs": {}}, "nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "beside regex"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 3}}, "whitespace_pattern"),
        (
            {
                "structured_outputs": {
                    "json": {},
                    "whitespace_pattern": "a",
                    "disable_any_whitespace": True,
                }
            },
            "both",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "additionalProperties: false",
        ),
        ({"structured_outputs": {"backend": "xgrammar"}}, "llguidance"),
        ({"structured_outputs": {"json": "{"}}, "not JSON"),
        ({**response_format("json_object"), "structured_outputs": {"regex": "a"}}, "both"),
    ],
)
def test_other_fields_are_rejected_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as error:
        grammar_asked_for(given)
    assert error.value.param in ("response_format", "structured_outputs")
