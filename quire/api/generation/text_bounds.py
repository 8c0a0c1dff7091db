"""The longest text that is tokenized.

A text far beyond the context is refused before it takes time and memory. Knows no route and no
tokenizer.
"""

from __future__ import annotations

from quire.api.engine_protocol import Engine
from quire.base.errors import ContextTooLong, InvalidParameter

# Tokenizing takes 130 times a text's bytes of memory, so a body of the largest size would take a
# gigabyte. Text has some four bytes a token; one with more than this many fills no context.
_BYTES_A_TOKEN = 16
_MIN_TEXT_LIMIT = 1 << 20


class TextTooLong(InvalidParameter):
    """A text has more bytes than are tokenized at once."""


# What a prompt raises that is shortened on request.
TOO_LONG = (ContextTooLong, TextTooLong)


def max_text_bytes(engine: Engine) -> int:
    """Return the size of the longest text that is tokenized."""
    return max(_BYTES_A_TOKEN * engine.card.max_model_len, _MIN_TEXT_LIMIT)


def check_text_bytes(engine: Engine, text: str, *, param: str) -> None:
    """Refuse a text that would take too long to tokenize. param: the field it came in."""
    max_bytes = max_text_bytes(engine)
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > max_bytes:
        raise TextTooLong(
            f"{param} makes a text of {num_bytes} bytes; at most {max_bytes} are tokenized at "
            f"once ({_MIN_TEXT_LIMIT}, or {_BYTES_A_TOKEN} for each token of the context, "
            "whichever is more); send less, or in pieces",
            param=param,
        )
