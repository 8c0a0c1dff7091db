"""Convert text to token ids and back, with the tokenizer files of a model (sources.py).

The `tokenizers` library does the merging; this module decides which special tokens surround a text
(tokenizer_config.json overrides the post-processor), which ids are special, and how ids become text
(detokenizer.py, the same whole or streamed). It never truncates, pads or applies dropout. Of the
model it knows only the number of ids. Fields of tokenizer_config.json for other classes are
ignored, among them clean_up_tokenization_spaces: streamed text cannot be cleaned up afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.added_tokens import named_tokens, settle_added
from quire.text.decoder_chain import compile_decoder
from quire.text.detokenizer import Detokenizer, PieceTable
from quire.text.sources import read_source
from quire.text.surroundings import check_rows, surroundings, tokens_past_model
from quire.text.token_bound import max_bytes_per_token
from quire.text.tokenizer_json import is_library_error, library_errors_become

# Shorter texts take less than a millisecond, less than the overhead of the library's batch call.
_SHORT_CHARS = 2048


class Tokenizer:
    """The tokenizer of one model. Immutable after `load` and thread-safe.

    vocab_size: number of ids, of the model if given (its table is often padded beyond the
    tokenizer; such ids have no text). special_tokens: by role, as chat templates expect them
    (bos_token, eos_token, ...). bos_id and eos_id are None if there is none. without_row: tokens
    beyond vocab_size, by id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any],
        vocab_size: int = 0,
        prefix: str = "",
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Set up a backend. prefix: put before a text that opens with no added token.

        encode: replaces the backend's encoder.
        """
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # used in training: ids would be random
        settle_added(backend, config)
        self.special_tokens = named_tokens(config)
        added = backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.without_row = tokens_past_model(vocabulary, added, vocab_size)
        self.vocab_size = vocab_size or 1 + max(vocabulary.values(), default=-1)
        self.special_ids = frozenset(
            id_ for id_, token in added.items() if token.special and id_ < self.vocab_size
        )
        self.bos_id = self._id_of_named("bos_token", backend)
        self.eos_id = self._id_of_named("eos_token", backend)
        self._backend = backend
        self._encode = encode
        self._prefix = prefix
        openings = (token.content for token in added.values() if not token.normalized)
        self._openings = tuple(openings) if prefix else ()
        self._before, self._after = surroundings(
            backend, config, bos_id=self.bos_id, eos_id=self.eos_id
        )
        check_rows((*self._before, *self._after), self.without_row, self.vocab_size)
        decoder = backend.decoder
        self.pieces = PieceTable(
            backend.id_to_token,
            num_ids=self.vocab_size,
            chain=compile_decoder(None if decoder is None else decoder.__getstate__()),
        )
        self._max_token_bytes = max_bytes_per_token(backend, vocabulary.keys())

    @classmethod
    def load(cls, path: Path, *, vocab_size: int = 0) -> Tokenizer:
        """Read the tokenizer of a model directory (see sources.py for the files and their order).

        vocab_size: the model's number of ids, often padded beyond the tokenizer's. Raises
        TokenizerError if files are missing, broken, or contradict each other or the model.
        """
        source = read_source(path)
        with library_errors_become(
            lambda why: TokenizerError(f"{source.file}: cannot be used ({why})")
        ):
            try:
                return cls(
                    source.backend,
                    config=source.config,
                    vocab_size=vocab_size,
                    prefix=source.prefix,
                    encode=source.encode,
                )
            except TokenizerError as error:
                raise TokenizerError(f"{source.file}: {error}") from error

    def min_num_tokens(self, text: str) -> int:
        """Return the fewest tokens `text` can have; 0 where its length says nothing."""
        if self._max_token_bytes is None:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._max_token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with the model's opening and closing tokens by default.

        Special tokens written out in the text become their ids. A long text is encoded without the
        interpreter lock, which only the library's batch calls release. Raises InvalidParameter for
        text that is not valid Unicode, or that the tokenizer fails on.
        """
        _check_unicode(text)
        if text and self._prefix and not text.startswith(self._openings):
            text = self._prefix + text
        ids: list[int]
        try:
            if self._encode is not None:
                ids = self._encode(text)
            elif len(text) <= _SHORT_CHARS:
                ids = self._backend.encode(text, add_special_tokens=False).ids
            else:
                ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            if is_library_error(error):
                raise _unencodable(error) from error
            raise
        if self.without_row:
            self._check_rows(ids)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Raises InvalidParameter for an id out of range."""
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token within a text; U+FFFD replaces parts of characters."""
        piece = self.pieces.piece(token_id)
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token within a text; they may be part of a character."""
        piece = self.pieces.piece(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary, or None."""
        id_: int | None = self._backend.token_to_id(token)
        return id_

    def vocabulary(self) -> dict[int, str]:
        """Return the tokens as they are written in the vocabulary, by id."""
        written = self._backend.get_vocab(with_added_tokens=True)
        return {id_: token for token, id_ in written.items() if id_ < self.vocab_size}

    def _id_of_named(self, name: str, backend: tokenizers.Tokenizer) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else backend.token_to_id(token)

    def _check_rows(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ in self.without_row:
                raise InvalidParameter(
                    f"the text spells the token {self.without_row[id_]!r} of id {id_}, and the "
                    f"model has ids up to {self.vocab_size - 1} only; take it out of the text",
                    param="prompt",
                )


def _unencodable(why: BaseException) -> InvalidParameter:
    return InvalidParameter(
        f"the model's tokenizer fails on this text ({str(why)[:200]}); send another", param="prompt"
    )


def _check_unicode(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidParameter(
            f"text is of type {type(text).__name__}; a string is allowed", param="prompt"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"text has the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; send valid Unicode",
            param="prompt",
        ) from None
