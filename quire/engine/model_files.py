"""Where the model of a config lies, and what it is called.

Knows names and places only; what the files hold is for models, weights and text to read.
"""

from __future__ import annotations

from pathlib import Path

from quire.config.groups import ModelConfig
from quire.models.registry import box_path


def model_folder(config: ModelConfig) -> Path:
    """The model's folder; the model in the box where none is named."""
    return Path(config.model).expanduser() if config.model else box_path()


def model_name(config: ModelConfig) -> str:
    """The name the model goes by: as told, else its folder's."""
    if config.served_model_name is not None:
        return config.served_model_name
    return Path(config.model).expanduser().resolve().name if config.model else "box"
