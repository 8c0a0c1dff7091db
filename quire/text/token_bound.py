"""Compute the largest number of bytes that one token may stand for.

With this bound a text that cannot fit a context is rejected by its length, before tokenization.
There is no bound (None) where a step may drop text (fused unknown words, removed spaces, removing
normalizers); unknown steps count as such. Always holds: a text of B bytes has at least B / bound
tokens.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Set
from typing import Any

import tokenizers

from quire.text.byte_alphabet import stand_ins

# Compatibility composition turns at most four bytes into one (a mathematical letter into ASCII).
_UNICODE_FORMS = {"NFC": 4, "NFKC": 4, "NFD": 4, "NFKD": 4}
_KEEPING_SPLITS = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
_NUM_BYTES = 256


def max_bytes_per_token(backend: tokenizers.Tokenizer, vocabulary: Set[str]) -> int | None:
    """Return the bound in bytes of UTF-8, or None. vocabulary: with the added tokens."""
    shrinks = [_shrink(part) for part in _parts(backend.normalizer, "normalizers")]
    splits = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    factors = [factor for factor in shrinks if factor is not None]
    if len(factors) < len(shrinks) or not all(map(_keeps_text, splits)):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    is_byte_level = any(part.get("type") == "ByteLevel" for part in splits)
    if not _has_all_bytes(backend.model, vocabulary, is_byte_level=is_byte_level):
        return None
    # Text may match an added token after it was normalized, and so may have been taken apart.
    apart = [unicodedata.normalize("NFKD", token.content) for token in added]
    longest = max(map(len, map(str.encode, (*vocabulary, *apart))))
    return longest * math.prod(factors)


def _parts(step: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the parts of a step as in tokenizer.json: none, one, or a sequence."""
    if step is None:
        return []
    waiting, parts = [json.loads(step.__getstate__())], []
    while waiting:
        part = waiting.pop()
        if part.get("type") == "Sequence":
            waiting += part.get(name) or ()
        else:
            parts.append(part)
    return parts


def _shrink(part: Mapping[str, Any]) -> int | None:
    """Return the factor by which a normalizer may shorten text; None: without bound."""
    kind = part.get("type")
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind == "Replace":
        pattern = (part.get("pattern") or {}).get("String")
        content = part.get("content")
        if isinstance(pattern, str) and isinstance(content, str) and content:
            return max(1, -(-len(pattern.encode()) // len(content.encode())))
        return None
    return _UNICODE_FORMS.get(str(kind))


def _keeps_text(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Split":
        return part.get("behavior") in _KEEPING_SPLITS
    if kind == "Metaspace":
        return len(str(part.get("replacement", ""))) == 1
    return kind in ("ByteLevel", "Digits")


def _has_all_bytes(
    model: tokenizers.models.Model, vocabulary: Set[str], *, is_byte_level: bool
) -> bool:
    """Return whether the model has a token for each byte, so that no text is dropped."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if is_byte_level:
        return all(character in vocabulary for character in stand_ins())
    bytes_known = all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
    return bool(model.byte_fallback) and bytes_known
