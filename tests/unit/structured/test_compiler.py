"""The compiler: threads beside the caller, grammars kept by digest, limits, and who waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, WorkerError
from quire.base.grammar import Grammar, choice, json_schema, regex
from quire.structured import source as written
from quire.structured.compiler import GrammarCompiler
from quire.structured.vocabulary import Vocabulary

BAD = json_schema({"uniqueItems": True}, param="response_format")


def wait_for(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Until it has settled; a minute at most."""
    for _ in range(6000):
        if compiler.is_settled(grammar):
            return
        time.sleep(0.01)
    raise AssertionError("the grammar was not settled within a minute")


def test_nobody_waits_and_each_grammar_is_compiled_once(vocabulary: Vocabulary) -> None:
    told = threading.Event()
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, on_settled=told.set)
    grammar = regex("[0-9]+")
    for _ in range(3):
        compiler.want(grammar)
    wait_for(compiler, grammar)
    assert told.wait(60)
    assert compiler.is_ready(grammar)
    assert compiler.error(grammar) is None
    compiler.matcher(grammar)
    compiler.want(regex("[0-9]+", param="another field"))
    assert compiler.num_compiled == 1
    compiler.close()


def test_a_grammar_that_fails_is_remembered_and_names_each_callers_own_field(
    vocabulary: Vocabulary,
) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
    compiler.want(BAD)
    wait_for(compiler, BAD)
    assert not compiler.is_ready(BAD)
    error = compiler.error(BAD)
    assert isinstance(error, InvalidParameter)
    assert error.param == "response_format"
    other = compiler.error(json_schema({"uniqueItems": True}))
    assert isinstance(other, InvalidParameter)
    assert other.param == "structured_outputs"
    assert str(other).startswith("structured_outputs: ")
    with pytest.raises(InvalidParameter):
        compiler.matcher(BAD)


def test_what_is_kept_is_bounded_and_the_oldest_goes(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, max_kept=3)
    grammars = [choice([f"answer {number}"]) for number in range(5)]
    for grammar in grammars:
        compiler.matcher(grammar)
    assert compiler.num_compiled == 5
    compiler.matcher(grammars[-1])
    compiler.matcher(grammars[2])
    assert compiler.num_compiled == 5
    compiler.matcher(grammars[0])
    assert compiler.num_compiled == 6


def test_a_compilation_that_takes_too_long_is_given_up(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms, goes_on = [0.0], threading.Event()
    slow = regex("slow")
    plain = written.llguidance_grammar

    def source(grammar: Grammar, names: frozenset[str]) -> str:
        if grammar is slow:
            goes_on.wait(60)
        return plain(grammar, names)

    monkeypatch.setattr(written, "llguidance_grammar", source)
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: now_ms[0], max_compile_ms=500)
    compiler.want(slow)
    other = regex("other")
    wait_for(compiler, other)  # the other thread goes on
    assert not compiler.is_settled(slow)
    now_ms[0] = 501.0
    assert compiler.is_settled(slow)
    assert "not compiled within 0.5 s" in str(compiler.error(slow))
    goes_on.set()
    time.sleep(0.05)
    assert not compiler.is_ready(slow)  # too late is too late


def test_whatever_a_library_raises_fails_one_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> str:
        raise ZeroDivisionError("within")

    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
    compiler.matcher(regex("a"))
    monkeypatch.setattr(written, "llguidance_grammar", breaks)
    with pytest.raises(WorkerError, match="ZeroDivisionError: within"):
        compiler.matcher(regex("b"))
    compiler.matcher(regex("a"))


def test_equal_languages_have_one_digest_and_others_differ() -> None:
    schema = {"type": "integer"}
    grammars = [
        json_schema(schema),
        json_schema(schema, whitespace=""),
        json_schema(schema, whitespace=" "),
        regex("a"),
        choice(["a"]),
        json_schema({"const": "a"}),
    ]
    assert len({grammar.digest for grammar in grammars}) == len(grammars)
    assert json_schema(schema, param="x").digest == json_schema(schema).digest
