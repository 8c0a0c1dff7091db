"""Bound the arrays, strings and values of a JSON text before it is parsed.

Parsing millions of them holds the interpreter lock, and every stream waits. Counting does not: a
large text is counted in slices, by operations that release the lock. Does not check that the text
is JSON.
Always holds: brackets and commas inside strings are not counted.
"""

from __future__ import annotations

import numpy as np

from quire.base.json_strings import slices

# Arrays and objects: a chat of 33,000 messages in three parts each.
MAX_CONTAINERS = 100_000
# Strings, keys among them.
MAX_STRINGS = 300_000
# Values of any kind: a prompt of a million token ids fits.
MAX_VALUES = 1_200_000


def excess(raw: bytes) -> str | None:
    """Return the limit that `raw` exceeds, in words for an error message; None for none."""
    containers = quotes = commas = 0
    in_string = False
    for piece in slices(raw):
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        codes = np.frombuffer(piece, np.uint8)
        is_quote = codes == ord('"')
        outside = np.logical_xor.accumulate(is_quote) == in_string
        num_quotes = int(np.count_nonzero(is_quote))
        opening = (codes == ord("[")) | (codes == ord("{"))
        containers += int(np.count_nonzero(opening & outside))
        commas += int(np.count_nonzero((codes == ord(",")) & outside))
        quotes += num_quotes
        in_string ^= bool(num_quotes & 1)
        if containers > MAX_CONTAINERS:
            return f"more than {MAX_CONTAINERS} arrays and objects"
        if quotes > 2 * MAX_STRINGS:
            return f"more than {MAX_STRINGS} strings"
        if commas + containers > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
    return None
