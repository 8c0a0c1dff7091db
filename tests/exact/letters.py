"""The tokens of the exact tests' models: their bytes, grammars over them, and texts of ids.

The tiny models have no tokenizer. Knows no engine. Always holds: ids 0 and 1 have no text.
"""

from __future__ import annotations

from typing import Any, cast

from quire.engine.stop_texts import StopTexts
from quire.structured.compiler import GrammarCompiler
from quire.structured.vocabulary import Vocabulary
from quire.text.detokenizer import JoinRules
from tests.exact.workload import VOCAB_SIZE


def _token_bytes() -> list[bytes]:
    """Return the bytes of each token id: nothing for 0 and 1, then printable ASCII, then longer
    pieces, so that most texts have several tokenizations.
    """
    letters = [bytes([code]) for code in range(32, 127)]
    pairs = [one + other for one in letters[65:85] for other in letters[65:91]]
    pieces = [b'{"', b'"}', b'": ', b', "', b"true", b"false", b"null", *pairs]
    return ([b"", b"<end>", *letters, *pieces] + [b""] * VOCAB_SIZE)[:VOCAB_SIZE]


def _encode(text: str) -> list[int]:
    """Encode greedily, longest token first: the tiny models have no tokenizer."""
    raw, ids, place = text.encode(), [], 0
    while place < len(raw):
        pieces = (raw[place : place + length] for length in TOKEN_LENGTHS)
        token = next(piece for piece in pieces if piece in TOKEN_IDS)
        ids.append(TOKEN_IDS[token])
        place += len(token)
    return ids


TOKEN_BYTES = _token_bytes()
TOKEN_IDS = {token: id_ for id_, token in enumerate(TOKEN_BYTES) if id_ > 1 and token}
TOKEN_LENGTHS = sorted({len(token) for token in TOKEN_IDS}, reverse=True)
GRAMMARS = GrammarCompiler(
    lambda: Vocabulary(
        token_bytes=TOKEN_BYTES, special_ids=frozenset({0, 1}), eos_ids=(1,), encode=_encode
    ),
    now_ms=lambda: 0.0,
    # Smaller than the number of grammars of a case: a preempted request mostly finds its grammar
    # evicted and recompiles it, so its tokens are replayed on a fresh lexer.
    max_kept=2,
)


class Letters:
    """The part of a tokenizer that converts ids to text."""

    pieces: Any  # this object
    rules = JoinRules(byte_level=True)
    special_ids = frozenset({0, 1})

    def __init__(self) -> None:
        self.pieces = self

    def piece(self, token_id: int) -> str | bytes:
        return TOKEN_BYTES[token_id].decode() or b""

    first_piece = piece


TEXTS = StopTexts(lambda: cast(Any, Letters()))
