"""PieceTable: the piece of text, or bytes, that each token id stands for.

decoder_chain.py compiles a tokenizer's decoder; detokenizer.py joins the pieces. Joined by the
rules of the chain, pieces equal what the `tokenizers` library decodes; tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.base.errors import InvalidParameter
from quire.text.decoder_chain import Piece, compile_decoder


class PieceTable:
    """Pieces by id. num_ids: the largest id plus one.

    An id without a token has the piece b"" and no effect on its neighbours. The constructor raises
    TokenizerError for an unsupported decoder.
    """

    def __init__(
        self, token_of_id: Callable[[int], str | None], *, num_ids: int, decoder_json: bytes | None
    ) -> None:
        chain = compile_decoder(decoder_json)
        self.rules = chain.rules
        self.num_ids = num_ids
        self._token_of_id = token_of_id
        self._chain = chain
        self._later: dict[int, Piece] = {}

    def piece(self, token_id: int) -> Piece:
        """Return the piece of a token that is not first. Raises InvalidParameter out of range."""
        piece = self._later.get(token_id)
        if piece is None:
            piece = self._later[int(token_id)] = self._made(token_id, self._chain.later)
        return piece

    def first_piece(self, token_id: int) -> Piece:
        """Return the piece of a token that opens the text."""
        return self._made(token_id, self._chain.first)

    def _made(self, token_id: int, piece_of: Callable[[str], Piece]) -> Piece:
        if not 0 <= token_id < self.num_ids:
            raise InvalidParameter(
                f"token id {token_id} is out of range; ids from 0 to {self.num_ids - 1} exist",
                param="token_ids",
            )
        token = self._token_of_id(int(token_id))
        return b"" if token is None else piece_of(token)
