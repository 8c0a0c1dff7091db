"""The field table: honoured, accepted without effect, rejected by name."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from quire.api.anthropic.fields import MESSAGES
from quire.api.generation.field_set import FieldSet
from quire.api.generation.fields import (
    APPLY_TEMPLATE,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    GENERATE,
    TOKENIZE,
    ignored_header,
    known_fields,
)
from quire.api.generation.foreign_fields import (
    HINT_VALUES,
    HINTS,
    NO_EFFECT,
    OPTIONS,
    SYNONYMS,
    UNSERVED,
    documented,
)
from quire.api.generation.sampler_order import ORDERS
from quire.api.generation.unknown_fields import OTHER_NAMES, unknown_field
from quire.api.ollama.fields import OLLAMA_CHAT
from quire.api.openai.responses.fields import RESPONSES
from quire.api.openapi.operations import OPERATIONS
from quire.base.errors import InvalidParameter
from tests.cases import each_case
from tests.unit.api.fake_engine import Site


def given(body: dict[str, Any]) -> dict[str, Any]:
    return known_fields(body, CHAT, warn_unknown=False)[0]


FOREIGN = [*SYNONYMS, *NO_EFFECT, *UNSERVED, *OPTIONS, *ORDERS, *HINTS, *OTHER_NAMES]
OF_KIND: dict[str, Any] = {"string": "any", "object": {}, "number": 3, "boolean": True}


def test_no_foreign_field_is_listed_twice() -> None:
    assert len(FOREIGN) == len(set(FOREIGN))
    # Fields of chats that a completion accepts and does not need.
    of_chats = {"include_reasoning", "metadata", "service_tier"}
    assert set(FOREIGN) & (COMPLETIONS | CHAT) == of_chats


def test_the_documented_rows_are_those_of_the_table() -> None:
    rows = dict(documented())
    assert list(rows) == [f"`{name}`" for name in FOREIGN if name not in OTHER_NAMES]
    assert rows["`guided_json`"] == "read as `structured_outputs.json`"
    assert rows["`id_slot`"].startswith("accepted at `-1`; otherwise refused: ")
    assert rows["`rid`"] == "any string; no effect"


@each_case("name", [*sorted(CHAT | COMPLETIONS), *FOREIGN, "frobnicate"])
def test_null_means_absent_for_every_field(name: str) -> None:
    found, ignored = known_fields({name: None}, CHAT | COMPLETIONS, warn_unknown=False)
    assert (found, ignored) == ({}, ())


@each_case("name", sorted(NO_EFFECT))
def test_fields_without_effect_are_accepted_at_any_value(name: str) -> None:
    body = {name: OF_KIND[NO_EFFECT[name]]}
    assert known_fields(body, COMPLETIONS, warn_unknown=False) == ({}, ())


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in OPTIONS.items() for key in keys]
)
def test_a_key_of_options_is_accepted_at_what_asks_for_nothing(name: str, key: str) -> None:
    rule = OPTIONS[name][key]
    for value in (None, *rule.allowed):
        assert given({name: {key: value}}) == {}
    assert given({name: {}}) == {}
    for value in (True, "something else", 0):
        with pytest.raises(InvalidParameter) as caught:
            given({name: {key: value}})
        assert caught.value.param == name
        assert f"{name}.{key} is" in str(caught.value)
        assert rule.why in str(caught.value)
    for odd in ("text", [], {"frobnicate": 1}):
        with pytest.raises(InvalidParameter, match=f"{name} is "):
            given({name: odd})


@each_case(
    ("name", "value"),
    [
        (name, value)
        for name, rule in sorted(UNSERVED.items())
        for value in rule.allowed
        if name not in CHAT
    ],
)
def test_the_default_of_an_unserved_field_is_accepted(name: str, value: Any) -> None:
    assert given({name: value}) == {}


@each_case("name", sorted(UNSERVED.keys() - CHAT))
def test_any_other_value_is_rejected_with_field_and_reason(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        given({name: "something else"})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert UNSERVED[name].why in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("store", 0), ("top_a", False), ("functions", " ")])
def test_a_value_that_only_resembles_the_default_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter):
        given({name: value})


def test_an_unknown_field_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(InvalidParameter, match='did you mean "temperature"') as caught:
        given({"temprature": 1})
    assert caught.value.param == "temprature"


@each_case(
    ("honoured", "body", "said"),
    [
        (CHAT, {"prompt": "a"}, 'takes messages; write it as "messages": [{"role": "user", "con'),
        (CHAT, {"inputs": "a"}, "or send it to POST /v1/completions as prompt"),
        (CHAT, {"input": "a"}, "which takes messages; write it as"),
        (CHAT, {"tokens": [1]}, "takes messages; send token ids to POST /generate as tokens"),
        (CHAT, {"messages": [], "prompt": "a"}, "takes messages; leave it out, or write it as"),
        (CHAT, {"suffix": "a"}, "of this request, but of POST /v1/completions; leave it out"),
        (CHAT, {"system": "a"}, 'write it as the first message: {"role": "system", "content"'),
        (CHAT, {"instructions": "a"}, "write it as the first message"),
        (CHAT, {"format": "json"}, 'as response_format, such as {"type": "json_object"}'),
        (CHAT, {"extra_body": {}}, "write its entries as fields of the request itself, such as"),
        (CHAT, {"conversation": []}, 'did you mean "messages"?'),
        (CHAT, {"max-tokens": 1}, 'did you mean "max_tokens"?'),
        (COMPLETIONS, {"messages": []}, "takes prompt; send a conversation to POST /v1/chat/comp"),
        (COMPLETIONS, {"prompt": "", "messages": []}, "takes prompt; leave it out, or send a conv"),
        (COMPLETIONS, {"input": "a"}, 'did you mean "prompt"?'),
        (COMPLETIONS, {"input_ids": [1]}, "which takes prompt; write the token ids as prompt"),
        (COMPLETIONS, {"max_completion_tokens": 1}, 'did you mean "max_tokens"?'),
        (COMPLETIONS, {"top_logprobs": 1}, 'did you mean "logprobs"?'),
        (COMPLETIONS, {"tools": []}, "of this request, but of POST /v1/chat/completions; leave"),
        (COMPLETIONS, {"options": {}}, "write its entries as fields of the request itself"),
        (GENERATE, {"text": "a"}, "takes tokens; send a text to POST /v1/completions as prompt"),
        (GENERATE, {"inputs": "a"}, "takes tokens; send a text to POST /v1/completions as prompt"),
        (GENERATE, {"messages": []}, "takes tokens; send a conversation to POST /v1/chat/comp"),
        (GENERATE, {"ids": [1]}, 'did you mean "tokens"?'),
        (GENERATE, {"sampling_params": {}}, "write its entries as fields of the request itself"),
        (GENERATE, {"response_format": {}}, 'did you mean "structured_outputs"?'),
        (TOKENIZE, {"text": "a"}, 'did you mean "prompt"?'),
        (DETOKENIZE, {"prompt": "a"}, "takes tokens; send a text to POST /tokenize as prompt"),
        (APPLY_TEMPLATE, {"prompt": "a"}, "which takes messages; write it as"),
    ],
)
def test_a_field_of_another_route_or_api_names_what_to_write(
    honoured: frozenset[str], body: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        known_fields(body, honoured, warn_unknown=False)
    assert said in str(caught.value)
    assert caught.value.param == list(body)[-1]


@pytest.mark.parametrize("name", ["system", "options", "instructions", "foo"])
def test_a_name_that_only_resembles_a_field_has_no_hint(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        given({name: 1})
    assert "did you mean" not in str(caught.value)


def test_a_huge_name_is_shortened_in_the_error() -> None:
    with pytest.raises(InvalidParameter) as caught:
        given({"x" * 1_000_000: 1})
    assert len(str(caught.value)) < 400


def test_in_warn_mode_unknown_fields_are_ignored_and_listed() -> None:
    found, ignored = known_fields({"seed": 1, "frobnicate": 2}, CHAT, warn_unknown=True)
    assert (found, ignored) == ({"seed": 1}, ("frobnicate",))


def test_warn_mode_does_not_affect_known_unserved_fields() -> None:
    with pytest.raises(InvalidParameter):
        known_fields({"functions": [{"name": "f"}]}, CHAT, warn_unknown=True)


def test_the_header_of_odd_names_is_printable_ascii_and_bounded() -> None:
    header = ignored_header(("a\r\nb", "ключ", "x" * 5_000, *("n" for _ in range(1_000))))
    assert header.isascii()
    assert header.isprintable()
    assert len(header) < 2_500


def test_ignored_fields_are_in_a_header_and_in_the_log() -> None:
    async def exchange() -> None:
        site = Site(unknown_fields="warn")
        reply = await site.post("/v1/completions", {"prompt": "a", "frobnicate": 1})
        assert reply.status == 200
        assert reply.headers["x-quire-ignored-fields"] == "frobnicate"
        assert "frobnicate" in site.log.getvalue()

    asyncio.run(exchange())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("user", 5, "user is 5; a string is allowed"),
        ("metadata", "text", 'metadata is "text"; an object is allowed'),
        ("request_id", ["a"], r'request_id is \["a"\]; a string'),
        ("n_keep", True, "n_keep is true; a number"),
        ("cache_prompt", 1, "cache_prompt is 1; a boolean"),
    ],
)
def test_a_label_of_another_type_is_rejected(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        known_fields({name: value}, COMPLETIONS, warn_unknown=False)
    assert caught.value.param == name
    assert given({name: None}) == {}


@each_case("name", sorted(SYNONYMS))
def test_a_synonym_is_read_as_its_field(name: str) -> None:
    field, *keys = SYNONYMS[name]
    tables = [table for table in (CHAT, COMPLETIONS, TOKENIZE, GENERATE) if field in table]
    assert tables
    for honoured in tables:
        found, ignored = known_fields({name: "value"}, honoured, warn_unknown=False)
        assert found == {field: {keys[0]: "value"} if keys else "value"}
        assert ignored == ()


def test_a_synonym_and_its_field_may_agree() -> None:
    assert given({"max_new_tokens": 5, "n_predict": 5, "max_tokens": 5}) == {"max_tokens": 5}
    assert given({"guided_json": True, "structured_outputs": {"json": True}}) == {
        "structured_outputs": {"json": True}
    }
    with pytest.raises(InvalidParameter, match="max_new_tokens is 6 and max_tokens is 5") as caught:
        given({"max_tokens": 5, "max_new_tokens": 6})
    assert caught.value.param == "max_new_tokens"
    with pytest.raises(InvalidParameter, match=r"structured_outputs.regex is \"a\""):
        given({"guided_regex": "b", "structured_outputs": {"regex": "a"}})


def test_renaming_does_not_change_the_clients_body() -> None:
    body = {"structured_outputs": {"json": True}, "guided_whitespace_pattern": " "}
    assert given(body)["structured_outputs"] == {"json": True, "whitespace_pattern": " "}
    assert body["structured_outputs"] == {"json": True}


def test_an_empty_grammar_requests_none() -> None:
    body = {"grammar": "", "grammar_string": "", "guided_grammar": "", "guided_json_object": False}
    assert given(body) == {}


@each_case("name", sorted(HINTS))
def test_a_hint_is_accepted_and_listed(name: str) -> None:
    value = next(iter(HINT_VALUES.get(name, ("any",))))
    assert known_fields({name: value}, CHAT, warn_unknown=False) == ({}, (name,))
    for neutral in HINTS[name]:
        assert known_fields({name: neutral}, CHAT, warn_unknown=False) == ({}, ())


def test_a_range_of_0_tokens_asks_for_all_of_them() -> None:
    """Programs send one number under the names of two servers, to which it means all and none."""
    assert given({"repeat_last_n": 0, "repetition_penalty_range": 0}) == {}
    assert given({"repetition_penalty_range": 0}) == {}
    assert given({"repeat_last_n": 0}) == {"repeat_last_n": 0}
    both = {"repeat_last_n": 9, "repetition_penalty_range": 9, "rep_pen_range": 9}
    assert given(both) == {"repeat_last_n": 9}
    with pytest.raises(InvalidParameter, match="they mean the same"):
        given({**both, "rep_pen_range": 8})


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("prompt", {}, ", which takes contents"),
        ("messages", {"contents": []}, ", which takes contents; leave it out, or write turns"),
        ("max_tokens", {}, "; write it as an entry of generationConfig"),
        ("temprature", {}, '; did you mean "temperature"? leave it out'),
    ],
)
def test_a_set_of_fields_says_what_its_route_has_in_place_of_others(
    name: str, body: dict[str, Any], said: str
) -> None:
    fields = FieldSet(
        {"contents", "temperature"},
        input_names="contents",
        input_advice="write turns" if body else "",
        advice=lambda name, body: (
            "; write it as an entry of generationConfig" if name == "max_tokens" else None
        ),
    )
    with pytest.raises(InvalidParameter, match="is not a field of this request") as raised:
        known_fields({name: [], **body}, fields, warn_unknown=False)
    assert f"of this request{said}" in str(raised.value)


def test_no_advice_names_a_field_that_the_route_refuses() -> None:
    names = {*SYNONYMS, *OTHER_NAMES, "reasoning_effort", "response_format", "system", "logprobs"}
    for operation in OPERATIONS.values():
        fields = operation.body
        if not isinstance(fields, FieldSet):
            continue
        for name in (names | CHAT | COMPLETIONS | RESPONSES | OLLAMA_CHAT | MESSAGES) - fields:
            said = fields.advice(name, {}) or ""
            for found in re.findall(r"write it as (?:an entry of )?(\w+)", said):
                assert found in fields, f"{operation.title}: {name}{said}"


def test_no_route_is_said_to_take_an_input_that_it_refuses() -> None:
    """A route with another input says so, or nothing: names are not guessed."""
    for operation in OPERATIONS.values():
        for name in ("prompt", "messages", "tokens", "input", "query", "text"):
            if operation.body is None or name in operation.body:
                continue
            said = str(unknown_field(name, operation.body, {}))
            taken = re.search(r"which takes (\w+)(?: and (\w+))?", said)
            assert taken is None or {*filter(None, taken.groups())} <= operation.body, said
    assert "takes" not in str(unknown_field("prompt", frozenset({"contents"}), {}))
