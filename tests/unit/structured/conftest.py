"""A compiler over the tokens of the built-in model, and helpers that query its grammars."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.base.grammar import Grammar, json_schema
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import Matcher, MatcherError
from quire.structured.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer

BOX = Path(quire.__file__).parent / "models" / "box"
EOS = 1
# Each word of an answer makes the lexer build states: the whole text exceeds the budget of one
# step.
DEAR = json_schema({"type": "string", "maxLength": 500, "pattern": r"^(?:\S+\s+){0,49}\S+$"})
DEAR_TEXT = json.dumps(" ".join(f"word{number}" for number in range(49)))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BOX)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(
        token_bytes=[tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=(EOS,),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


@pytest.fixture(scope="session")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 1000 * time.monotonic())
    yield made
    made.close()


Accepts = Callable[[Grammar, str], bool]


@pytest.fixture(scope="session")
def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Accepts:
    """Return whether a text may be the whole answer.

    Each token must be in the mask before it, and the end token in the mask after the last, or
    nothing else may follow.
    """

    def accepts(grammar: Grammar, text: str) -> bool:
        matcher = compiler.matcher(grammar)
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            try:
                if not allows(matcher, token_id):
                    # forced text has its own tokens; another tokenization is not allowed
                    return _accepts_bytes(compiler.matcher(grammar), tokenizer, text)
                matcher.take([token_id])
            except MatcherError:
                return False
        return matcher.is_complete or allows(matcher, EOS)

    return accepts


@pytest.fixture(scope="session")
def consumes(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Accepts:
    """Return whether a text may be the whole answer, without computing the masks before it.

    This is the result of `accepts`: a text outside the masks is judged by its bytes as well.
    """
    return lambda grammar, text: _accepts_bytes(compiler.matcher(grammar), tokenizer, text)


def _accepts_bytes(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Return whether all tokens are accepted, without looking at masks."""
    try:
        matcher.take(tokenizer.encode(text, add_special_tokens=False))
        return matcher.is_complete or allows(matcher, EOS)
    except MatcherError:
        return False


def allows(matcher: Matcher, token_id: int) -> bool:
    """Return whether a matcher's mask has a token."""
    return bool(int(matcher.mask()[token_id // 32]) >> (token_id % 32) & 1)


def json_text(value: Any) -> str:
    """Return JSON in the form of answers."""
    return json.dumps(value, ensure_ascii=False)
