"""From a request's words to token ids: what may not be written, and what breaks a repeat.

Made where the tokenizer is, when a request is made; the engine knows ids only. Holds no state.

bad_words become sequences as the tokenizer writes them: at the beginning of a text, behind a space
and behind a line break; of sequences that end alike, the shortest. vLLM has the first two, and the
second only where it is as long as the first. Other ways to cut the same letters into tokens are not
banned.
dry_sequence_breakers are tokens as in text-generation-webui: the last token of the letter "a"
with the breaker after it. llama.cpp instead takes every token with the breaker in its text.
"""

from __future__ import annotations

from typing import Protocol

from quire.base.errors import InvalidParameter
from quire.base.records import NO_RULES, TokenRules
from quire.base.sampling_params import SamplingParams
from quire.base.show import show

Sequences = tuple[tuple[int, ...], ...]


class Encoder(Protocol):
    """What makes ids of a text; quire.text.tokenizer.Tokenizer does."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def token_rules(
    sampling: SamplingParams, encoder: Encoder | None, banned_sequences: Sequences = ()
) -> TokenRules:
    """Return the rules of a request; banned_sequences are those of its model.

    Raises InvalidParameter where words are given and there is no encoder, or where a word has no
    tokens.
    """
    if not (sampling.bad_words or sampling.dry_multiplier):
        return TokenRules(banned_sequences=banned_sequences) if banned_sequences else NO_RULES
    words = [ids for word in sampling.bad_words for ids in _sequences(word, encoder)]
    breakers = sampling.dry_sequence_breakers if sampling.dry_multiplier else ()
    breaker_ids = [_breaker_id(text, encoder) for text in breakers]
    return TokenRules(
        banned_sequences=tuple(dict.fromkeys((*banned_sequences, *words))),
        breaker_ids=tuple(dict.fromkeys(breaker_ids)),
    )


def _sequences(word: str, encoder: Encoder | None) -> list[tuple[int, ...]]:
    bare = word.lstrip()
    spellings = [_encoded("bad_words", bare, encoder), _encoded("bad_words", " " + bare, encoder)]
    if encoder is not None:  # some tokenizers set a space before a text's first word, but not here
        line_break, both = (
            encoder.encode(t, add_special_tokens=False) for t in ("\n", "\n" + bare)
        )
        if both[: len(line_break)] == line_break:
            spellings.append(tuple(both[len(line_break) :]))
    sequences: list[tuple[int, ...]] = []
    for ids in sorted(spellings, key=len):
        if ids and not any(ids[-len(known) :] == known for known in sequences):
            sequences.append(ids)
    return sequences


def _breaker_id(text: str, encoder: Encoder | None) -> int:
    return _encoded("dry_sequence_breakers", "a" + text, encoder)[-1]


def _encoded(param: str, text: str, encoder: Encoder | None) -> tuple[int, ...]:
    if encoder is None:
        raise InvalidParameter(
            f"{param} are words, and there is no tokenizer here to make tokens of them; leave "
            "them out (dry_sequence_breakers: give an empty list)",
            param=param,
        )
    ids = tuple(encoder.encode(text, add_special_tokens=False))
    if not ids:
        raise InvalidParameter(
            f"{param}: the model's tokenizer makes no tokens of {show(text)}; leave it out",
            param=param,
        )
    return ids
