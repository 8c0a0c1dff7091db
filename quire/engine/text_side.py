"""TextSide: tokenizer and chat template of a model, as the engine's client needs them.

The engine itself knows ids only and loads neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.groups import ModelConfig
from quire.engine.model_files import model_folder
from quire.models.registry import open_model
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """What turns text into ids and back for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None


def load_text_side(config: ModelConfig) -> TextSide:
    """Tokenizer and template. Raises ConfigError or TokenizerError."""
    folder = model_folder(config)
    tokenizer = Tokenizer.load(folder, vocab_size=open_model(folder).vocab_size)
    return TextSide(tokenizer=tokenizer, template=ChatTemplate.load(folder, tokenizer))
