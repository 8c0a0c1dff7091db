"""Which kind of draft heads a directory holds, by its config.json, and which kinds are not read.

Knows no tensors. Always holds: heads of a kind that is not read are rejected by its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from quire.base.errors import ModelError
from quire.base.regular_file import is_present
from quire.base.show import show
from quire.config.proposer_kinds import HeadName
from quire.models.config_reader import load_config

# Architectures of heads that read one hidden state.
OLDER_EAGLES = ("EAGLEModel", "EagleModel", "EagleLlamaForCausalLM", "EagleSpeculator")
_OLDER_HEADS = "heads of EAGLE 1 or 2"
_MTP_LAYERS = "MTP layers (multi-token prediction)"
_PARALLEL_HEADS = "heads that guess several tokens in one pass"
_MTP = re.compile(r"MTP|NextN")
_PARALLEL = re.compile(r"DFlash|P_?Eagle|PEAGLE|DSpark|Domino", re.IGNORECASE)


def heads_in(folder: Path) -> HeadName | None:
    """Return what kind of heads a directory holds, by its config.json; None: something else.

    Raises ModelError for heads of a kind that is not read.
    """
    if not folder.is_dir() or not is_present(folder / "config.json"):
        return None
    values = load_config(folder / "config.json")
    names = values.get("architectures")
    first = str(names[0]) if isinstance(names, list) and names else ""
    is_medusa = values.get("model_type") == "medusa" or "medusa_num_heads" in values
    if is_medusa or first == "MedusaModel":
        return "medusa"
    other = _other_heads(values, first)
    if other:
        kind, found = other
        raise ModelError(
            f"{folder}: these are {kind} ({found} in config.json), which are not read. "
            "EAGLE-3 heads (with draft_vocab_size in config.json) and Medusa heads are: take such "
            "heads for this model, or train some with `python -m quire.train.eagle`"
        )
    return "eagle" if "eagle3" in first.lower() or "draft_vocab_size" in values else None


def _other_heads(values: Mapping[str, object], architecture: str) -> tuple[str, str] | None:
    """Return the kind of heads that are not read, and the field that says so; None for others."""
    named = f"architectures {show(architecture)}"
    kind = values.get("speculators_model_type")
    if kind not in (None, "eagle3", "eagle"):
        return f"heads of kind {show(kind)}", f"speculators_model_type {show(kind)}"
    model_type = str(values.get("model_type"))
    if model_type.endswith("_mtp"):
        return _MTP_LAYERS, f"model_type {show(model_type)}"
    if _MTP.search(architecture):
        return _MTP_LAYERS, named
    if "dflash_config" in values:
        return _PARALLEL_HEADS, "dflash_config"
    if values.get("parallel_drafting") not in (None, False):
        return _PARALLEL_HEADS, f"parallel_drafting {show(values['parallel_drafting'])}"
    if _PARALLEL.search(architecture):
        return _PARALLEL_HEADS, named
    if architecture in OLDER_EAGLES:
        return _OLDER_HEADS, named
    if "eagle" in (model_type, kind):
        key = "model_type" if model_type == "eagle" else "speculators_model_type"
        return _OLDER_HEADS, f'{key} "eagle"'
    if "eagle3" in architecture.lower() and "kv_lora_rank" in values:
        return "EAGLE-3 heads with latent attention (MLA)", "kv_lora_rank"
    return None
