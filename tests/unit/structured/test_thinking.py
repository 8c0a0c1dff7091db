"""Budgets of reasoning: which tokens may follow, token by token; marks in several tokens; channels.

The tokens are single bytes, and some marks that are special tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, grammar_of
from quire.output_parsers import harmony
from quire.output_parsers.answer_parser import parse_answer
from quire.output_parsers.harmony import CHANNEL, END, MESSAGE, START
from quire.output_parsers.parsed_answer import ParsedAnswer
from quire.output_parsers.reasoning import THINK
from quire.output_parsers.selection import ParserSelection
from quire.structured import thinking
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import DeadEnd, Matcher, only_id
from quire.structured.vocabulary import Vocabulary
from tests.cases import each_case

NAMES = ("<eos>", "<think>", "</think>", *harmony.MARKS)
IDS = {name: 256 + at for at, name in enumerate(NAMES)}
NUM_IDS = 256 + len(NAMES)
EOS = IDS["<eos>"]
CLOSE = IDS["</think>"]
OPEN = {"opens": "<think>", "closes": "</think>", "is_open": True}
LETTERS = {"opens": "[", "closes": "]/!", "is_open": True}  # a mark of three tokens


def encode(text: str) -> list[int]:
    """Return ids: marks whole, all else byte by byte."""
    ids: list[int] = []
    while text:
        name = next((name for name in NAMES if text.startswith(name)), "")
        ids += [IDS[name]] if name else text[0].encode()
        text = text[len(name) or 1 :]
    return ids


@pytest.fixture(scope="module")
def compiler() -> Any:
    made = GrammarCompiler(
        lambda: Vocabulary(
            token_bytes=[*(bytes([byte]) for byte in range(256)), *map(str.encode, NAMES)],
            special_ids=frozenset(IDS.values()),
            eos_ids=(EOS,),
            encode=encode,
        ),
        now_ms=lambda: 0.0,
    )
    yield made
    made.close()


def budget(max_tokens: int, marks: dict[str, Any], **form: Any) -> Grammar:
    return grammar_of({"thinking": {"max_tokens": max_tokens, **marks}, **form})


def allowed(matcher: Matcher) -> set[int]:
    mask = matcher.mask()
    return {id_ for id_ in range(NUM_IDS) if int(mask[id_ // 32]) >> (id_ % 32) & 1}


def forced_after(matcher: Matcher, ids: Sequence[int]) -> list[int | None]:
    """Return the only token that may follow each prefix, None where several may."""
    found = [only_id(matcher.mask())]
    for id_ in ids:
        assert id_ in allowed(matcher)
        matcher.take([id_])
        found.append(only_id(matcher.mask()))
    return found


def test_all_tokens_are_allowed_until_the_budget_is_spent(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(budget(4, OPEN))
    assert allowed(matcher) == set(range(NUM_IDS))  # the end of the answer too
    assert forced_after(matcher, encode("abc")) == [None, None, None, CLOSE]
    assert set(forced_after(matcher, encode("</think>and any <think> more"))[1:]) == {None}
    assert not matcher.is_complete
    assert not matcher.ends_with(EOS)


def test_reasoning_that_ends_by_itself_frees_the_answer(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(budget(6, OPEN))
    assert set(forced_after(matcher, encode("a</think>a long answer"))) == {None}


def test_a_mark_of_several_tokens_is_forced_in_time(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(budget(7, LETTERS))
    forced = forced_after(matcher, encode("abcd]/!x"))
    assert forced == [None, None, None, None, *b"]/!", None, None]
    begun = compiler.matcher(budget(7, LETTERS))  # its first token was written before
    assert forced_after(begun, encode("abc]"))[3:] == [None, ord("/")]
    free = compiler.matcher(budget(8, LETTERS))
    assert set(forced_after(free, encode("ab]x"))) == {None}
    almost = compiler.matcher(budget(5, LETTERS))
    assert forced_after(almost, encode("ab]/!z")) == [None, None, *b"]/!", None, None]
    half = compiler.matcher(budget(6, LETTERS))
    assert forced_after(half, encode("ab]/!z"))[3:] == [*b"/!", None, None]


def test_reasoning_that_the_prompt_did_not_open_begins_with_its_mark(
    compiler: GrammarCompiler,
) -> None:
    closed = {**OPEN, "is_open": False}
    matcher = compiler.matcher(budget(3, closed))
    assert forced_after(matcher, encode("\n <think>ab"))[-1] == CLOSE
    spelled = {"opens": "[thought]", "closes": "]/!", "is_open": False}
    matcher = compiler.matcher(budget(5, spelled))
    assert forced_after(matcher, encode("[thought]ab"))[-3:] == [None, None, ord("]")]
    for text in ("no reasoning <think> at all", "[though", "[though]"):
        matcher = compiler.matcher(budget(3, spelled))
        assert set(forced_after(matcher, encode(text + "x" * 9))) == {None}


def test_the_budget_limits_the_reasoning_before_a_grammar(compiler: GrammarCompiler) -> None:
    lark = f'start: thinking <[{CLOSE}]> "yes"\nthinking: /(.|\\n)*/'
    matcher = compiler.matcher(budget(5, OPEN, grammar=lark))
    assert forced_after(matcher, encode("abcd"))[-1] == CLOSE
    matcher.take([CLOSE])
    assert matcher.forced() == [*b"yes"]
    assert matcher.is_complete


def test_a_grammar_that_forbids_the_end_of_the_reasoning_is_named_as_the_cause(
    compiler: GrammarCompiler,
) -> None:
    matcher = compiler.matcher(budget(3, OPEN, regex="a{9}"))
    matcher.take(encode("aa"))
    with pytest.raises(DeadEnd, match=r"budget of reasoning is spent.*forbids </think>"):
        matcher.mask()


def test_forced_tokens_are_taken_together(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(budget(4, LETTERS))
    assert matcher.forced() == []
    matcher.take(encode("a"))
    assert matcher.forced() == [*b"]/!"]
    assert matcher.forced() == []
    assert allowed(matcher) == set(range(NUM_IDS))


@pytest.mark.parametrize("marks", [OPEN, LETTERS, {"opens": "", "closes": ""}])
def test_replayed_copied_and_rolled_back_matchers_agree(
    compiler: GrammarCompiler, marks: dict[str, Any]
) -> None:
    rng, matcher = random.Random(1), compiler.matcher(budget(6, marks))
    pieces = [*b"ab[]/!", *IDS.values()]
    taken: list[int] = []
    for _ in range(400):
        if taken and rng.random() < 0.3:
            back = rng.randint(1, min(4, len(taken)))
            matcher.go_back(back)
            del taken[-back:]
        choices = sorted(allowed(matcher) & set(pieces)) or sorted(allowed(matcher))
        taken.append(rng.choice(choices))
        matcher.take(taken[-1:])
        fresh = compiler.matcher(budget(6, marks))
        fresh.replay(taken)
        assert allowed(fresh) == allowed(matcher) == allowed(matcher.copy())


def parsed(ids: Sequence[int], reading: ParserSelection, prompt: str = "") -> ParsedAnswer:
    names = {id_: name for name, id_ in IDS.items()}
    text = "".join(names.get(id_) or chr(id_) for id_ in ids)
    return parse_answer(text, reading, None, prompt)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 30])
def test_drawn_answers_reason_within_the_budget(compiler: GrammarCompiler, max_tokens: int) -> None:
    reading = ParserSelection(THINK, None)
    for seed in range(60):
        rng, is_open = random.Random(seed), seed % 2 == 0
        matcher = compiler.matcher(budget(max_tokens, {**OPEN, "is_open": is_open}))
        ids: list[int] = [] if is_open else [IDS["<think>"]]
        matcher.take(ids)
        for _ in range(40):
            choices = sorted(allowed(matcher) & {*b"ab \n<think/>", CLOSE}) or [CLOSE]
            ids.append(rng.choice(choices))
            matcher.take(ids[-1:])
        answer = parsed(ids, reading, "<think>" if is_open else "")
        inside = ids if is_open else ids[1:]
        if CLOSE in inside:
            assert inside.index(CLOSE) < max_tokens
        assert answer.content


def test_channels_share_one_budget(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(budget(4, {"opens": "", "closes": ""}))
    ids = encode(f"{CHANNEL}analysis{MESSAGE}ab")
    assert set(forced_after(matcher, ids)) == {None}
    matcher.take(encode("c"))
    assert only_id(matcher.mask()) == IDS[END]
    matcher.take([IDS[END]])
    forced_after(matcher, encode(f"{START}assistant{CHANNEL}"))
    assert allowed(matcher) == {*b"fc"}  # final or commentary: no more analysis
    forced_after(matcher, encode(f"final{MESSAGE}any analysis of it"))
    assert allowed(matcher) == set(range(NUM_IDS))


def test_calls_in_a_channel_are_no_reasoning(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(budget(3, {"opens": "", "closes": ""}))
    header = f"{CHANNEL}analysis to=functions.f{MESSAGE}"
    assert set(forced_after(matcher, encode(f'{header}{{"a": 1, "b": 2}}'))) == {None}
    plain = compiler.matcher(budget(3, {"opens": "", "closes": ""}))
    assert set(forced_after(plain, encode("an answer without any channel"))) == {None}


@pytest.mark.parametrize(
    ("max_tokens", "marks", "words"),
    [
        (0, OPEN, "is 0; the mark </think> that ends the reasoning counts too, and is 1 token"),
        (-7, {"opens": "", "closes": ""}, "is -7; its end counts too"),
        (2, LETTERS, "is 2; the mark ]/! that ends the reasoning counts too, and is 3 tokens: "),
    ],
)
def test_a_budget_smaller_than_its_mark_is_refused(
    compiler: GrammarCompiler, max_tokens: int, marks: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParameter, match="give at least") as refused:
        compiler.matcher(budget(max_tokens, marks))
    assert words in str(refused.value)
    compiler.matcher(budget(3, marks))


@each_case(
    "wrong",
    [
        *(5, [], {}, {**OPEN, "max_tokens": True}),
        {**OPEN, "max_tokens": 4.0},
        {**OPEN, "max_tokens": 2**31},
        {"max_tokens": 4, "opens": "<think>", "closes": ""},
        {"max_tokens": 4, "opens": "a" * 65, "closes": "b"},
        {"max_tokens": 4, "opens": "\ud800", "closes": "b"},
        {**OPEN, "max_tokens": 4, "is_open": 1},
        {**OPEN, "max_tokens": 4, "more": 1},
    ],
)
def test_a_malformed_budget_is_refused_with_its_form(wrong: Any) -> None:
    with pytest.raises(InvalidParameter, match="an object such as"):
        grammar_of({"thinking": wrong})


def test_marks_of_channels_are_those_of_their_parser() -> None:
    assert (thinking.CHANNEL, thinking.MESSAGE, thinking.END) == (CHANNEL, MESSAGE, END)
    assert {CHANNEL, MESSAGE, *thinking.BODY_ENDS} == {*harmony.MARKS} - {harmony.CONSTRAIN}
