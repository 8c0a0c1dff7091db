"""Tokenizer files of the older formats, written byte by byte, so that tests need no external data.

SentencePiece models (a protocol buffer), tiktoken ranks, vocab.json with merges.txt. All hold a
small vocabulary merged from a few lines, most common pair first, as such files are made.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.text.byte_alphabet import stand_ins, written
from tests.unit.text.made_tokenizers import LINES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
Piece = tuple[str, float, int]


def merged(words: Sequence[str], alphabet: Iterable[str], size: int) -> list[str]:
    """Return a vocabulary: the alphabet, then repeated merges of the most common pair."""
    tokens = list(alphabet)
    split = [list(word) for word in words]
    while len(tokens) < size:
        pairs = Counter(pair for parts in split for pair in itertools.pairwise(parts))
        fresh = [pair for pair in pairs if "".join(pair) not in tokens]
        if not fresh:
            break
        best = max(fresh, key=lambda pair: (pairs[pair], pair))
        tokens.append("".join(best))
        for parts in split:
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
    return tokens


@functools.cache
def byte_tokens() -> tuple[str, ...]:
    """Return a byte-level vocabulary in GPT-2's alphabet: 256 bytes and 60 merges of the lines."""
    words = [written(word.encode()) for line in (*LINES, "    \n\n\n aaaaaaaa") for word in [line]]
    return tuple(merged(words, stand_ins(), 316))


def write_ranks(file: Path, tokens: Sequence[str] = ()) -> Path:
    """Write a tiktoken file."""
    byte_of = {character: byte for byte, character in enumerate(stand_ins())}
    lines = [
        f"{base64.b64encode(bytes(byte_of[character] for character in token)).decode()} {rank}\n"
        for rank, token in enumerate(tokens or byte_tokens())
    ]
    file.write_text("".join(lines))
    return file


def write_vocabulary(folder: Path) -> Path:
    """Write vocab.json and merges.txt, with <|endoftext|> as the last token and two ids
    left out.
    """
    tokens = byte_tokens()
    vocabulary = {token: place for place, token in enumerate(tokens)}
    vocabulary["<|endoftext|>"] = len(tokens) + 2
    merges = []
    for token in tokens[256:]:
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        merges.append(min(known, key=lambda cut: max(map(vocabulary.__getitem__, cut))))
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def bpe_pieces(*, byte_fallback: bool = True) -> list[Piece]:
    """Return the pieces of a model like Llama 2's: bytes, words by score, letters last."""
    return list(_bpe_pieces(byte_fallback))


@functools.cache
def _bpe_pieces(byte_fallback: bool) -> tuple[Piece, ...]:
    words = ["▁" + line.replace(" ", "▁") for line in (*LINES, "the the  them   a aaaaaa")]
    letters = sorted({letter for word in words for letter in word if ord(letter) < 0x3100})
    pieces: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    if byte_fallback:
        pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    tokens = merged(words, letters, len(letters) + 60)
    known = set(letters)
    made = [token for token in tokens[len(letters) :] if known.issuperset(token)]
    pieces += [(token, -float(place), NORMAL) for place, token in enumerate(made)]
    pieces += [(token, -1000.0 - place, NORMAL) for place, token in enumerate(letters)]
    return tuple(pieces)


def model_bytes(
    pieces: Sequence[Piece],
    *,
    model: int = BPE,
    byte_fallback: bool = True,
    add_dummy_prefix: bool = True,
    remove_extra_spaces: bool = False,
    suffix_spaces: bool = False,
) -> bytes:
    """Return a SentencePiece model as its file holds it."""
    trainer = _number(3, model) + _number(35, byte_fallback) + _number(24, suffix_spaces)
    normalizer = _text(1, b"identity") + _number(3, add_dummy_prefix)
    normalizer += _number(4, remove_extra_spaces) + _number(5, True)
    written = b"".join(
        _text(1, _text(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for text, score, kind in pieces
    )
    return written + _text(2, trainer) + _text(3, normalizer)


@functools.cache
def trained_model(kind: str) -> bytes:
    """Return a model trained by the library itself on the lines, with its usual normalization."""
    import sentencepiece

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=content,
        vocab_size=400,
        model_type=kind,
        byte_fallback=True,
        hard_vocab_limit=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return content.getvalue()


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _text(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])
