"""Vocabulary: a model's tokens as bytes by id, and llguidance's representation of them.

Knows no model and no tokenizer files: the caller passes bytes and an encoder. llguidance is
imported with the first grammar only, to keep start-up fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quire.base.errors import InvalidParameter
from quire.structured.token_index import TokenIndex

if TYPE_CHECKING:
    import llguidance

_BYTES_END = b"<|end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a model.

    token_bytes: by id, as the token appears within a text; special tokens by their names.
    special_ids: tokens without text; a grammar may name them, as <|name|>. eos_ids: tokens that may
    end an answer where the grammar allows it; may be empty. encode: returns the ids of a text
    within a text, without opening or closing tokens.
    """

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words of a mask over all ids."""
        return -(-len(self.token_bytes) // 32)


class LoadedVocabulary:
    """A vocabulary loaded into llguidance."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._vocabulary = vocabulary
        self.num_ids = len(vocabulary.token_bytes)
        self.num_words = vocabulary.num_words
        self.eos_ids = vocabulary.eos_ids
        self.special_names = frozenset(
            vocabulary.token_bytes[id_].decode(errors="replace") for id_ in vocabulary.special_ids
        )
        # llguidance requires an end token; a model without one gets an id beyond the vocabulary.
        self._end_placeholder = () if vocabulary.eos_ids else (self.num_ids,)
        tokens = [*vocabulary.token_bytes, *(b"<|quire:end|>" for _ in self._end_placeholder)]
        eos_ids = [*vocabulary.eos_ids, *self._end_placeholder]
        self._encoder = _Encoder(vocabulary, tokens, eos_ids[0])
        self.tokenizer: llguidance.LLTokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self._encoder),
            eos_token=eos_ids,
            slices=llguidance.LLTokenizer.json_slices(),
        )
        # Length of a mask in llguidance.
        self.mask_words = -(-len(tokens) // 32)
        self._index: TokenIndex | None = None

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Return ids with exactly this text, which may be a special token's name."""
        ids = tuple(self._encoder(text))
        if b"".join(self._vocabulary.token_bytes[id_] for id_ in ids) != text.encode():
            raise InvalidParameter(f"no tokens of the model's vocabulary write {text!r}")
        return ids

    def texts(self, *, shown: Collection[str]) -> list[bytes]:
        """Return the text of each token in an answer: of special ones, only of those shown."""
        tokens, names = self._vocabulary, {name.encode() for name in shown}
        hidden = [id_ for id_ in tokens.special_ids if tokens.token_bytes[id_] not in names]
        texts = list(tokens.token_bytes)
        for id_ in hidden:
            texts[id_] = b""
        return texts

    def index(self) -> TokenIndex:
        """Return the tokens by their role in JSON. Two threads may build it at once."""
        if self._index is None:
            tokens = self._vocabulary
            textless = {*tokens.special_ids, *tokens.eos_ids}
            self._index = TokenIndex(tokens.token_bytes, textless)
        return self._index


@lru_cache(maxsize=2)
def byte_vocabulary(special_names: tuple[str, ...] = ()) -> LoadedVocabulary:
    """Return a vocabulary of single bytes, by value, and after them these special tokens."""
    plain = [bytes([byte]) for byte in range(256)]
    special = [*(name.encode() for name in special_names), _BYTES_END]
    return LoadedVocabulary(
        Vocabulary(
            token_bytes=[*plain, *special],
            special_ids=frozenset(range(256, 256 + len(special))),
            eos_ids=(256 + len(special_names),),
            encode=lambda text: list(text.encode()),
        )
    )


class _Encoder:
    """Implement llguidance's tokenizer interface: the bytes of tokens, and the ids of bytes."""

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
        """Return ids with exactly the bytes of the text.

        They are the tokenizer's own, or else the longest tokens that match: a tokenizer may insert
        a space before a text, or normalize it.
        """
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
