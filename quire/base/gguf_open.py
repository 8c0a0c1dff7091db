"""open_gguf: a GGUF file, parsed once for all its readers during a start.

    with gguf_read_once():
        ...  # configuration, weights, tokenizer, templates, fingerprint: one parse

A large vocabulary's metadata takes a tenth of a second to walk through. Outside of such a block
each call parses anew; inside, a file is the one that was first opened, whatever its path has come
to mean since: a start reads one model. Always holds: nothing stays open when the last block ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.base.gguf_file import GgufFile


class _Start:
    """Blocks that are entered, and the files that were opened in them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks = 0
        self.files: dict[Path, GgufFile] = {}


_START = _Start()


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Keep files that are opened inside, in any thread, until the last such block ends."""
    with _START.lock:
        _START.blocks += 1
    try:
        yield
    finally:
        with _START.lock:
            _START.blocks -= 1
            if _START.blocks == 0:
                _START.files.clear()


def open_gguf(path: Path) -> GgufFile:
    """Return the file, mapped and parsed. Raises WeightsError."""
    with _START.lock:  # the second caller waits for the first, on purpose
        file = _START.files.get(path)
        if file is None:
            file = GgufFile(path)
            if _START.blocks:
                _START.files[path] = file
        return file
