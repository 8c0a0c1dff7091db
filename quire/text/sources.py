"""Find and read the tokenizer files of a model, in a fixed order.

1. tokenizer.json  2. tokenizer.model: tiktoken ranks or a SentencePiece model, by its content 3.
one *.tiktoken  4. vocab.json with merges.txt. A GGUF file contains its tokenizer.

The first one found is used, and is an error if it is broken: there is no fallback to another, which
might yield other ids. What the older formats leave to a model's tokenizer class (the names of BOS
and EOS, whether BOS is added) gets defaults unless a config says otherwise. Code in a checkpoint
(auto_map) is never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.base.errors import TokenizerError
from quire.base.gguf_model import find_gguf
from quire.base.regular_file import is_present
from quire.text.added_tokens import named_tokens, read_config
from quire.text.tokenizer_files import read_file
from quire.text.tokenizer_json import (
    HOW_TO_CONVERT,
    check_no_pointer,
    library_errors_become,
    read_tokenizer_json,
)

if TYPE_CHECKING:
    from quire.text.rank_file import Family

# Readers of the older formats are imported on use: most models need none.
_SHOWN_FILES = 12
_FIRST_FIELD = b"\n"  # of a SentencePiece model: a piece, with its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tokenizer as read from its files.

    backend: the ids, their tokens, and the encoder unless `encode` is given. config: the
    directory's special tokens and flags. prefix: put before a text that opens with no special
    token.
    """

    file: Path
    backend: tokenizers.Tokenizer
    config: Mapping[str, Any]
    prefix: str = ""
    encode: Callable[[str], list[int]] | None = None


def read_source(folder: Path) -> Source:
    """Read the tokenizer. Raises TokenizerError naming the file."""
    if (gguf := find_gguf(folder)) is not None:
        return _from_gguf(gguf)
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder}: no such directory; give the directory of a model with tokenizer files"
        )
    file, read = _first_of(folder)
    config = read_config(folder)
    with library_errors_become(lambda why: TokenizerError(f"{file}: cannot be read ({why})")):
        return read(file, config)


def _first_of(folder: Path) -> tuple[Path, Callable[[Path, dict[str, Any]], Source]]:
    if is_present(file := folder / "tokenizer.json"):
        return file, _from_json
    if is_present(file := folder / "tokenizer.model"):
        return file, _from_model
    rank_files = sorted(folder.glob("*.tiktoken"))
    if len(rank_files) > 1:
        names = ", ".join(file.name for file in rank_files)
        raise TokenizerError(f"{folder}: {names}; keep the one that belongs to the model")
    if rank_files:
        return rank_files[0], _from_ranks
    if is_present(file := folder / "vocab.json") and is_present(folder / "merges.txt"):
        return file, _from_vocabulary
    raise TokenizerError(_what_is_there(folder))


def _from_gguf(file: Path) -> Source:
    from quire.text.gguf_tokenizer import read_gguf_tokenizer

    with library_errors_become(lambda why: TokenizerError(f"{file}: cannot be read ({why})")):
        backend, config = read_gguf_tokenizer(file)
    return Source(file=file, backend=backend, config=config)


def _from_json(file: Path, config: dict[str, Any]) -> Source:
    backend = read_tokenizer_json(file)
    return Source(file=file, backend=backend, config=config)


def _from_model(file: Path, config: dict[str, Any]) -> Source:
    from quire.text.rank_file import looks_like_ranks
    from quire.text.sentencepiece_model import (
        converted,
        encoded_by_library,
        prefix_once,
        why_not_converted,
    )
    from quire.text.sentencepiece_proto import read_pieces

    content = read_file(file)
    if looks_like_ranks(content):
        return _from_ranks(file, config)
    check_no_pointer(file, content)
    if not content.startswith(_FIRST_FIELD):
        raise TokenizerError(
            f"{file}: begins with {content[:16]!r}; a SentencePiece model or tiktoken ranks are "
            "expected; copy it again"
        )
    pieces = read_pieces(file, content)
    is_t5 = str(config.get("tokenizer_class") or "").removesuffix("Fast") == "T5Tokenizer"
    if is_t5 and config.get("add_eos_token") is None:
        config["add_eos_token"] = True  # the only common class that adds EOS
    config = _with_defaults(config, pieces.named, adds_bos=not is_t5)
    if why_not_converted(pieces, config) is None:
        backend = converted(pieces, config, file)
        return Source(file=file, backend=backend, config=config, prefix=prefix_once(pieces, config))
    table, encode = encoded_by_library(pieces, config, file, content)
    return Source(file=file, backend=table, config=config, encode=encode)


def _from_ranks(file: Path, config: dict[str, Any]) -> Source:
    from quire.text.rank_file import read_ranks

    backend, family = read_ranks(file, config)
    return _of_family(file, backend, family, config)


def _from_vocabulary(file: Path, config: dict[str, Any]) -> Source:
    from quire.text.rank_file import read_vocabulary_and_merges

    backend, family = read_vocabulary_and_merges(file.parent, config)
    return _of_family(file, backend, family, config)


def _of_family(
    file: Path, backend: tokenizers.Tokenizer, family: Family, config: dict[str, Any]
) -> Source:
    named = {
        role: token
        for role, token in family.named.items()
        if backend.token_to_id(token) is not None
    }
    config = _with_defaults(config, named, adds_bos=family.adds_bos)
    return Source(file=file, backend=backend, config=config)


def _with_defaults(
    config: dict[str, Any], named: Mapping[str, str], *, adds_bos: bool
) -> dict[str, Any]:
    """Return the config, completed with the names and rules of the model's tokenizer class."""
    complete = {**named, **config}
    if complete.get("add_bos_token") is None:
        complete["add_bos_token"] = adds_bos and "bos_token" in named_tokens(complete)
    return complete


def _what_is_there(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    there = ", ".join(names[:_SHOWN_FILES]) or "nothing"
    more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
    code = ""
    if read_config(folder).get("auto_map"):
        code = (
            " Its tokenizer_config.json refers to Python code in the checkpoint (auto_map), which "
            "is never run."
        )
    return (
        f"{folder}: no tokenizer (tokenizer.json, tokenizer.model, *.tiktoken, or vocab.json with "
        f"merges.txt); found {there}{more}.{code} Copy the model's tokenizer.json there, "
        f"or {HOW_TO_CONVERT}"
    )
