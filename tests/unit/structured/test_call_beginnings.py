"""Whether JSON may begin as a call: each answer compared with llguidance."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.structured.call_beginnings import may_begin
from quire.structured.schema import for_llguidance
from tests.cases import each_case

llguidance = pytest.importorskip("llguidance")

BYTES = llguidance.LLTokenizer("byte")
OPTIONS = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
TEXT, ANY = {"type": "string"}, {"type": "object"}


def shape(*required: str, others: Any = False, **properties: Any) -> dict[str, Any]:
    told = {"type": "object", "properties": properties, "required": list(required)}
    return {**told, "additionalProperties": others}


BOTH = shape("name", "parameters", name=TEXT, parameters={})
NEVER: dict[str, Any] = {
    "no such property": shape("city", city=TEXT),
    "no arguments": shape("name", name=TEXT, age={}),
    "none at all": False,
    "another type": {"type": ["array", "string", "null"]},
    "another name": shape(name={"enum": ["sub", "bob"]}, parameters={}),
    "a name that is none": shape(name={"type": "integer"}, parameters={}),
    "a long name": shape(name={"type": "string", "minLength": 4}, parameters={}),
    "forbidden": shape(others=True, name=False),
    "one that must come first": shape("a", others=True, a={}),
    "one that must come first, and is not listed": {"type": "object", "required": ["a"]},
    "one that must come between": shape("a", name=TEXT, a={}, parameters={}),
    "the other way round": shape("parameters", "name", parameters={}, name=TEXT),
    "behind the listed": shape("a", name=TEXT, a={}, others=True),
    "others before listed": shape(parameters={}, others=True),
    "others of another kind": {"type": "object", "additionalProperties": {"type": "integer"}},
    "values": {"enum": [{"name": "sub"}, "add", 5, [{"name": "add", "parameters": 1}]]},
    "branches": {"anyOf": [shape("a", others=True, a={}), {"type": "string"}]},
    "parts": {"allOf": [shape(name=TEXT, parameters={}), shape(name=TEXT)]},
    "a reference": {"$ref": "#/$defs/a", "$defs": {"a": shape("a", others=True, a={})}},
}
MAY: dict[str, Any] = {
    "any": {},
    "any object": ANY,
    "true": True,
    "both": BOTH,
    "optional ones before": shape(a={}, name=TEXT, b={}, parameters={}),
    "arguments among others": shape(name=TEXT, others=True),
    "both among others": shape(a={}, others=True),
    "by a pattern": {**shape(), "patternProperties": {"^[np]": True}},
    "of several types": {"type": ["object", "null"]},
    "values": {"enum": [1, {"name": "add", "parameters": 1}]},
    "branches": {"anyOf": [shape("a", a={}), BOTH]},
    "parts": {"allOf": [shape("a", others=True, a={}), shape(others=True, name=TEXT)]},
    "a reference": {"$ref": "#/$defs/a", "$defs": {"a": BOTH}},
    "a name by a pattern": shape(name={"type": "string", "pattern": "^a"}, parameters={}),
}
# Undecided, or decided from partial knowledge.
TOO_CAREFUL = {"parts"}


def writes(schema: Any, begin: str) -> bool:
    """Return whether llguidance allows a value of the schema with this beginning."""
    rewritten = for_llguidance(schema)
    if rewritten is False:
        return False
    told = {**({} if rewritten is True else rewritten), "x-guidance": OPTIONS}
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: %json {json.dumps(told)}")
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(begin.encode())
    taken: int = matcher.try_consume_tokens(ids)
    return taken == len(ids)


@each_case("case", NEVER)
def test_impossible_beginnings_are_detected(case: str) -> None:
    assert not may_begin(NEVER[case], names=["add"], key="parameters")
    assert not writes(NEVER[case], '{"name": "add", "parameters": ')


@each_case("case", MAY)
def test_possible_beginnings_are_never_denied(case: str) -> None:
    assert may_begin(MAY[case], names=["sub", "add"], key="parameters")
    if case not in TOO_CAREFUL:
        assert writes(MAY[case], '{"name": "add", "parameters": ')


@each_case("schema", [*NEVER.values(), *MAY.values()])
def test_a_list_is_judged_by_its_first_entry(schema: Any) -> None:
    own = schema if isinstance(schema, dict) else {}
    beside = {"$defs": own["$defs"]} if "$defs" in own else {}
    may = may_begin(schema, names=["add"], key="parameters")
    for listed in ({"items": schema}, {"prefixItems": [schema], "items": {}}):
        told = {"type": "array", **listed, **beside}
        assert may_begin(told, names=["add"], key="parameters", in_list=True) == may
        if not may:
            assert not writes(told, '[{"name": "add", "parameters": ')
        assert not may_begin(told, names=["add"], key="parameters")


def test_lists_of_anything_may_and_objects_may_not() -> None:
    for schema in ({}, {"type": "array"}, {"type": "array", "items": BOTH}):
        assert may_begin(schema, names=["add"], key="parameters", in_list=True)
    for schema in (ANY, {"type": "array", "items": TEXT}, {"enum": [[], [1], {}]}):
        assert not may_begin(schema, names=["add"], key="parameters", in_list=True)


def test_exponential_or_circular_references_count_as_possible() -> None:
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}}
    assert may_begin(circle, names=["add"], key="parameters")
    assert may_begin({"$ref": "https://a.example/b"}, names=["add"], key="parameters")
