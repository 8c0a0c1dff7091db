"""Say what an unsupported architecture is, judged by its configuration, and what is supported.

Kinds are recognized by keys first and by the architecture's name second; any other architecture is
only named. Knows no family: the registry says which architectures run. Also decides when code that
a checkpoint brings (auto_map) may be ignored: it is never run.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.base.show import show

RECIPE = "docs/recipes/add-a-family.md"
LIST_COLUMNS = 88
NEVER_RUN = (
    "code that comes with a model is never run, because it could do anything on this machine"
)

# What an architecture does, after its family's name.
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel)$")

_SEES_OR_HEARS = (
    "it also reads images or audio ({found}); only text models run, so take a text-only "
    "checkpoint of the family if there is one"
)
_TAKES_TURNS = "it is an encoder with a decoder ({found}); only models that are one decoder run"
_SEES_ALL = (
    "it is an encoder or a classifier ({found}), which writes no text; take a checkpoint that "
    "was trained to continue text"
)
_HAS_EXPERTS = (
    "it is a mixture of experts ({found}) of a family that does not run yet; {mixtures} do"
)
_RECURS = "it has state-space or recurrent layers ({found}), which are not supported"
_PAINTS = "it makes images ({found}); only models that continue text run"

# (name of a kind, keys and names that identify it); the first match counts.
_KINDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        _SEES_OR_HEARS,
        ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "vit_config"),
        r"VL|Vision|Llava|Image|Video|Audio|Whisper|Speech|C[Ll][Ii]P|B[Ll][Ii]P|Si[gG]lip|Multimodal"
        r"|Omni|Fuyu|Mllama"
        r"|^(Gemma3n?|Gemma4|Mistral3|Idefics\d?|PaliGemma|Pixtral|SmolVLM|Aya)"
        r"ForConditionalGeneration",
    ),
    (
        _TAKES_TURNS,
        (),
        r"^(M|Long|Umt|UM|Switch|Flan)?T5|Bart|Pegasus|Marian|ProphetNet|M2M100|Blenderbot|NLLB"
        r"|EncoderDecoder|Seq2Seq|ForConditionalGeneration$",
    ),
    (_RECURS, ("ssm_cfg", "ssm_state_size", "mamba_d_state", "linear_conv_kernel_dim"),
     r"Mamba|Jamba|Zamba|Bamba|Rwkv|RWKV|Recurrent|xLSTM|Hyena|NemotronH|FalconH1|MoeHybrid"
     r"|KimiLinear|RetNet|Qwen3Next"),
    (
        _HAS_EXPERTS,
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        r"Mo[eE]|Mixtral|DeepseekV|Olmoe|Dbrx|Grok|Arctic|GptOss|Llama4",
    ),
    (
        _SEES_ALL,
        (),
        r"For(Masked|Sequence|Token|Question|Multiple|NextSentence|PreTraining)"
        r"|Bert(?!Decoder)|BERT|Electra|Deberta|MPNet|RewardModel|Score$|Classif",
    ),
)  # fmt: skip


def refusal(values: Mapping[str, Any], running: Iterable[str], mixtures: Sequence[str]) -> str:
    """Return why the model of this config.json does not run, and which architectures (`running`)
    do.

    mixtures: those of them with experts.
    """
    names, running = values.get("architectures"), sorted(running, key=str.lower)
    if names is None:
        said = f"no architectures, and model_type is {show(values.get('model_type'))}"
    else:
        said = f"architectures is {show(names)}, which is not supported"
    reason = _reason(values, mixtures)
    listed = textwrap.fill(
        ", ".join(running), LIST_COLUMNS, initial_indent="  ", subsequent_indent="  "
    )
    return f"{said}: {reason}; these run:\n{listed}"


def with_head(name: object, running: Iterable[str]) -> str | None:
    """Return the architecture that adds a head to the decoder `name` ("Qwen3Model"), if it runs."""
    if not isinstance(name, str) or not name.endswith("Model"):
        return None
    family = name.removesuffix("Model").removesuffix("Text")
    return next((one for one in running if _HEAD.sub("", one) == family), None)


def other_kind(values: Mapping[str, Any]) -> str | None:
    """Return why a model is none of those that run although its architecture is the name of one."""
    described, keys, _ = _KINDS[0]
    found = next((key for key in keys if values.get(key)), None)
    return None if found is None else described.format(found=found)


def code_problem(auto_map: Any, architecture: str) -> str | None:
    """Return what is wrong with ignoring the code that auto_map names; None where nothing is.

    A family that runs here needs no code of the checkpoint's: checkpoints of some were published
    before others knew them. But classes that are named for something else may compute something
    else.
    """
    if auto_map is None:
        return None
    family = _HEAD.sub("", architecture)
    fine = isinstance(auto_map, dict) and all(
        isinstance(path, str) and path.rsplit(".", 1)[-1].startswith(family)
        for path in _class_paths(auto_map)
    )
    if fine:
        return None
    return (
        f"auto_map is {show(auto_map)}: it asks for code that is not {family}'s, and {NEVER_RUN}; "
        f"if the model is a plain {architecture}, remove auto_map"
    )


def quantization_problem(key: str, value: Any) -> str | None:
    """Return what is wrong with a quantized checkpoint's config.json, if anything."""
    if not value:
        return None
    method = "a way of its own"
    if isinstance(value, dict):
        named = value.get("quant_method")
        loaded = [name for name in ("load_in_4bit", "load_in_8bit") if value.get(name) is True]
        method = show(named or next(iter(loaded), None) or method).strip('"')
    if key == "quantization":
        method = "MLX's way"
    return (
        f"{key} is {show(value)}: the weights are quantized ({method}), which is not supported in "
        "safetensors yet; take the checkpoint they were made from, in float16 or bfloat16, or a "
        "GGUF file of it"
    )


def _class_paths(auto_map: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the classes of models and configurations; tokenizers have code of their own."""
    for key, path in auto_map.items():
        if not key.startswith(("AutoTokenizer", "AutoProcessor")):
            yield path


def _reason(values: Mapping[str, Any], mixtures: Sequence[str]) -> str:
    names = values.get("architectures")
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if len(listed) > 1:
        return "more than one is named; keep the one that is meant"
    name = listed[0] if listed else ""
    for described, keys, pattern in _KINDS:
        found = next((key for key in keys if values.get(key)), None)
        if found is None and re.search(pattern, name):
            found = name
        if found is not None:
            found = show(found).strip('"')
            return described.format(found=found, mixtures=", ".join(mixtures))
    if values.get("is_encoder_decoder") is True:
        return _TAKES_TURNS.format(found="is_encoder_decoder")
    if values.get("_class_name") or values.get("_diffusers_version"):
        return _PAINTS.format(found=show(values.get("_class_name")).strip('"'))
    if values.get("auto_map"):
        return (
            f"its auto_map asks for code of its own, and {NEVER_RUN} (nor is there a "
            "trust_remote_code to allow it); take a checkpoint of a family that runs, or add the "
            f"family: {RECIPE}"
        )
    return f"take a checkpoint of a family that runs, or add this one: {RECIPE}"


# What GGUF calls architectures that are no decoders of text, or that do not run here.
_GGUF_KINDS: tuple[tuple[str, str], ...] = (
    (
        r"clip|mmproj|siglip",
        "it is the part of a model that reads images or audio (mmproj); take the GGUF file of "
        "its text model, from the same repository",
    ),
    (r"adapter|lora|control_?vector", "it is an adapter; merge it into the model's weights"),
    (
        r".*bert.*|.*embed.*|eurobert|t5encoder",
        "it is an encoder for embeddings, which writes no text",
    ),
    (r"t5.*|.*bart.*", "it is an encoder with a decoder; only models that are one decoder run"),
    (
        r".*mamba.*|.*rwkv.*|jamba|.*ssm.*|qwen3next|lfm2.*|falcon-h1|nemotron_h",
        "it has state-space or recurrent layers, which are not supported",
    ),
    (r".*vl.*|.*omni.*|mllama|llama4", "it also reads images or audio; only text models run"),
    (
        r"deepseek2.*",
        "its attention is over latent keys and values (MLA), which is not supported",
    ),
    (
        r".*moe.*|deepseek.*|dots1|grok|dbrx|gpt-?oss",
        "it is a mixture of experts that is not read from GGUF; take its checkpoint in "
        "safetensors, if the family runs",
    ),
    (r"flux|sd\d?|wan|whisper|.*tts.*|wavtokenizer.*", "it makes or reads images or audio"),
)


def gguf_kind(architecture: object) -> str:
    """Return what a GGUF architecture is, to be put after its name; empty if that is unknown."""
    if not isinstance(architecture, str):
        return ""
    for pattern, kind in _GGUF_KINDS:
        if re.fullmatch(pattern, architecture[:100], re.IGNORECASE):
            return f": {kind}"
    return ""
