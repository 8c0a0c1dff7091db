"""Say what a folder without config.json is, judged by its file names, and what to do.

Adapters, pipelines that make images, vendors' own formats, a hub's cache, a folder of models.
Reads one small file at most, an adapter's description, to name the model it belongs to.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import ConfigError
from quire.base.show import show
from quire.models.config_reader import load_config

_MAX_LISTED = 3


def what_else(folder: Path) -> str:
    """Return the rest of a sentence that says there is no config.json in `folder`."""
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder / "adapter_config.json")
    if (folder / "model_index.json").is_file():
        return "this is a pipeline that makes images (model_index.json); only text models run"
    if (folder / "params.json").is_file():
        return (
            "this is a vendor's own format (params.json); take the same model as transformers has "
            "it, with config.json and model*.safetensors"
        )
    models = [config.parent for config in sorted(folder.glob("*/config.json"))]
    models += [config.parent for config in sorted(folder.glob("snapshots/*/config.json"))]
    if models:
        listed = ", ".join(str(model) for model in models[:_MAX_LISTED])
        more = ", ..." if len(models) > _MAX_LISTED else ""
        return f"give the folder that has one: {listed}{more}"
    found = sorted(path.name for path in folder.iterdir())
    more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    there = f"there are {', '.join(found[:_MAX_LISTED])}{more}" if found else "it is empty"
    return f"{there}; give the directory of a model, with config.json and model*.safetensors"


def _adapter(file: Path) -> str:
    try:
        base = load_config(file).get("base_model_name_or_path")
    except ConfigError:
        base = None
    of = f" of {show(base)}" if base else ""
    return (
        f"this is an adapter{of} (adapter_config.json), not a model; merge it into its model with "
        "peft (PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(FOLDER)"
        ") and give that folder"
    )
