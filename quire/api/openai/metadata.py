"""The labels `metadata` of OpenAI's APIs, which answers and stored objects repeat.

Always holds: labels that are returned keep OpenAI's bounds.
"""

from __future__ import annotations

from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512


def checked_metadata(metadata: Any) -> dict[str, str]:
    """Return the labels. Raises InvalidParameter."""
    fits = isinstance(metadata, dict) and len(metadata) <= MAX_PAIRS
    if not fits or not all(
        isinstance(value, str) and len(key) <= MAX_KEY_CHARS and len(value) <= MAX_VALUE_CHARS
        for key, value in metadata.items()
    ):
        raise InvalidParameter(
            f"metadata is {show(metadata)}; an object of at most {MAX_PAIRS} texts is allowed, of "
            f"at most {MAX_VALUE_CHARS} characters each, with names of at most {MAX_KEY_CHARS}",
            param="metadata",
        )
    return dict(metadata)
