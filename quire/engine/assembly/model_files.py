"""Where the model of a config lies, and what it is called.

Knows names and places only; what the files hold is for models, weights and text to read.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.gguf_model import model_name_of
from quire.base.gguf_parts import SUFFIX
from quire.base.user_path import user_path
from quire.config.groups import ModelConfig
from quire.models.model_folder import box_path


def model_folder(config: ModelConfig) -> Path:
    """Return the model's folder, or its GGUF file; the built-in model where none is named."""
    return user_path(config.model) if config.model else box_path()


def model_name(config: ModelConfig) -> str:
    """Return the model's name: the first that was set, else that of its folder or file."""
    if config.served_model_name:
        return config.served_model_name[0]
    if not config.model:
        return "box"
    path = user_path(config.model)
    return model_name_of(path) if path.suffix == SUFFIX and path.is_file() else path.resolve().name
