"""Where a model's configuration lies, and the little of it that a tokenizer needs.

Apart from registry.py, so that the process that serves HTTP imports no architecture. Whether the
model is supported is decided by `registry.open_model` alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.gguf_model import GgufModel, find_gguf
from quire.base.regular_file import is_present
from quire.models.config_reader import load_config
from quire.models.foreign_folders import what_else

EMBEDDING = "token_embd.weight"  # of a GGUF file
# As a Path has it, with one slash of two.
_ADDRESS = re.compile(
    r"(?:(?:https?|hf):/+(?:[^/]*\.[^/]*/+)?|(?:www\.)?(?:hf\.co|huggingface\.co)/+)"
    r"(?P<name>[^/]+/[^/?#]+)?"
)
_OLLAMA = re.compile(r"[a-z0-9][\w.-]*:[\w.-]+")


def box_path() -> Path:
    """Return the directory of the built-in model. Raises ConfigError if it is absent."""
    box = Path(__file__).parent / "box"
    if not (box / "config.json").is_file():
        raise ConfigError(
            f"{box}: this installation has no built-in model; give the directory of a model"
        )
    return box


def draft_box_path() -> Path:
    """Return the directory of the built-in model's draft model. Raises ConfigError if absent."""
    draft = Path(__file__).parent / "box_draft"
    if not (draft / "config.json").is_file():
        raise ConfigError(
            f"{draft}: this installation has no built-in draft model; give one with --draft-model"
        )
    return draft


def head_box_path(kind: str) -> Path:
    """Return the directory of the built-in model's draft heads. Raises ConfigError if absent."""
    heads = Path(__file__).parent / f"box_{kind}"
    if not (heads / "config.json").is_file():
        raise ConfigError(
            f"{heads}: this installation has no {kind} heads for the built-in model; give some "
            f"with --draft-model (python -m quire.train.{kind} trains some)"
        )
    return heads


def read_vocab_size(path: Path) -> int:
    """Return how many token ids the model has; 0 if that is stated in no valid form.

    Raises ConfigError if there is no model, WeightsError if a GGUF file is corrupt.
    """
    if (gguf := find_gguf(path)) is not None:
        stored = GgufModel(gguf).tensors.get(EMBEDDING)
        return stored.shape[0] if stored is not None and len(stored.shape) == 2 else 0
    check_model_folder(path)
    size = load_config(path / "config.json").get("vocab_size")
    return size if type(size) is int and size > 0 else 0


def check_model_folder(folder: Path) -> None:
    """Raise ConfigError if there is no config.json, with what is there instead."""
    if not os.path.exists(folder):  # nor if the text is too long for a path
        if (address := _ADDRESS.match(str(folder))) is not None:
            raise ConfigError(
                f"{_as_address(folder)}: this is an address; give the model's name: "
                f"{_pulled(address['name'] or 'ORG/NAME')}"
            )
        if _OLLAMA.fullmatch(str(folder)):
            raise ConfigError(
                f"{folder}: there is no such directory, and names of this form are Ollama's; take "
                "the model from the Hugging Face Hub by its name there: `quire pull ORG/NAME`, "
                "then `quire serve ORG/NAME`, both with :Q4_K_M for a quantization of a GGUF "
                "repository (docs/coming-from-ollama.md)"
            )
        raise ConfigError(
            f"{folder}: no such file or directory; give a directory with config.json and "
            "*.safetensors, a GGUF file, or ORG/NAME of a model that `quire pull` has downloaded"
        )
    if not folder.is_dir():
        is_part = folder.suffix == ".safetensors" or folder.name == "config.json"
        raise ConfigError(
            f"{folder}: this is a file of a model; give its directory, {folder.parent}"
            if is_part
            else f"{folder}: this is a file, and no GGUF file; give a directory with config.json "
            "and *.safetensors, or a file that ends in .gguf"
        )
    if is_present(folder / "config.json"):
        return
    raise ConfigError(f"{folder}: there is no config.json; {what_else(folder)}")


def _pulled(name: str) -> str:
    return f"{name}, as in `quire pull {name}`, then `quire serve {name}`"


def _as_address(path: Path) -> str:
    """Return an address as it was given: paths have no double slash."""
    return re.sub(r"^(\w+):/+", r"\1://", str(path))
