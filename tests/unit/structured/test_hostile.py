"""Hostile grammars: each soon ends in an error with a reason, or in a working matcher.

"Soon" is a minute on any machine: without limits these would take hours. Nothing is fetched, no
recursion is unbounded, and the process survives.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, QuireError
from quire.base.grammar import MAX_CHARS, Grammar, choice, grammar, json_schema, regex
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import MatcherError
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case

SOON_S = 60.0


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """References that stand for 2 ** levels copies of a schema."""
    definitions: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        definitions[f"d{level}"] = {"type": "object", "properties": {"a": below, "b": below}}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": definitions}


BOMBS: dict[str, Grammar] = {
    "nested regex repeats": regex("((((a{1,50}){1,50}){1,50}){1,50}){1,50}"),
    "a large bound": regex("[a-z]{1,1000000}"),
    "catastrophic for others": regex("(a+)+$"),
    "many alternatives": regex("|".join(f"word{n}x" for n in range(20_000))),
    "intersections": json_schema(
        {"allOf": [{"type": "string", "pattern": f"^.*{c}.{{20}}$"} for c in "abcdefghij"]}
    ),
    "a huge pattern": json_schema({"type": "string", "pattern": "(x+x+)+y" * 500}),
    "deep": json_schema(nested(20)),
    "doubling references": json_schema(doubling(40)),
    "a schema of itself": json_schema({"$ref": "#"}),
    "endless recursion": json_schema(
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    ),
    "all of any ofs": json_schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(6)]}
                for i in range(12)
            ]
        }
    ),
    "a wide enum": json_schema({"enum": [f"value {number}" for number in range(15_000)]}),
    "many properties": json_schema(
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4_000)}}
    ),
    "exact lengths": json_schema({"type": "string", "minLength": 100_000, "maxLength": 100_000}),
    "many items": json_schema({"type": "array", "minItems": 100_000, "items": {"type": "null"}}),
    "dependencies": json_schema(
        {"type": "object", "dependencies": {f"a{n}": [f"b{n}"] for n in range(40)}}
    ),
    "left recursion": grammar("start: start start"),
    "ambiguity": grammar('start: x*\nx: "a" | x x | "a" x'),
    "repeats of repeats": grammar('start: (("a"{1,1000}){1,1000}){1,1000}'),
    "no such rule": grammar("start: nothing"),
    "deep gbnf": grammar("root ::= " + "(" * 2_000 + '"a"' + ")" * 2_000),
    "a wide choice": choice([f"answer {number} of many" for number in range(4_096)]),
    "its own compiler": json_schema({"x-guidance": {"lenient": True}, "not": {"pattern": "a"}}),
}


@each_case("name", BOMBS)
def test_an_exponential_grammar_is_rejected_or_works_soon(
    name: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    outcome: list[str] = []

    def attempt() -> None:
        try:
            matcher = compiler.matcher(BOMBS[name])
            for _ in range(20):
                matcher.forced()
                if matcher.is_complete:
                    break
                ids = [
                    id_
                    for id_ in range(tokenizer.vocab_size)
                    if int(matcher.mask()[id_ // 32]) >> (id_ % 32) & 1
                ]
                matcher.take(ids[-1:])
            outcome.append("works")
        except (QuireError, MatcherError) as error:
            outcome.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert outcome, "neither rejected nor working after a minute"
    assert len(outcome[0]) < 1_000


def test_no_reference_is_ever_fetched(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: asked.append(args))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: asked.append(args))
    with socket_server() as (port, hits):
        for url in (
            f"http://127.0.0.1:{port}/a",
            f"https://127.0.0.1:{port}/a",
            "file:///etc/passwd",
        ):
            for schema in ({"$ref": url}, {"$id": url, "$ref": "b"}, {"$schema": url, "$ref": url}):
                with pytest.raises(InvalidParameter):
                    compiler.matcher(json_schema({"properties": {"a": schema}}))
        assert not hits
    assert not asked


class socket_server:
    """A local port that records connections, opened before sockets were watched."""

    _socket = socket.socket

    def __enter__(self) -> tuple[int, list[Any]]:
        self._listening = self._socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        self._hits: list[Any] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self._listening.getsockname()[1], self._hits

    def _accept(self) -> None:
        try:
            while True:
                self._hits.append(self._listening.accept())
        except OSError:
            return

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@each_case(
    ("make", "said"),
    [
        (lambda: regex("a" * (MAX_CHARS + 1)), "at most"),
        (lambda: json_schema(nested(40)), "levels"),
        (lambda: json_schema("[" * 100_000), "not JSON"),
        (lambda: json_schema(json.dumps([1])), "an object is allowed"),
        (lambda: json_schema({"a": float("nan")}), "JSON cannot"),
        (lambda: json_schema({"a": {1, 2}}), "JSON cannot"),
        (lambda: choice([]), "0 strings"),
        (lambda: choice(["a"] * 5_000), "at most|1 to"),
        (lambda: choice(["a", ""]), "at least one character"),
        (lambda: choice("abc"), "a list"),
        (lambda: regex(""), "at least one character"),
        (lambda: regex("\ud800"), "surrogate"),
    ],
)
def test_obviously_invalid_grammars_are_rejected_before_they_are_sent(make: Any, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        make()
