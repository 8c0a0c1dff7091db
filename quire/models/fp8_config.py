"""What config.json says of weights that are kept in few bits: fp8 is read, all else is refused.

Two ways of writing fp8 are known: quant_method "fp8" (a scale a tensor, or blocks of 128 by 128)
and compressed-tensors' "float-quantized" (a scale a tensor, a channel or a block). Which tensors
are fp8, and how their scales lie, the tensors themselves show (quire/weights/fp8_checkpoint.py), so
lists of exceptions are not read. Whether activations have scales that the checkpoint fixes is said
here alone: "static", or "dynamic" where each token's row gets its own.
"""

from __future__ import annotations

from typing import Any

from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.refusals import quantization_problem

KEY = "quantization_config"
BLOCK = [128, 128]
DYNAMIC, STATIC = "dynamic", "static"
OBSERVERS = ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def read_quantization(config: ConfigReader) -> bool:
    """Return whether scales of activations are fixed. Notes what cannot be honoured."""
    is_static = False
    for key in (KEY, "quantization", "compression_config"):
        value = config.take(key)
        check = _CHECKS.get(_method(value)) if key == KEY else None
        if check is not None:
            section = ConfigReader(value, where=KEY)
            is_static = check(section)
            config.absorb(section)
        elif problem := quantization_problem(key, value):
            config.note(problem)
    return is_static


def _method(value: Any) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("quant_method"), str):
        return ""
    named: str = value["quant_method"]
    is_other = named == "compressed-tensors" and value.get("format") != "float-quantized"
    return "" if is_other else named


def _fp8(section: ConfigReader) -> bool:
    section.pass_over(["quant_method", "ignored_layers", "modules_to_not_convert", "scale_fmt"])
    section.require("fmt", ("e4m3",), "weights of e4m3 are read")
    scheme = section.take("activation_scheme")
    if scheme not in (None, DYNAMIC, STATIC):
        section.note(f"activation_scheme is {show(scheme)}; {DYNAMIC} or {STATIC} is read")
    section.require("dequantize", (False,), "--quantization none brings weights to --dtype")
    if scheme == STATIC and section.has("weight_block_size"):
        section.note(f"activation_scheme is {show(scheme)}; beside blocks {DYNAMIC} is read")
    _check_block(section, "weight_block_size")
    return bool(scheme == STATIC)


def _compressed(section: ConfigReader) -> bool:
    section.pass_over(["quant_method", "format", "ignore", "version", "global_compression_ratio"])
    section.require("quantization_status", ("compressed", "frozen"), "the weights must be in fp8")
    section.require("kv_cache_scheme", (), "scales of keys and values are made as they come")
    for key in ("sparsity_config", "transform_config"):
        if value := section.take(key):
            section.note(f"{key} is {show(value)}; only weights as they are, in fp8, are read")
    groups = section.take("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(one, dict) for one in groups.values()):
        section.note(f"config_groups is {show(groups)}; an object of objects is needed")
        return False
    static = set()
    for name, values in groups.items():
        group = ConfigReader(values, where=f"config_groups.{name}")
        static.add(_check_group(group))
        section.absorb(group)
    if len(static) > 1:
        section.note(
            "config_groups: input_activations are dynamic in one group and fixed in another; one "
            "way for all is read"
        )
    return static == {True}


def _check_group(group: ConfigReader) -> bool:
    """Return whether it fixes the scale of activations."""
    is_static = False
    group.pass_over(["targets", "format"])
    group.require("output_activations", (), "what a product gives is not rounded to fp8")
    for key, strategies, read in (
        ("weights", ("tensor", "channel", "block"), "a scale a tensor, channel or block is read"),
        ("input_activations", ("tensor", "token", "group"), "rows have a scale a token or group"),
    ):
        part = group.section(key)
        if part is None:
            group.note(f"{key} is missing; both weights and input_activations must be fp8")
            continue
        part.pass_over(OBSERVERS)
        is_dynamic = part.flag("dynamic", default=False)
        part.require("num_bits", (8,), "8 bits are read")
        part.require("type", ("float",), "floats are read")
        part.require("symmetric", (True,), "fp8 has no zero points")
        part.require("strategy", strategies, read)
        part.require("group_size", (BLOCK[1],), f"{BLOCK[1]} elements share a scale")
        _check_block(part, "block_structure")
        if key == "input_activations" and not is_dynamic:
            is_static = True
            part.require("strategy", ("tensor",), "a scale that is fixed is one for all tokens")
        group.absorb(part)
    return is_static


def _check_block(section: ConfigReader, key: str) -> None:
    if (block := section.take(key)) not in (None, BLOCK):
        section.note(f"{key} is {show(block)}; blocks of {BLOCK} are read")


_CHECKS = {"fp8": _fp8, "compressed-tensors": _compressed}
