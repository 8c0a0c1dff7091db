"""Where the model of a config lies, and its text side: tokenizer and chat template.

The engine needs the folder, its client the rest; neither needs the other's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config.groups import ModelConfig
from quire.models.registry import box_path, open_model
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """What turns text into ids and back for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def model_folder(config: ModelConfig) -> Path:
    """The model's folder; the model in the box where none is named."""
    return Path(config.model).expanduser() if config.model else box_path()


def model_name(config: ModelConfig) -> str:
    """The name the model goes by: as told, else its folder's."""
    if config.served_model_name is not None:
        return config.served_model_name
    return Path(config.model).expanduser().resolve().name if config.model else "box"


def load_text_side(config: ModelConfig) -> TextSide:
    """Tokenizer and template. Raises ConfigError or TokenizerError."""
    folder = model_folder(config)
    tokenizer = Tokenizer.load(folder, vocab_size=open_model(folder).vocab_size)
    return TextSide(tokenizer=tokenizer, template=ChatTemplate.load(folder, tokenizer))
