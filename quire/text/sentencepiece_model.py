"""Load SentencePiece model files: convert them if that is exact, else use the library.

A BPE model without normalization becomes a `tokenizers` object: its merges follow from its scores,
and no other package is needed. That covers Llama 2, Mistral and Gemma. The other kinds cannot be
converted exactly (Unigram sums 32-bit scores over whole texts and breaks ties its own way; the
library's character maps work on other units than `tokenizers`'), so the `sentencepiece` package
encodes, and a `tokenizers` object holds the ids and finds special tokens.

Special tokens written out in a text are found in both, as with a tokenizer.json. A model's leading
space precedes a text that does not open with a special token; with `legacy` in
tokenizer_config.json it also follows each special token (the two behaviours of transformers).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from quire.base.errors import TokenizerError
from quire.text.added_tokens import put_listed
from quire.text.merges import merges_of
from quire.text.sentencepiece_proto import ModelKind, PieceKind, SentencePieces

Encode = Callable[[str], list[int]]
_MARK = "▁"
# A second normalizer_spec in a message is merged over the first: here add_dummy_prefix.
_PREFIX_ON, _PREFIX_OFF = b"\x1a\x02\x18\x01", b"\x1a\x02\x18\x00"


def converted(
    pieces: SentencePieces, config: Mapping[str, Any], file: Path
) -> tokenizers.Tokenizer:
    """Return the model as a `tokenizers` object. Requires that `why_not_converted` is None."""
    vocabulary = {text: id_ for id_, text in enumerate(pieces.texts)}
    normal = {
        text: -score
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
        if kind is PieceKind.NORMAL
    }
    # With equal scores the leftmost merges first and grows to its end, so the longest precedes.
    by_score = sorted(normal, key=lambda text: (normal[text], -len(text)))
    places = {text: place for place, text in enumerate(by_score)}
    merges = merges_of(by_score, places)
    put_listed(vocabulary, config, file)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=pieces.unknown,
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
        )
    )
    escape = normalizers.Replace(" ", _MARK)
    prefixed = adds_prefix(pieces, config) and _is_legacy(config)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_MARK), escape]) if prefixed else escape
    )
    _finish(backend, pieces, config)
    # Matched in the normalized text, with its symbols for spaces.
    backend.add_tokens(
        [
            tokenizers.AddedToken(text, normalized=True)
            for text in _of_kind(pieces, PieceKind.USER_DEFINED)
        ]
    )
    return backend


def why_not_converted(pieces: SentencePieces, config: Mapping[str, Any]) -> str | None:
    """Return what `tokenizers` cannot reproduce exactly; None if nothing."""
    if pieces.model is not ModelKind.BPE:
        return f"is of the kind {pieces.model.name.capitalize()}"
    if pieces.has_charsmap or pieces.remove_extra_spaces:
        return "normalizes its text"
    if pieces.suffix_spaces or not pieces.escape_spaces:
        return "represents spaces in an unsupported way"
    if PieceKind.UNUSED in pieces.kinds:
        return "has pieces marked as unused"
    if (
        PieceKind.USER_DEFINED in pieces.kinds
        and adds_prefix(pieces, config)
        and _is_legacy(config)
    ):
        return "has user-defined pieces together with spaces after special tokens (legacy)"
    listed = zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
    if not ties_are_harmless({text: at for text, at, kind in listed if kind is PieceKind.NORMAL}):
        return "has pieces of equal score"
    known = set(_of_kind(pieces, PieceKind.NORMAL))
    if not known.issuperset(character for text in known for character in text):
        return "has pieces with characters that are not pieces"
    bytes_known = all(f"<0x{byte:02X}>" in pieces.texts for byte in range(256))
    if pieces.byte_fallback and not bytes_known:
        return "falls back to bytes that are not pieces"
    return None


def ties_are_harmless(scores: Mapping[str, float]) -> bool:
    """Return whether only runs of one character have equal scores, merged after everything else.

    scores: of the normal pieces. Llama 2 has such ties: its runs of spaces.
    """
    texts_of: dict[float, list[str]] = {}
    for text, score in scores.items():
        if len(text) > 1:
            texts_of.setdefault(score, []).append(text)
    if not all(map(math.isfinite, texts_of)):
        return False
    last = min(texts_of, default=0.0)
    tied = [score for score, texts in texts_of.items() if len(texts) > 1]
    return all(
        score == last and all(len(set(text)) == 1 for text in texts_of[score]) for score in tied
    )


def encoded_by_library(
    pieces: SentencePieces, config: Mapping[str, Any], file: Path, content: bytes
) -> tuple[tokenizers.Tokenizer, Encode]:
    """Return a table of the pieces, and an encoder. Raises TokenizerError without the package."""
    try:
        import sentencepiece
    except ImportError:
        raise TokenizerError(
            f"{file}: this SentencePiece model {why_not_converted(pieces, config)}, which only the "
            "sentencepiece package reads exactly; install it: "
            "pip install 'quire-llm[sentencepiece]'"
        ) from None
    vocabulary = {text: id_ for id_, text in enumerate(pieces.texts)}
    put_listed(vocabulary, config, file)
    table = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=pieces.unknown))
    _finish(table, pieces, config)
    prefix = adds_prefix(pieces, config)
    try:
        first = sentencepiece.SentencePieceProcessor(
            model_proto=content + (_PREFIX_ON if prefix else _PREFIX_OFF)
        )
        later = first
        if prefix and not _is_legacy(config):
            later = sentencepiece.SentencePieceProcessor(model_proto=content + _PREFIX_OFF)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TokenizerError(
            f"{file}: the sentencepiece package cannot read it ({error}); copy it again"
        ) from error

    return table, _LibraryEncoder(table, first, later)


class _LibraryEncoder:
    """Find special tokens with the table, and encode the text between them with the library."""

    def __init__(self, table: tokenizers.Tokenizer, first: Any, later: Any) -> None:
        self._table, self._first, self._later = table, first, later

    @functools.cached_property
    def _contents(self) -> dict[int, str]:
        """Return the text of all added tokens, some of which are added after construction."""
        added = self._table.get_added_tokens_decoder()
        return {id_: token.content for id_, token in added.items()}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        found = self._table.encode(text, add_special_tokens=False)
        processor = self._first
        for id_, (start, end) in zip(found.ids, found.offsets, strict=True):
            part = text[start:end]
            content = self._contents.get(id_)
            if content is not None and content in part:  # otherwise it is text, an unknown word
                ids.append(id_)
            else:
                ids += processor.encode(part)
            processor = self._later
        return ids


def adds_prefix(pieces: SentencePieces, config: Mapping[str, Any]) -> bool:
    """Return whether a text gets a leading space; tokenizer_config.json overrides the model."""
    wanted = config.get("add_prefix_space")
    return wanted if isinstance(wanted, bool) else pieces.add_dummy_prefix


def prefix_once(pieces: SentencePieces, config: Mapping[str, Any]) -> str:
    """Return the prefix of a text that opens with no special token, for a converted model."""
    return " " if adds_prefix(pieces, config) and not _is_legacy(config) else ""


def _is_legacy(config: Mapping[str, Any]) -> bool:
    return config.get("legacy") is True


def _of_kind(pieces: SentencePieces, kind: PieceKind) -> list[str]:
    return [text for text, of in zip(pieces.texts, pieces.kinds, strict=True) if of is kind]


def _finish(
    backend: tokenizers.Tokenizer, pieces: SentencePieces, config: Mapping[str, Any]
) -> None:
    """Set the decoder and the special tokens."""
    steps = [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix(pieces, config):
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    special = [*_of_kind(pieces, PieceKind.CONTROL), pieces.unknown]
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special]
    )
