"""Text to token ids and back, from a model folder's tokenizer.json.

The `tokenizers` library does the merging; this file decides what is put around it: which special
tokens a text is given (tokenizer_config.json's word counts over the post-processor's), which ids
are special, and how ids become text (pieces.py, detokenizer.py, the same way whole or streamed).
It never truncates and never pads. It knows nothing of models beyond the number of their ids.
Fields of tokenizer_config.json that only steer other tokenizer classes are not read, among them
clean_up_tokenization_spaces: text that was sent cannot be cleaned up afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quire.base.errors import InvalidParameter, QuireError, TokenizerError
from quire.text.detokenizer import Detokenizer
from quire.text.pieces import PieceTable
from quire.text.token_bound import most_bytes_a_token

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SHOWN_FILES = 12
# Shorter texts take less than a millisecond, and the library's batch call costs more than they do.
_SHORT_CHARS = 2048


class Tokenizer:
    """One model's tokenizer. Immutable after `load`; may be used from several threads.

    vocab_size: number of ids, the model's where it was given (a model's table is often padded
    past its tokenizer; such ids have no text). special_tokens: the named ones, as chat templates
    expect them (bos_token, eos_token, ...). bos_id and eos_id are None where there is none.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, config: Mapping[str, Any], vocab_size: int = 0
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        _add_missing_tokens(backend, config)
        self.special_tokens = _named_tokens(config)
        _mark_special(backend, self.special_tokens, config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.vocab_size = max(vocab_size, _num_ids(backend, added))
        self.bos_id = self._id_of_named("bos_token", backend)
        self.eos_id = self._id_of_named("eos_token", backend)
        self._backend = backend
        self._before, self._after = self._surroundings(config)
        decoder = backend.decoder
        self.pieces = PieceTable(
            backend.id_to_token,
            num_ids=self.vocab_size,
            decoder_json=None if decoder is None else decoder.__getstate__(),
        )
        self._most_bytes = most_bytes_a_token(backend)

    @classmethod
    def load(cls, path: Path, *, vocab_size: int = 0) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and special_tokens_map.json in a folder.

        vocab_size: the model's number of ids, where it has more than the tokenizer.
        Raises TokenizerError when files are missing, broken or contradict each other.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(_what_is_there(path))
        with _panics_become(lambda why: _unreadable(file, why)):
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises bare Exception
                raise _unreadable(file, error) from error
        config = read_json(path / "special_tokens_map.json")
        config.update(read_json(path / "tokenizer_config.json"))
        with _panics_become(lambda why: _unreadable(file, why)):
            return cls(backend, config=config, vocab_size=vocab_size)

    def least_tokens(self, text: str) -> int:
        """Fewer tokens than this `text` cannot have; 0 where its length says nothing."""
        if self._most_bytes is None:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._most_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the model's opening and closing tokens unless told otherwise.

        Special tokens written out in the text become their ids. A long text is worked on without
        the interpreter lock: of the library's calls only those for batches let go of it. Raises
        InvalidParameter for text that is not valid Unicode, or that the tokenizer cannot cope with.
        """
        _check_unicode(text)
        with _panics_become(_unencodable):
            if len(text) <= _SHORT_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=False)
            else:
                encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
            ids: list[int] = encoding.ids
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Raises InvalidParameter for an id out of range."""
        stream = Detokenizer(self, skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text; U+FFFD stands for parts of characters."""
        piece = self.pieces.piece(token_id)
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token inside a text; they may be part of a character."""
        piece = self.pieces.piece(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, or None."""
        id_: int | None = self._backend.token_to_id(token)
        return id_

    def _id_of_named(self, name: str, backend: tokenizers.Tokenizer) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else backend.token_to_id(token)

    def _surroundings(self, config: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The ids put before and after a text, each of BOS and EOS at most once."""
        probe = "a"
        plain = self._backend.encode(probe, add_special_tokens=False).ids
        full = self._backend.encode(probe, add_special_tokens=True).ids
        num_added = len(full) - len(plain)
        starts = (at for at in range(num_added + 1) if full[at : at + len(plain)] == plain)
        start = next(starts, 0)
        before, after = full[:start], full[start + len(plain) :]
        if (wanted := _flag(config, "add_bos_token")) is not None:
            bos = self._required_id("bos_token", wanted)
            before = [id_ for id_ in before if id_ != bos]
            before = [bos, *before] if wanted and bos is not None else before
        if (wanted := _flag(config, "add_eos_token")) is not None:
            eos = self._required_id("eos_token", wanted)
            after = [id_ for id_ in after if id_ != eos]
            after = [*after, eos] if wanted and eos is not None else after
        return before, after

    def _required_id(self, name: str, wanted: bool) -> int | None:
        id_ = self.bos_id if name == "bos_token" else self.eos_id
        if wanted and id_ is None:
            raise TokenizerError(
                f"tokenizer_config.json says add_{name} is true, but {name} is "
                f"{self.special_tokens.get(name)!r}, which tokenizer.json does not have; "
                f"name one of its tokens, or set add_{name} to false"
            )
        return id_


@contextmanager
def _panics_become(error_of: Callable[[BaseException], QuireError]) -> Iterator[None]:
    """A panic inside the library is raised as a BaseException that no other net would catch."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise error_of(error) from error


def _unreadable(file: Path, why: BaseException) -> TokenizerError:
    return TokenizerError(
        f"{file}: cannot be read as a tokenizer ({why}); copy it again, or re-export it for "
        f"tokenizers {tokenizers.__version__}"
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


def _what_is_there(path: Path) -> str:
    if not path.is_dir():
        return f"{path}: no such folder; give the folder of a model with a tokenizer.json"
    convert = (
        "write a tokenizer.json once with transformers: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )
    if (path / "tokenizer.model").is_file():
        return (
            f"{path}: no tokenizer.json, only tokenizer.model (SentencePiece or tiktoken ranks), "
            f"which is not read directly; {convert}"
        )
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return f"{path}: no tokenizer.json, only vocab.json and merges.txt; {convert}"
    names = sorted(entry.name for entry in path.iterdir())
    there = ", ".join(names[:_SHOWN_FILES]) or "nothing"
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    return f"{path}: no tokenizer.json; found {there}{more}. Copy the model's tokenizer.json there"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file. Raises TokenizerError if it is broken."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters are escapes in JSON
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not valid JSON ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: holds a {type(value).__name__}; an object is allowed")
    return value


def _content(value: object) -> str | None:
    """A token in a config file: a string, or an object with its string under `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    contents = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(
        f"tokenizer_config.json: {name} is {value!r}; true, false or null is allowed"
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json lists are added at the ids it gives them."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    for key in sorted(listed, key=lambda key: int(key) if str(key).isdecimal() else -1):
        entry = listed[key]
        content = _content(entry)
        if content is None or not str(key).isdecimal():
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder has {key!r}: {entry!r}; an id and an "
                "object with content are allowed"
            )
        if backend.token_to_id(content) is None:
            flags = {
                name: bool(entry[name])
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                if name in entry
            }
            backend.add_tokens([tokenizers.AddedToken(content, **flags)])
        if backend.token_to_id(content) != int(key):
            raise TokenizerError(
                f"tokenizer_config.json gives {content!r} the id {key}, tokenizer.json "
                f"{backend.token_to_id(content)}; take both files from the same model"
            )


def _mark_special(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], config: Mapping[str, Any]
) -> None:
    """Named tokens, and those that tokenizer_config.json calls special, are special."""
    contents = set(named.values())
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, Mapping):
        contents |= {entry["content"] for entry in listed.values() if entry.get("special")}
    extra = config.get("additional_special_tokens")
    if isinstance(extra, list):
        contents |= {content for content in map(_content, extra) if content is not None}
    added = backend.get_added_tokens_decoder()
    already = {token.content for token in added.values() if token.special}
    known = sorted(
        content for content in contents - already if backend.token_to_id(content) is not None
    )
    if known:
        backend.add_special_tokens(
            [tokenizers.AddedToken(content, special=True, normalized=False) for content in known]
        )


def _num_ids(backend: tokenizers.Tokenizer, added: Mapping[int, object]) -> int:
    num_base = backend.get_vocab_size(with_added_tokens=False)
    if num_base and backend.id_to_token(num_base - 1) is None:  # a vocabulary with holes
        num_base = 1 + max(backend.get_vocab(with_added_tokens=False).values())
    return max(num_base, 1 + max(added, default=-1))
