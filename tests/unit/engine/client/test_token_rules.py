"""Words become token sequences in the process with the tokenizer; impossible rules are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quire.base.errors import InvalidParameter
from quire.base.records import NO_RULES, TokenRules
from quire.base.sampling_params import SamplingParams
from quire.engine.client.request_builder import make_requests
from quire.engine.client.token_rules import token_rules
from quire.text.tokenizer import Tokenizer
from tests.unit.engine.client.test_request_builder import CARD


class Words:
    """A tokenizer of words: a space belongs to the word after it; "" has no tokens."""

    KNOWN = ("no", " no", "never", " never", "mind", " mind", "a", "\n", ":", "way", "-", " away")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        ids = []
        while text:
            piece = max((p for p in self.KNOWN if text.startswith(p)), key=len, default=text[0])
            ids.append(self.KNOWN.index(piece) if piece in self.KNOWN else 20)
            text = text[len(piece) :]
        return [id_ for id_ in ids if id_ != 10]


def test_a_word_is_banned_without_and_with_a_space_before_it() -> None:
    rules = token_rules(SamplingParams(bad_words=("no", " never mind")), Words())
    assert rules == TokenRules(banned_sequences=((0,), (1,), (2, 5), (3, 5)))


def test_a_space_with_its_own_token_makes_no_second_sequence() -> None:
    rules = token_rules(SamplingParams(bad_words=("way",)), Words())
    assert rules.banned_sequences == ((9,),)


def test_a_word_of_any_token_count_is_banned_after_a_space() -> None:
    rules = token_rules(SamplingParams(bad_words=("away",)), Words())
    assert rules.banned_sequences == ((11,), (6, 9))


class Opening(Words):
    """A tokenizer that adds a space before a text's first word, like SentencePiece."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        before = "" if text.startswith("\n") else " "
        return super().encode(before + text, add_special_tokens=add_special_tokens)


def test_a_word_is_banned_without_a_space_though_texts_begin_with_one() -> None:
    rules = token_rules(SamplingParams(bad_words=("no", "away")), Opening())
    assert rules.banned_sequences == ((1,), (0,), (11,), (6, 9))


def test_words_of_a_real_tokenizer_are_banned_in_running_text(model: Path) -> None:
    tokenizer = Tokenizer.load(model)
    for word in ("the", "their", "of", "東京", "naïve"):
        sequences = token_rules(SamplingParams(bad_words=(word,)), tokenizer).banned_sequences
        for text in (word, f"a {word}", f"a\n{word}", f"({word}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            assert any(ids[-len(banned) :] == banned for banned in sequences), (word, text)


def test_breakers_are_the_last_tokens_after_a_letter_and_only_used_by_dry() -> None:
    params = SamplingParams(dry_sequence_breakers=("\n", ":", "\n\n"), dry_multiplier=0.8)
    assert token_rules(params, Words()) == TokenRules(breaker_ids=(7, 8))
    assert token_rules(replace(params, dry_multiplier=0.0), None) is NO_RULES


def test_a_models_own_sequences_come_first_and_need_no_tokenizer() -> None:
    assert token_rules(SamplingParams(), None, ((4,),)).banned_sequences == ((4,),)
    rules = token_rules(SamplingParams(bad_words=("no",)), Words(), ((4,), (1,)))
    assert rules.banned_sequences == ((4,), (1,), (0,))


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(bad_words=("no",)), "bad_words"),
        (SamplingParams(dry_multiplier=1.0), "dry_sequence_breakers"),
    ],
)
def test_words_without_a_tokenizer_are_rejected(params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidParameter, match="there is no tokenizer") as caught:
        token_rules(params, None)
    assert caught.value.param == param


def test_a_word_without_tokens_is_rejected() -> None:
    with pytest.raises(InvalidParameter, match='no tokens of "-"'):
        token_rules(SamplingParams(bad_words=("-",)), Words())


def _made(sampling: SamplingParams, *, banned: tuple[tuple[int, ...], ...] = ()) -> TokenRules:
    card = replace(CARD, banned_sequences=banned)
    (request,) = make_requests(card, [1], sampling, request_id="r", arrival_ms=0.0, encoder=Words())
    return request.rules


def test_a_request_carries_its_own_and_the_models_rules() -> None:
    assert _made(SamplingParams()) is NO_RULES
    assert _made(SamplingParams(bad_words=("no",)), banned=((3,),)) == TokenRules(
        banned_sequences=((3,), (0,), (1,))
    )


def test_allowed_ids_that_are_all_banned_or_unknown_are_rejected() -> None:
    with pytest.raises(InvalidParameter, match="holds 2 ids, all banned") as caught:
        _made(SamplingParams(allowed_token_ids=(0, 1), bad_words=("no",)))
    assert caught.value.param == "allowed_token_ids"
    eos = CARD.eos_ids[0]
    with pytest.raises(InvalidParameter, match="all banned"):
        _made(SamplingParams(allowed_token_ids=(eos,), min_tokens=1))
    with pytest.raises(InvalidParameter, match="all banned"):
        _made(SamplingParams(allowed_token_ids=(4,)), banned=((4,),))
    _made(SamplingParams(allowed_token_ids=(eos,)))
    _made(SamplingParams(allowed_token_ids=(4,)), banned=((5, 4),))
    with pytest.raises(InvalidParameter, match=f"ids 0 to {CARD.vocab_size - 1}"):
        _made(SamplingParams(allowed_token_ids=(CARD.vocab_size,)))
