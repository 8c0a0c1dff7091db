"""Which architectures run, and how a model folder becomes a ModelSpec and a Program.

    spec = open_model(path)
    program = build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)

Reads config.json and generation_config.json, or the metadata of a GGUF file, never weights. A new
family is a line in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.base.errors import ConfigError
from quire.base.gguf_model import find_gguf
from quire.base.regular_file import is_present
from quire.models.config_reader import ConfigReader, load_config
from quire.models.dots1 import read_dots1
from quire.models.gemma import read_gemma
from quire.models.gemma2 import build_gemma2, read_gemma2
from quire.models.gemma3 import read_gemma3
from quire.models.generation import with_generation_defaults
from quire.models.gguf_config import read_gguf
from quire.models.gpt2 import build_gpt2, read_gpt2
from quire.models.granite import read_granite
from quire.models.llama import build_llama, read_llama
from quire.models.mistral import read_ministral, read_mistral
from quire.models.mixtral import read_mixtral
from quire.models.model_folder import check_model_folder
from quire.models.olmo import build_olmo, read_olmo2, read_olmo3
from quire.models.olmoe import build_olmoe, read_olmoe
from quire.models.opt import build_opt, read_opt
from quire.models.phi3 import build_phi3, read_phi3
from quire.models.qwen import read_qwen2, read_qwen3
from quire.models.qwen_moe import read_qwen2_moe, read_qwen3_moe
from quire.models.refusals import other_kind, refusal, with_head
from quire.models.smollm3 import read_smollm3
from quire.models.spec import ModelSpec
from quire.models.stablelm import read_stablelm
from quire.models.starcoder2 import build_starcoder2, read_starcoder2
from quire.program.program import Program
from quire.program.tensors import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: `read` makes its spec, `build` its program. has_experts: for messages."""

    model_type: str
    read: Callable[[ConfigReader, str], ModelSpec]
    build: Callable[..., Program]
    has_experts: bool = False


FAMILIES = MappingProxyType(
    {
        "LlamaForCausalLM": Family(model_type="llama", read=read_llama, build=build_llama),
        "MistralForCausalLM": Family(model_type="mistral", read=read_mistral, build=build_llama),
        "MinistralForCausalLM": Family(
            model_type="ministral", read=read_ministral, build=build_llama
        ),
        "Qwen2ForCausalLM": Family(model_type="qwen2", read=read_qwen2, build=build_llama),
        "Qwen3ForCausalLM": Family(model_type="qwen3", read=read_qwen3, build=build_llama),
        "MixtralForCausalLM": Family(
            model_type="mixtral", read=read_mixtral, build=build_llama, has_experts=True
        ),
        "Qwen2MoeForCausalLM": Family(
            model_type="qwen2_moe", read=read_qwen2_moe, build=build_llama, has_experts=True
        ),
        "Qwen3MoeForCausalLM": Family(
            model_type="qwen3_moe", read=read_qwen3_moe, build=build_llama, has_experts=True
        ),
        "Dots1ForCausalLM": Family(
            model_type="dots1", read=read_dots1, build=build_llama, has_experts=True
        ),
        "OlmoeForCausalLM": Family(
            model_type="olmoe", read=read_olmoe, build=build_olmoe, has_experts=True
        ),
        "SmolLM3ForCausalLM": Family(model_type="smollm3", read=read_smollm3, build=build_llama),
        "Phi3ForCausalLM": Family(model_type="phi3", read=read_phi3, build=build_phi3),
        "GemmaForCausalLM": Family(model_type="gemma", read=read_gemma, build=build_llama),
        "Gemma2ForCausalLM": Family(model_type="gemma2", read=read_gemma2, build=build_gemma2),
        "Gemma3ForCausalLM": Family(model_type="gemma3_text", read=read_gemma3, build=build_gemma2),
        "GraniteForCausalLM": Family(model_type="granite", read=read_granite, build=build_llama),
        "GPT2LMHeadModel": Family(model_type="gpt2", read=read_gpt2, build=build_gpt2),
        "Olmo2ForCausalLM": Family(model_type="olmo2", read=read_olmo2, build=build_olmo),
        "Olmo3ForCausalLM": Family(model_type="olmo3", read=read_olmo3, build=build_olmo),
        "OPTForCausalLM": Family(model_type="opt", read=read_opt, build=build_opt),
        "StableLmForCausalLM": Family(model_type="stablelm", read=read_stablelm, build=build_llama),
        "Starcoder2ForCausalLM": Family(
            model_type="starcoder2", read=read_starcoder2, build=build_starcoder2
        ),
    }
)


def open_model(path: Path) -> ModelSpec:
    """Return the spec of the model in folder `path`, or in the GGUF file `path`.

    Raises ConfigError where there is no model, its architecture is not supported, or its
    configuration cannot be honoured as written (all problems listed); WeightsError where a GGUF
    file is corrupt.
    """
    folder = Path(path)
    if (gguf := find_gguf(folder)) is not None:
        return read_gguf(gguf, _read_values)
    check_model_folder(folder)
    values = load_config(folder / "config.json")
    architecture, has_head = _architecture(values, folder / "config.json")
    reader = ConfigReader(values, where=str(folder / "config.json"))
    spec = FAMILIES[architecture].read(reader, architecture)
    if not has_head:  # the embedding stands for the head, which is never computed
        spec = replace(spec, head=replace(spec.head, is_tied=True), has_head=False)
    generation = folder / "generation_config.json"
    return with_generation_defaults(spec, generation) if is_present(generation) else spec


def _read_values(values: dict[str, Any], where: str) -> ModelSpec:
    """Return the spec that a family's reader makes of a config.json that is in no file."""
    (architecture,) = values["architectures"]
    return FAMILIES[architecture].read(ConfigReader(values, where=where), architecture)


def compute_dtype(spec: ModelSpec, asked: str = "auto") -> DType:
    """Return what activations, weights and cache are held in: as asked, else as the checkpoint has
    it.

    asked: "auto" or a DType's name. float16 checkpoints compute in float32, which holds them.
    """
    if asked != "auto":
        return DType(asked)
    return DType.BF16 if spec.dtype == "bf16" else DType.F32


def build_program(spec: ModelSpec, *, dtype: DType, max_positions: int) -> Program:
    """Return the program of `spec`, computing in `dtype`, for up to `max_positions` positions.

    Raises ConfigError where max_positions is not between 1 and the model's own limit.
    """
    if not 1 <= max_positions <= spec.max_positions:
        raise ConfigError(
            f"max_positions is {max_positions}; this model allows 1 to {spec.max_positions} "
            "(its config.json says how many)"
        )
    return FAMILIES[spec.architecture].build(spec, dtype=dtype, max_positions=max_positions)


def _architecture(values: Mapping[str, Any], where: Path) -> tuple[str, bool]:
    """Return the one that config.json names, or that its model_type stands for where it names none;
    and whether it has a head: a decoder alone ("Qwen3Model") counts as the model that adds one."""
    names = values.get("architectures")
    if names is None:
        by_type = {family.model_type: name for name, family in FAMILIES.items()}
        model_type = values.get("model_type")
        names = [by_type[model_type]] if model_type in list(by_type) else None
    sibling = with_head(names[0], FAMILIES) if isinstance(names, list) and len(names) == 1 else None
    names = names if sibling is None else [sibling]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        mixtures = [name for name, family in FAMILIES.items() if family.has_experts]
        raise ConfigError(f"{where}: {refusal(values, FAMILIES, mixtures)}")
    if problem := other_kind(values):
        raise ConfigError(f"{where}: this model is more than its architecture says: {problem}")
    return str(names[0]), sibling is None
