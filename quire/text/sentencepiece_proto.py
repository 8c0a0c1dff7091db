"""Read a SentencePiece model file: its pieces, and how text is normalized.

Parses the few relevant fields of the protocol buffer without any package, and validates them. Does
not encode. Source of the field numbers: sentencepiece_model.proto of google/sentencepiece; of the
wire format: protobuf's encoding page.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from quire.base.errors import TokenizerError

_MAX_PIECE_BYTES = 65_536
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# Fields of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_MODEL_TYPE, _SUFFIX_SPACES, _BYTE_FALLBACK = 3, 24, 35
_BOS_PIECE, _EOS_PIECE, _PAD_PIECE = 46, 47, 48
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5


class PieceKind(IntEnum):
    """The kind of a piece, with the file's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelKind(IntEnum):
    """How a text is split into pieces, with the file's numbers."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieces:
    """A model. The index of a piece in the three parallel tuples is its id.

    add_dummy_prefix: a text gets a leading space. has_charsmap: characters are normalized. named:
    the special tokens that the pieces have, by role.
    """

    texts: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: tuple[PieceKind, ...]
    model: ModelKind
    byte_fallback: bool
    has_charsmap: bool
    add_dummy_prefix: bool
    remove_extra_spaces: bool
    escape_spaces: bool
    suffix_spaces: bool
    named: dict[str, str]

    @property
    def unknown(self) -> str:
        """Return the piece for unknown text."""
        return self.texts[self.kinds.index(PieceKind.UNKNOWN)]


def read_pieces(file: Path, content: bytes) -> SentencePieces:
    """Parse the model in `content`. Raises TokenizerError with `file` and the offending byte."""
    try:
        return _model(content)
    except _Broken as error:
        raise TokenizerError(
            f"{file}: not a valid SentencePiece model ({error}); copy it again"
        ) from None


class _Broken(Exception):
    """The bytes violate the format."""


def _model(content: bytes) -> SentencePieces:
    texts: list[str] = []
    scores: list[float] = []
    kinds: list[PieceKind] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for field, value, at in _fields(content):
        if field == _PIECES and isinstance(value, bytes):
            text, score, kind = _piece(value, at)
            texts.append(text)
            scores.append(score)
            kinds.append(kind)
        elif field == _TRAINER and isinstance(value, bytes):
            trainer.update((field, value) for field, value, _ in _fields(value, at))
        elif field == _NORMALIZER and isinstance(value, bytes):
            normalizer.update((field, value) for field, value, _ in _fields(value, at))
    _check(texts, kinds)
    if not trainer:
        raise _Broken(f"after {len(texts)} pieces it ends without a model type")
    model = trainer.get(_MODEL_TYPE, ModelKind.UNIGRAM)
    if model not in tuple(ModelKind):
        raise _Broken(f"its model type is {model!r}; {', '.join(map(str, ModelKind))} are known")
    named = {}
    for role, field, usual in (
        ("bos_token", _BOS_PIECE, b"<s>"),
        ("eos_token", _EOS_PIECE, b"</s>"),
        ("pad_token", _PAD_PIECE, b"<pad>"),
    ):
        raw = trainer.get(field, usual)
        text = raw.decode(errors="replace") if isinstance(raw, bytes) else ""
        if text in texts and kinds[texts.index(text)] is PieceKind.CONTROL:
            named[role] = text
    named["unk_token"] = texts[kinds.index(PieceKind.UNKNOWN)]
    return SentencePieces(
        texts=tuple(texts),
        scores=tuple(scores),
        kinds=tuple(kinds),
        model=ModelKind(model),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, False)),
        has_charsmap=bool(normalizer.get(_CHARSMAP, b"")),
        add_dummy_prefix=bool(normalizer.get(_DUMMY_PREFIX, True)),
        remove_extra_spaces=bool(normalizer.get(_EXTRA_SPACES, True)),
        escape_spaces=bool(normalizer.get(_ESCAPE_SPACES, True)),
        suffix_spaces=bool(trainer.get(_SUFFIX_SPACES, False)),
        named=named,
    )


def _check(texts: list[str], kinds: list[PieceKind]) -> None:
    if kinds.count(PieceKind.UNKNOWN) != 1:
        raise _Broken(
            f"{len(texts)} pieces with {kinds.count(PieceKind.UNKNOWN)} unknown pieces; exactly "
            "one is needed"
        )
    if len(set(texts)) != len(texts):
        seen: set[str] = set()
        for id_, text in enumerate(texts):
            if text in seen:
                raise _Broken(f"the piece {id_}, {text!r}, occurs twice")
            seen.add(text)
    for id_, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind is PieceKind.BYTE and not _BYTE_PIECE.fullmatch(text):
            raise _Broken(f"the byte piece {id_}, {text!r}, is not of the form <0x41>")


def _piece(content: bytes, at: int) -> tuple[str, float, PieceKind]:
    text, score, kind = b"", 0.0, PieceKind.NORMAL
    for field, value, place in _fields(content, at):
        if field == _PIECE_TEXT and isinstance(value, bytes):
            text = value
        elif field == _PIECE_SCORE and isinstance(value, bytes) and len(value) == 4:
            score = struct.unpack("<f", value)[0]
        elif field == _PIECE_KIND and isinstance(value, int):
            if value not in tuple(PieceKind):
                raise _Broken(f"a piece at byte {place} is of kind {value}; 1 to 6 are known")
            kind = PieceKind(value)
    if not text or len(text) > _MAX_PIECE_BYTES:
        raise _Broken(f"the piece at byte {at} has {len(text)} bytes of text")
    try:
        return text.decode(), score, kind
    except UnicodeDecodeError:
        raise _Broken(f"the piece at byte {at}, {text!r}, is not UTF-8") from None


def _fields(content: bytes, start: int = 0) -> Iterator[tuple[int, int | bytes, int]]:
    """Yield field numbers, values, and the byte of the file where each field begins.

    Numbers are ints; texts, messages and fixed-width values are bytes.
    """
    at, size = 0, len(content)
    while at < size:
        begin = at
        tag, at = _varint(content, at, start)
        wire, value = tag & 7, 0
        if wire == _VARINT:
            value, at = _varint(content, at, start)
            yield tag >> 3, value, start + begin
            continue
        if wire == _BYTES:
            length, at = _varint(content, at, start)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if wire == _EIGHT_BYTES else 4
        else:
            raise _Broken(f"byte {start + begin} begins a field of the unknown wire type {wire}")
        if at + length > size:
            raise _Broken(
                f"the field at byte {start + begin} has {length} bytes, {size - at} are left"
            )
        yield tag >> 3, content[at : at + length], start + at
        at += length


def _varint(content: bytes, at: int, start: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(content) and shift < 64:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _Broken(f"a number ends in the middle at byte {start + at}")
