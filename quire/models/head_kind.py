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
        raise ModelError(
            f"{folder}: these are {other} (architecture {show(first)}), which are not read. "
            "EAGLE-3 heads (with draft_vocab_size in config.json) and Medusa heads are: take such "
            "heads for this model, or train some with `python -m quire.train.eagle`"
        )
    return "eagle" if "eagle3" in first.lower() or "draft_vocab_size" in values else None


def _other_heads(values: Mapping[str, object], architecture: str) -> str:
    """Return the kind of heads that are not read; "" for none such."""
    kind = values.get("speculators_model_type")
    if kind not in (None, "eagle3", "eagle"):
        return f"heads of kind {show(kind)}"
    model_type = str(values.get("model_type"))
    if _MTP.search(architecture) or model_type.endswith("_mtp"):
        return "MTP layers (multi-token prediction)"
    is_parallel = "dflash_config" in values or values.get("parallel_drafting") is True
    if is_parallel or _PARALLEL.search(architecture):
        return "heads that guess several tokens in one pass"
    if architecture in OLDER_EAGLES or "eagle" in (model_type, kind):
        return "heads of EAGLE 1 or 2"
    if "eagle3" in architecture.lower() and "kv_lora_rank" in values:
        return "EAGLE-3 heads with latent attention (MLA)"
    return ""
