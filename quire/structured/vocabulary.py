"""Vocabulary: a model's tokens as grammars see them, bytes by id; and llguidance's view of them.

Knows no model and no tokenizer's files: who has them hands in bytes and a way to encode. Always
holds: llguidance is imported only when the first grammar comes, because start-up is felt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import llguidance


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """token_bytes: by id, as the token stands inside a text; special ones by their names.

    special_ids: have no text; a grammar may name them, as <|name|>. eos_ids: may end an answer,
    where a grammar lets it; there may be none. encode: ids of a text inside a text, without opening
    or closing tokens.
    """

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """32-bit words of a mask over all ids."""
        return -(-len(self.token_bytes) // 32)


class LoadedVocabulary:
    """A vocabulary that llguidance has made its own."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self.num_ids = len(vocabulary.token_bytes)
        self.num_words = vocabulary.num_words
        self.eos_ids = vocabulary.eos_ids
        self.special_names = frozenset(
            vocabulary.token_bytes[id_].decode(errors="replace") for id_ in vocabulary.special_ids
        )
        # llguidance wants an end token: for a model without one an id that no row has.
        self._stands_for_end = () if vocabulary.eos_ids else (self.num_ids,)
        tokens = [*vocabulary.token_bytes, *(b"<|quire:end|>" for _ in self._stands_for_end)]
        eos_ids = [*vocabulary.eos_ids, *self._stands_for_end]
        self.tokenizer: llguidance.LLTokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Encoder(vocabulary, tokens, eos_ids[0])),
            eos_token=eos_ids,
            slices=llguidance.LLTokenizer.json_slices(),
        )
        # A mask as llguidance writes it.
        self.mask_words = -(-len(tokens) // 32)


class _Encoder:
    """What llguidance asks of a tokenizer: the bytes of tokens, and ids of bytes."""

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_ids})
        if not vocabulary.eos_ids:
            self.special_token_ids.append(eos_id)
        self.eos_token_id = eos_id
        self.bos_token_id: int | None = None
        self._encode = vocabulary.encode
        self._longest = max(map(len, tokens))
        self._ids: dict[bytes, int] | None = None

    def __call__(self, text: Any) -> list[int]:
        """Ids whose bytes are those of the text: the tokenizer's own, or else the longest tokens
        that fit (a tokenizer may set a space before a text, or normalise it)."""
        raw = text if isinstance(text, bytes) else text.encode()
        try:
            ids = self._encode(raw.decode())
        except (UnicodeDecodeError, ValueError):
            ids = []
        if b"".join(self.tokens[id_] for id_ in ids) == raw:
            return ids
        return self._longest_first(raw)

    def _longest_first(self, raw: bytes) -> list[int]:
        if self._ids is None:
            special = set(self.special_token_ids)
            self._ids = {}
            for id_, token in enumerate(self.tokens):
                if token and id_ not in special:
                    self._ids.setdefault(token, id_)
        ids, place = [], 0
        while place < len(raw):
            for length in range(min(self._longest, len(raw) - place), 0, -1):
                found = self._ids.get(raw[place : place + length])
                if found is not None:
                    ids.append(found)
                    place += length
                    break
            else:
                return ids  # no token has this byte
        return ids
