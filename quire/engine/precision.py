"""The precision of a model's weights, as it was asked for: where settings meet the program.

Knows the settings' names and what a model's file says of itself; the rewrite is
quire/program/quantize.py. Always holds: a checkpoint that is quantized already is never quantized
a second time.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import SettingError
from quire.base.gguf_model import GgufModel, find_gguf
from quire.config.groups import ModelConfig
from quire.program.program import Program
from quire.program.quantize import quantize

PLAIN_TYPES = ("F32", "F16", "BF16")


def with_precision(program: Program, config: ModelConfig, folder: Path) -> Program:
    """The program with the weights' precision that the settings ask for.

    Raises SettingError for what is no precision, a rule that matches nothing, and a file whose
    weights are quantized already.
    """
    made = quantize(program, config.quantization, head=config.head_precision, keep=config.keep)
    if any(weight.scheme for weight in made.weights.values()):
        _check_unquantized(folder)
    return made


def _check_unquantized(folder: Path) -> None:
    """Safetensors that are quantized are refused where their config.json is read."""
    path = find_gguf(folder)
    if path is None:
        return
    tensors = GgufModel(path).tensors.values()
    found = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1}
    quantized = sorted(found.difference(PLAIN_TYPES))
    if quantized:
        raise SettingError(
            f"{path}: its weights are quantized already ({', '.join(quantized)}); rounding them "
            "again would lose more than either does: leave --quantization out, or take the "
            "model's original checkpoint"
        )
