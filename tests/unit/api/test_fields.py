"""The table of fields: honoured, accepted because they cannot matter, refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.api.fields import (
    CHAT,
    COMPLETIONS,
    LABELS,
    NO_EFFECT,
    UNSERVED,
    ignored_header,
    known_fields,
)
from quire.base.errors import InvalidParameter
from tests.unit.api.fake_engine import Site


def given(body: dict[str, Any]) -> dict[str, Any]:
    return known_fields(body, CHAT, warn_unknown=False)[0]


def test_no_field_is_in_two_places() -> None:
    for honoured in (COMPLETIONS, CHAT):
        assert not honoured & NO_EFFECT
        assert not honoured & UNSERVED.keys()
    assert not NO_EFFECT & UNSERVED.keys()


@pytest.mark.parametrize("name", sorted(CHAT | COMPLETIONS | NO_EFFECT | UNSERVED.keys()))
def test_null_means_not_given_for_every_known_field(name: str) -> None:
    found, ignored = known_fields({name: None}, CHAT | COMPLETIONS, warn_unknown=False)
    assert (found, ignored) == ({}, ())


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_fields_that_cannot_change_the_answer_are_accepted_at_any_value(name: str) -> None:
    assert given({name: LABELS[name]({"any": ["thing"]})}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value) for name, rule in sorted(UNSERVED.items()) for value in rule.allowed
    ],
)  # fmt: skip
def test_the_default_of_a_field_we_do_not_serve_is_accepted(name: str, value: Any) -> None:
    assert given({name: value}) == {}


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_any_other_value_is_refused_naming_the_field_and_why(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        given({name: "something else"})
    assert caught.value.param == name
    assert name in str(caught.value)
    assert UNSERVED[name].why in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("store", 0), ("top_a", False), ("functions", " ")])
def test_a_value_that_only_looks_like_the_default_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter):
        given({name: value})


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidParameter, match='did you mean "temperature"') as caught:
        given({"temprature": 1})
    assert caught.value.param == "temprature"


def test_a_field_of_the_other_route_is_unknown_here() -> None:
    with pytest.raises(InvalidParameter):
        given({"prompt": "text"})


def test_a_huge_name_is_cut_in_the_error() -> None:
    with pytest.raises(InvalidParameter) as caught:
        given({"x" * 1_000_000: 1})
    assert len(str(caught.value)) < 400


def test_told_to_warn_unknown_fields_are_left_out_and_named() -> None:
    found, ignored = known_fields({"seed": 1, "frobnicate": 2}, CHAT, warn_unknown=True)
    assert (found, ignored) == ({"seed": 1}, ("frobnicate",))


def test_warning_does_not_loosen_fields_that_are_known_and_not_served() -> None:
    with pytest.raises(InvalidParameter):
        known_fields({"functions": [{"name": "f"}]}, CHAT, warn_unknown=True)


def test_a_header_of_odd_names_is_printable_ascii_and_bounded() -> None:
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
    ],
)
def test_a_label_of_another_type_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        given({name: value})
    assert caught.value.param == name
    assert given({name: None}) == {}
