"""Published tokenizers, each loaded once for all tests of a process."""

from __future__ import annotations

import functools

from quire.text.tokenizer import Tokenizer
from tests.data import outside


@functools.cache
def published_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of the published files `name`; skip the test without them."""
    return Tokenizer.load(outside(f"tokenizers/{name}"))
