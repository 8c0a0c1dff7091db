"""Read a tokenizer.json, an untrusted file, with the `tokenizers` library.

What the library rejects, by an exception or a panic, becomes a TokenizerError. Some files would end
the process instead (it aborts if it cannot allocate, and recurses over pieces), so they are
rejected first: a character map that claims more bytes than it has, a Unigram piece of absurd
length, stages with too many steps or that multiply the length of a text. Files that can contain
neither of the first two are not parsed twice. Other files that end the process may exist.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quire.base.errors import QuireError, TokenizerError
from quire.base.regular_file import LFS_POINTER
from quire.text.tokenizer_files import read_file

HOW_TO_CONVERT = (
    "write a tokenizer.json once, where the model's own code runs, with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
MAX_PIECE_CHARS = 10_000
MAX_GROWTH = 64
MAX_PARTS = 256  # of a normalizer, a pre-tokenizer, a post-processor or a decoder
_INNER = ("normalizers", "pretokenizers", "decoders", "processors")
_MAX_PREFIX_CHARS = 1_000
# Without these no file has a character map or a Unigram model: escaped letters could spell either.
_WORTH_PARSING = (b"Unigram", b"Precompiled")
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")


@contextmanager
def library_errors_become(error_of: Callable[[BaseException], QuireError]) -> Iterator[None]:
    """Convert what the library raises: bare Exceptions, and panics, which are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if is_library_error(error):
            raise error_of(error) from error
        raise


def is_library_error(error: BaseException) -> bool:
    """Return whether the library raised it, rather than the interpreter or this code."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


def read_tokenizer_json(file: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in a file. Raises TokenizerError naming it."""
    raw = read_file(file)
    check_no_pointer(file, raw)
    if any(mark in raw for mark in _WORTH_PARSING) or _ESCAPED_LETTER.search(raw):
        _check_content(file, raw)
    with library_errors_become(lambda why: _unreadable(file, why)):
        try:
            backend = tokenizers.Tokenizer.from_buffer(raw)
        except ValueError as error:
            raise _unreadable(file, error) from error
        _check_stages(file, backend)
    return backend


def check_no_pointer(file: Path, content: bytes) -> None:
    """Raise TokenizerError if the file is a Git LFS pointer."""
    if content.startswith(LFS_POINTER):
        raise TokenizerError(
            f"{file}: a pointer of Git LFS, not the file itself; fetch it with git lfs pull"
        )


def _check_content(file: Path, raw: bytes) -> None:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(content, Mapping):
        return  # the library reports the error
    model = content.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("vocab"), list):
        for entry in model["vocab"]:
            piece = entry[0] if isinstance(entry, list) and entry else ""
            if isinstance(piece, str) and len(piece) > MAX_PIECE_CHARS:
                raise _unreadable(
                    file,
                    f"a piece has {len(piece)} characters, at most {MAX_PIECE_CHARS} are allowed",
                )
    for part in _parts(content.get("normalizer")):
        if "precompiled_charsmap" in part:
            _check_charsmap(file, part["precompiled_charsmap"])


def _check_charsmap(file: Path, written: Any) -> None:
    """Check a map: the size of its trie (4 bytes, little-endian), the trie, and text."""
    try:
        charsmap = binascii.a2b_base64(written, strict_mode=True)
    except (TypeError, ValueError) as error:
        raise _unreadable(file, f"its precompiled_charsmap is not base64: {error}") from None
    size = int.from_bytes(charsmap[:4], "little")
    if size > len(charsmap):
        raise _unreadable(
            file, f"its precompiled_charsmap claims {size} bytes of {len(charsmap)} for its trie"
        )


def _check_stages(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Raise if text passes through too many steps or may be multiplied in length.

    Each step costs time for every text. Steps that each double a text turn 30 characters into more
    than the memory holds, before tokenization (normalizer) or in detokenization (decoder).
    """
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        stage = getattr(backend, name)
        parts = [] if stage is None else list(_parts(json.loads(stage.__getstate__())))
        if len(parts) > MAX_PARTS:
            raise _unreadable(
                file, f"its {name} has {len(parts)} parts, at most {MAX_PARTS} are allowed"
            )
        growth = _growth(parts)
        if growth > MAX_GROWTH:
            raise _unreadable(
                file,
                f"its {name} may make a text {growth:g} times as long, {MAX_GROWTH} are allowed",
            )


def _growth(parts: Iterable[Mapping[str, Any]]) -> float:
    """Return the maximum growth factor of a text. Patterns match at least one character."""
    growth = 1.0
    for part in parts:
        if part.get("type") == "Replace":
            plain = (part.get("pattern") or {}).get("String")
            num_matched = len(plain) if isinstance(plain, str) else 1
            content = len(part.get("content") or "")
            growth *= max(1.0, content / num_matched if num_matched else 1.0 + content)
        elif len(part.get("prepend") or "") > _MAX_PREFIX_CHARS:
            growth = float("inf")
    return growth


def _parts(stage: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a stage, including those within sequences."""
    waiting = [stage]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            for key in _INNER:
                inner = part.get(key)
                waiting += inner if isinstance(inner, list) else []


def _unreadable(file: Path, why: object) -> TokenizerError:
    return TokenizerError(
        f"{file}: cannot be read as a tokenizer ({why}); copy it again, or re-export it for "
        f"tokenizers {tokenizers.__version__}"
    )
