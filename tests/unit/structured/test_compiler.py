"""The compiler: background threads, grammars cached by digest, limits, and waiting."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import pytest

from quire.base.errors import InvalidParameter, WorkerError
from quire.base.grammar import MAX_CHOICES, Grammar, choice, json_schema, regex
from quire.structured import source as written
from quire.structured.compiler import GrammarCompiler, compiled
from quire.structured.matcher import MatcherError
from quire.structured.vocabulary import LoadedVocabulary, Vocabulary
from quire.text.tokenizer import Tokenizer
from tests.unit.structured.conftest import DEAR, DEAR_TEXT

BAD = json_schema({"uniqueItems": True}, param="response_format")


def wait_for(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Wait until it has settled; a minute at most."""
    for _ in range(6000):
        if compiler.is_settled(grammar):
            return
        time.sleep(0.01)
    raise AssertionError("the grammar was not settled within a minute")


def test_submission_does_not_block_and_each_grammar_is_compiled_once(
    vocabulary: Vocabulary,
) -> None:
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


def test_a_failed_grammar_is_remembered_and_names_each_requests_own_field(
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


def test_the_cache_is_bounded_and_evicts_the_oldest(vocabulary: Vocabulary) -> None:
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


def test_grammars_of_live_requests_are_evicted_last(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, max_kept=3)
    grammars = [choice([f"answer {number}"]) for number in range(5)]
    for grammar in grammars:
        for _ in range(2):  # two requests
            compiler.pin(grammar)
        wait_for(compiler, grammar)
    for grammar in grammars:
        compiler.matcher(grammar)
        compiler.unpin(grammar)
    for grammar in grammars:
        compiler.matcher(grammar)
    assert compiler.num_compiled == 5
    for grammar in grammars:
        compiler.unpin(grammar)
    compiler.matcher(grammars[0])
    assert compiler.num_compiled == 6
    compiler.close()


def test_pinned_grammars_stay_within_the_bound_in_bytes(vocabulary: Vocabulary) -> None:
    large = [regex("a" * 1000 + str(number)) for number in range(4)]  # about 274 KiB each
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, max_kept_bytes=600 << 10)
    for grammar in large:
        compiler.pin(grammar)
        wait_for(compiler, grammar)
    compiler.matcher(large[3])
    compiler.matcher(large[2])
    assert compiler.num_compiled == 4
    compiler.matcher(large[0])
    assert compiler.num_compiled == 5
    compiler.close()


def test_a_failed_lexer_is_dropped_and_replaced(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
    token_ids = tokenizer.encode(DEAR_TEXT, add_special_tokens=False)
    failed, sharing = compiler.matcher(DEAR), compiler.matcher(DEAR)
    with pytest.raises(MatcherError):  # without masks the budget of a step runs out
        failed.take(token_ids)
    with pytest.raises(MatcherError):
        sharing.replay(token_ids[:1])
    alone = compiler.replacement(DEAR, sharing)
    alone.replay(token_ids)
    compiler.matcher(DEAR).replay(token_ids)
    assert compiler.num_compiled == 2  # the replacement is not counted: it is not kept


def test_the_cache_is_bounded_in_bytes_and_a_failed_grammar_weighs_its_text(
    vocabulary: Vocabulary,
) -> None:
    large = [regex("a" * 1000 + str(number)) for number in range(4)]  # some 274 KiB each, by rule
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0, max_kept_bytes=600 << 10)
    for grammar in large[:3]:
        compiler.matcher(grammar)
    compiler.matcher(large[2])
    compiler.matcher(large[1])
    assert compiler.num_compiled == 3
    compiler.matcher(large[0])  # the first was evicted for the third
    assert compiler.num_compiled == 4
    failing = [regex("(" + "b" * 1000 + str(number)) for number in range(3)]
    for grammar in failing:
        with pytest.raises(InvalidParameter):
            compiler.matcher(grammar)
    assert all(compiler.error(grammar) is not None for grammar in failing)
    compiler.matcher(regex("c" * 4_000))  # larger than the whole cache: kept alone
    assert compiler.error(failing[2]) is None
    assert compiler.num_compiled == 5
    compiler.matcher(regex("c" * 4_000))
    assert compiler.num_compiled == 5


@pytest.mark.parametrize(
    "grammar",
    [
        choice([f"answer {number} of many" for number in range(MAX_CHOICES)]),
        json_schema(
            {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(1_500)}}
        ),
    ],
    ids=["choice", "schema"],
)
def test_the_promised_number_of_choices_and_properties_works(
    vocabulary: Vocabulary, grammar: Grammar
) -> None:
    matcher = compiled(grammar, LoadedVocabulary(vocabulary))
    assert matcher.mask().any()


def test_more_optional_properties_are_rejected_with_advice_and_required_ones_are_not(
    vocabulary: Vocabulary,
) -> None:
    loaded = LoadedVocabulary(vocabulary)
    names = [f"property_{number}" for number in range(2_000)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    with pytest.raises(InvalidParameter, match=r"1,600 optional properties; make them required"):
        compiled(json_schema(schema), loaded)
    compiled(json_schema({**schema, "required": names}), loaded)


def test_a_slow_compilation_is_given_up(
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
    wait_for(compiler, other)  # the other thread continues
    assert not compiler.is_settled(slow)
    now_ms[0] = 501.0
    assert compiler.is_settled(slow)
    assert "not compiled within 0.5 s" in str(compiler.error(slow))
    goes_on.set()
    time.sleep(0.05)
    assert not compiler.is_ready(slow)  # too late


def test_any_library_exception_fails_one_grammar(
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


def test_a_digest_is_made_once_however_often_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    blake2b = hashlib.blake2b
    monkeypatch.setattr(
        hashlib, "blake2b", lambda *text, **size: made.append(text) or blake2b(*text, **size)
    )
    one, again = (regex(pattern) for pattern in ("a read-once pattern", "a read-once pattern"))
    assert {one.digest, one.digest, again.digest} == {one.digest}
    assert len(made) == 1


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
