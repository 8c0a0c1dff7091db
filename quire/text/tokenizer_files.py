"""Read the tokenizer and template files of a model directory as bytes.

Knows no format. A file that cannot be read, is not regular or is too large raises a TokenizerError
that names it.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import TokenizerError
from quire.base.regular_file import read_regular

# The largest published tokenizer.json files have about 40 MB.
MAX_FILE_BYTES = 256 << 20


def read_file(file: Path) -> bytes:
    """Return the file's content. Raises TokenizerError."""
    try:
        return read_regular(file, limit_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise TokenizerError(f"{file}: cannot be read: {error.strerror}") from error
