"""Matchers: what each kind of grammar allows, token by token; forced tokens; completeness."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.grammar import (
    Grammar,
    choice,
    grammar,
    json_object,
    json_schema,
    regex,
    structural_tag,
)
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import Matcher, MatcherError, only_id, without
from quire.structured.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.unit.structured.conftest import DEAR, DEAR_TEXT, EOS, Accepts, allows

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<call>", "schema": {"type": "integer"}, "end": "</call>"}],
    "triggers": ["<call"],
}
KINDS: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "schema": (
        json_schema(PERSON),
        ['{"name": "Ann", "age": 3}', '{"name": "", "age": -20}'],
        ['{"name":"Ann","age":3}', '{"name": "Annabel", "age": 3}', '{"name": "Ann"}', "Ann"],
    ),
    "compact": (
        json_schema(PERSON, whitespace=""),
        ['{"name":"Ann","age":3}'],
        ['{"name": "Ann", "age": 3}'],
    ),
    "any white space": (
        json_schema(PERSON, whitespace="[ \n]{0,4}"),
        ['{\n"name": "Ann",\n"age": 3\n}', '{"name":"Ann","age":3}'],
        ['{"name":      "Ann","age":3}'],
    ),
    "distinct": (
        json_schema({"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        ["[]", '["a", "b", "ab", ""]'],
        ['["a", "a"]', '["b", "a", "b"]', '["", ""]', "[1]"],
    ),
    "object": (json_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '"a"']),
    "regex": (regex("[0-9]{3}-[a-z]+"), ["123-abc"], ["12-abc", "123-", "x123-a"]),
    "choice": (choice(["yes", "yes please", 'a "no"\n']), ["yes", 'a "no"\n'], ["yes ", "no"]),
    "lark": (
        grammar('start: "x" item ("," item)*\nitem: /[a-z]+/ | %json {"type": "boolean"}'),
        ["xabc", "xabc,true,d"],
        ["x", "abc", "x1"],
    ),
    "gbnf": (
        grammar('root ::= "(" root ")" | [0-9]+'),
        ["((12))", "7"],
        ["((12)", "()"],
    ),
    "tag": (
        structural_tag(TAG),
        ["free text", "well <call>12</call> then", "<call>1</call><call>2</call>"],
        ["<call>twelve</call>", "<call>12"],
    ),
}


@each_case("kind", KINDS)
def test_a_grammar_accepts_its_language_and_nothing_else(kind: str, accepts: Accepts) -> None:
    allowed, texts, others = KINDS[kind]
    assert [text for text in texts if not accepts(allowed, text)] == []
    assert [text for text in others if accepts(allowed, text)] == []


def test_a_mask_has_the_end_only_if_the_answer_is_complete(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(regex("ab[0-9]*"))
    assert not allows(matcher, EOS)
    matcher.take(tokenizer.encode("ab", add_special_tokens=False))
    assert allows(matcher, EOS)
    assert not matcher.is_complete
    assert not allows(matcher, 0)
    assert not without(matcher.mask(), [EOS])[0] & 2


def test_a_complete_answer_needs_no_end_token(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(choice(["yes", "no"]))
    assert not matcher.is_complete
    matcher.take(tokenizer.encode("no", add_special_tokens=False))
    assert matcher.is_complete


def test_a_forbidden_token_fails_that_matcher_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    one, other = compiler.matcher(regex("[0-9]+")), compiler.matcher(regex("[0-9]+"))
    with pytest.raises(MatcherError, match="does not allow"):
        one.take(tokenizer.encode("x", add_special_tokens=False))
    with pytest.raises(MatcherError, match="matcher failed"):
        one.mask()
    other.take(tokenizer.encode("7", add_special_tokens=False))
    assert allows(other, EOS)


def test_a_matcher_rolls_back_and_a_copy_is_independent(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher(json_schema(PERSON))
    first = matcher.mask().copy()
    matcher.take(tokenizer.encode('{"name": "', add_special_tokens=False)[:3])
    twin, behind = matcher.copy(), matcher.mask().copy()
    matcher.go_back(3)
    assert (matcher.mask() == first).all()
    assert (twin.mask() == behind).all()


def test_a_long_replay_on_a_fresh_grammar_renews_the_lexer_budget(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
    token_ids = tokenizer.encode(DEAR_TEXT, add_special_tokens=False)
    matcher = compiler.matcher(DEAR)
    matcher.replay(token_ids)
    assert matcher.is_complete
    compiler.matcher(DEAR).replay(token_ids)  # the shared lexer is intact


def test_a_replay_makes_one_array_for_all_its_masks(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher, made = compiler.matcher(regex("[a-z ]{1,200}")), list[int]()
    for name in ("zeros", "empty"):
        make = getattr(np, name)
        monkeypatch.setattr(
            np, name, lambda size, *kind, make=make: made.append(size) or make(size, *kind)
        )
    matcher.replay(tokenizer.encode("once upon a time " * 8, add_special_tokens=False))
    assert len(made) == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(sorted(KINDS)))
def test_forced_tokens_are_those_that_masks_leave_one_by_one(
    seed: int, kind: str, compiler: GrammarCompiler
) -> None:
    draw = np.random.default_rng(seed)
    jumps, steps = (compiler.matcher(KINDS[kind][0]) for _ in range(2))
    for _ in range(40):
        forced = jumps.forced()
        for token_id in forced:
            assert only_id(steps.mask()) == token_id
            steps.take([token_id])
        if jumps.is_complete:
            assert steps.is_complete
            return
        assert (jumps.mask() == steps.mask()).all()
        token_id = int(draw.choice(ids_of(jumps)))
        if token_id == EOS:
            return
        for matcher in (jumps, steps):
            matcher.take([token_id])


def test_most_of_an_object_is_forced(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    forced = compiler.matcher(json_schema(PERSON)).forced()
    assert tokenizer.decode(forced) == '{"name": "'
    assert len(compiler.matcher(json_schema(PERSON)).forced(most=2)) == 2


def test_a_model_without_an_end_token_can_complete_an_answer(vocabulary: Vocabulary) -> None:
    endless = Vocabulary(
        token_bytes=vocabulary.token_bytes,
        special_ids=vocabulary.special_ids,
        eos_ids=(),
        encode=vocabulary.encode,
    )
    matcher = GrammarCompiler(lambda: endless, now_ms=lambda: 0.0).matcher(regex("ab?"))
    matcher.take(vocabulary.encode("a"))
    assert not matcher.is_complete
    assert ids_of(matcher) == vocabulary.encode("b")
    matcher.take(vocabulary.encode("b"))
    assert matcher.is_complete


def test_a_special_token_is_named_and_is_no_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, accepts: Accepts
) -> None:
    matcher = compiler.matcher(grammar('start: "a" <|user|> "b"'))
    matcher.take(tokenizer.encode("a", add_special_tokens=False))
    assert ids_of(matcher) == [tokenizer.token_id("<|user|>")]
    assert not set(ids_of(compiler.matcher(regex("(?s:.*)")))) & (tokenizer.special_ids - {EOS})


def ids_of(matcher: Matcher) -> list[int]:
    """Return the ids a matcher's mask allows."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return [int(id_) for id_ in bits.nonzero()[0]]
