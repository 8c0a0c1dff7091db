"""Read the chat templates in a GGUF file's metadata, by name.

tokenizer.chat_template is the default; others are tokenizer.chat_template.NAME. Source of the keys:
gguf-py (ggml-org/llama.cpp).
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import TokenizerError
from quire.base.gguf_open import open_gguf
from quire.base.show import show

DEFAULT = "default"
_KEY = "tokenizer.chat_template"


def read_gguf_templates(file: Path) -> dict[str, str]:
    """Return templates by name; empty if there are none. Raises TokenizerError, WeightsError."""
    sources: dict[str, str] = {}
    for key, value in open_gguf(file).metadata.items():
        if key != _KEY and not key.startswith(f"{_KEY}."):
            continue
        if not isinstance(value, str):
            raise TokenizerError(f"{file}: {key} is {show(value)}; a string is expected")
        sources[key.removeprefix(_KEY).removeprefix(".") or DEFAULT] = value
    return sources
