"""Map values of settings, as other engines take them, to what to write here.

A value is rejected with the message of its entry. Knows no flag but that of the setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

_HALF = (
    "weights of this dtype are computed as f32, which holds their values, or as bf16 with half the "
    "memory: {given} bf16"
)
_STORED = (
    "it is a format of quantized checkpoints that is not read; take the original weights and "
    "quantize them while loading, as in {given} int4, or a GGUF file"
)
_OF_GGUF = (
    "it is a quantization of GGUF files, which bring their own: quire serve ORG/NAME:{upper}; "
    "other weights are quantized while loading, as in {given} int4"
)
_OF_KV = "fp8 for keys and values is {given} fp8, on GPUs; on CPUs int8 takes as much memory"
_GGUF_QUANTIZATION = re.compile(r"(ud-)?i?q[1-8]_[0-9a-z_]+|tq[12]_0|mxfp4", re.I)
_STORED_FORMATS = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "bnb", "hqq", "aqlm", "exl2"),
    *("compressed-tensors", "modelopt", "torchao", "quark", "marlin", "nf4"),
)
_BY_TEMPLATE = "write {parser}, or leave {given} out: it is detected from the chat template"
# Parsers by the names of vLLM and SGLang, beside those that have one name everywhere.
_TOOL_PARSERS = {
    "hermes": ("qwen", "qwen25", "qwen2_5"),
    "qwen3_coder": ("qwen3_xml",),
    "glm": ("glm45", "glm47"),
    "llama3_json": ("llama3", "llama4_json"),
    "pythonic": ("llama4_pythonic",),
    "deepseek": ("deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"),
    "kimi": ("kimi_k2",),
    "phi": ("phi4_mini_json",),
    "harmony": ("openai", "gpt-oss"),
}
_REASONING_PARSERS = {
    "think": ("deepseek_r1", "deepseek-r1", "qwen3", "qwen3-thinking", "glm45"),
    "harmony": ("openai_gptoss", "gpt-oss", "openai"),
    "kimi": ("kimi_k2",),
    "seed": ("seed_oss",),
}
# What proposes draft tokens, by the names of vLLM, SGLang and llama.cpp (without its draft-).
_SPECULATORS = {
    "off": ("none", "false", "0"),
    "ngram": (
        *("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
        *("ngram_gpu", "prompt-lookup", "prompt_lookup", "lookup"),
    ),
    "draft": ("draft_model", "model", "simple", "standalone"),
    "eagle": ("eagle3",),
    "self": ("layerskip",),
}
_MTP = (
    "layers of a checkpoint that predict further tokens (MTP) are not read; {given} ngram needs no "
    "files, and {given} eagle a head trained for the model"
)
_SUFFIXES = "earlier answers are searched with {given} ngram and --speculate-history-tokens"
_NUM_DRAFTS = (
    "it says what proposes tokens, as in {given} ngram; their maximum number is --max-draft-tokens"
)


def _parsers(names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the advice for each foreign name of a parser."""
    return {
        foreign: _BY_TEMPLATE.replace("{parser}", own)
        for own, foreigns in names.items()
        for foreign in foreigns
    }


# Values that other engines take, by the field's name; {given} is the setting's flag.
_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "dtype": dict.fromkeys(("half", "float16", "fp16", "f16"), _HALF)
        | {"float": "write f32", "fp32": "write f32", "bf": "write bf16"},
        "quantization": dict.fromkeys(_STORED_FORMATS, _STORED)
        | {"8bit": "write int8", "4bit": "write int4", "q8": "write int8", "q4": "write int4"},
        "kv_cache_dtype": dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_inc", "q8_0"), _OF_KV)
        | dict.fromkeys(("float16", "f16", "half"), "take f32 or bf16"),
        "tool_call_parser": _parsers(_TOOL_PARSERS),
        "reasoning_parser": _parsers(_REASONING_PARSERS),
        "speculate": {
            foreign: f"write {own}" for own, names in _SPECULATORS.items() for foreign in names
        }
        | dict.fromkeys(("mtp", "nextn"), _MTP)
        | {"suffix": _SUFFIXES, "true": "write ngram, which needs no files"},
    }
)


def instead_of_value(name: str, value: object, allowed: Iterable[object]) -> str:
    """Return what to write in place of a wrong value; empty if nothing is near.

    name: of the setting, with underscores. Values of other engines have advice of their own; else
    the nearest of the allowed values is suggested.
    """
    if hint := _foreign_value(name, value):
        return hint
    near = get_close_matches(str(value)[:60].lower(), [str(one) for one in allowed], 1, 0.8)
    return f"did you mean {near[0]}?" if near else ""


def _foreign_value(name: str, value: object) -> str:
    text = str(value)
    lower = text.lower()
    if name == "speculate":  # several proposers: the first; each family's MTP layers
        lower = lower.partition(",")[0].strip().removeprefix("draft-")
        lower = "mtp" if lower.endswith("_mtp") else lower
    hint = _VALUES.get(name, {}).get(lower, "")
    if not hint and name == "quantization" and _GGUF_QUANTIZATION.fullmatch(text):
        hint = _OF_GGUF
    if not hint and name == "speculate" and text.isdecimal():
        hint = _NUM_DRAFTS
    return hint.format(given=f"--{name.replace('_', '-')}", upper=text.upper())
