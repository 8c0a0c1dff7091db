"""GPT-2's printable stand-ins for bytes, used in byte-level vocabularies.

Visible Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 and up.
Invariant: 256 distinct characters, one for each byte. Source: bytes_to_unicode in openai/gpt-2's
encoder.py.
"""

from __future__ import annotations

import functools

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


@functools.cache
def stand_ins() -> str:
    """Return the 256 characters; the one at index b stands for byte b."""
    hidden = [byte for byte in range(256) if byte not in _VISIBLE]
    characters = {byte: chr(byte) for byte in _VISIBLE}
    characters.update((byte, chr(0x100 + place)) for place, byte in enumerate(hidden))
    return "".join(characters[byte] for byte in range(256))


def written(raw: bytes) -> str:
    """Return bytes as a byte-level vocabulary writes them."""
    return raw.decode("latin-1").translate(_table())


@functools.cache
def _table() -> dict[int, str]:
    return dict(enumerate(stand_ins()))
