"""The features of a request by which a classifier judges it, as numbers of buckets.

Words and pairs of words of the newest user message, hashed, and facts of the request: its length,
its turns, whether JSON is asked for, and the like. Knows no weights. Always holds: equal requests
have equal features in every process and release of one VERSION; there are at most MAX_WORDS of
words, however long the prompt is; no text can be read back from them, though a guess can be tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

# Of what the numbers mean: another one has other weights.
VERSION = 1
NUM_BUCKETS = 1 << 16
MAX_WORDS = 1024
# Of the beginning and of the end of the message.
_MAX_CHARS = 1024
# A run of letters and digits, a character of a script without spaces, or a mark.
_WORD = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af]|[^\W\u2e80-\u9fff\uac00-\ud7af]+|[^\w\s]")
_DIGIT = re.compile(r"\d")


class Features(NamedTuple):
    """Buckets in increasing order."""

    words: list[int]
    facts: list[int]


def features_of(text: str, prompt_tokens: int, fields: Mapping[str, Any]) -> Features:
    """Return the features of a request. text: its newest user message."""
    if len(text) > 2 * _MAX_CHARS:
        shown = f"{text[:_MAX_CHARS]} \n {text[-_MAX_CHARS:]}"
    else:
        shown = text
    words = _WORD.findall(shown.lower())
    named = set(words)
    named.update(f"{one} {other}" for one, other in pairwise(words))
    if words:
        named |= {f"< {words[0]}", f"> {words[-1]}", f"> {' '.join(words[-2:])}"}
    buckets = sorted({_bucket("word", one) for one in named})
    # Where there are too many, those that are kept are the same in each process.
    facts = {_bucket("fact", one) for one in _facts(shown, prompt_tokens, fields)}
    return Features(buckets[:MAX_WORDS], sorted(facts))


def _facts(text: str, prompt_tokens: int, fields: Mapping[str, Any]) -> Iterator[str]:
    yield f"tokens {prompt_tokens.bit_length()}"
    turns = fields.get("messages", fields.get("input"))
    yield f"turns {len(turns).bit_length() if isinstance(turns, list) else 0}"
    limit = next((fields[one] for one in _LIMITS if type(fields.get(one)) is int), 0)
    yield f"limit {max(limit, 0).bit_length()}"
    yield f"lines {text.count(chr(10)).bit_length()}"
    yield f"digits {len(_DIGIT.findall(text)).bit_length()}"
    if "```" in text:
        yield "code"
    if any(fields.get(one) for one in _FORMS):
        yield "form"
    if fields.get("tools"):
        yield "tools"


_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_FORMS = ("response_format", "structured_outputs", "format", "text")


def _bucket(kind: str, name: str) -> int:
    return crc32(f"{kind} {name}".encode("utf-8", "surrogatepass")) % NUM_BUCKETS
