"""Estimate the memory a model needs from its configuration, before its weights are downloaded.

Uses the program's weights and KV bytes and the reserve of the memory plan (quire/config/memory.py).
Step buffers and the packed layout, which depend on settings, are left out: an estimate, not a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.gguf_model import SUFFIX
from quire.config.machine import MachineMemory
from quire.config.memory import RESERVE_BYTES
from quire.hub.gguf_choice import size_text
from quire.models.registry import build_program, compute_dtype, open_model
from quire.program.program import Program
from quire.program.quantize import quantize

CONTEXT = 8192
_SMALLER = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes of weights, and of KV for `num_tokens` tokens.

    smaller: weights' bytes by --quantization. architecture: "" if only a GGUF file will say.
    """

    architecture: str
    weights_bytes: int
    kv_bytes: int
    num_tokens: int
    smaller: dict[str, int]

    @property
    def needed_bytes(self) -> int:
        """Return all bytes, with the reserve for the interpreter and the rest of the machine."""
        return self.weights_bytes + self.kv_bytes + RESERVE_BYTES

    def text(self, memory: MachineMemory) -> str:
        """Compare with a machine's memory, in one line."""
        weights = f"{size_text(self.weights_bytes)} weights"
        kv = f", {size_text(self.kv_bytes)} KV for {self.num_tokens} tokens"
        available = f"{size_text(memory.available_bytes)} available ({memory.limit})"
        needs = f"{size_text(self.needed_bytes)} needed ({weights}{kv if self.kv_bytes else ''})"
        if self.needed_bytes <= memory.available_bytes:
            return f"{needs}, {available}: it fits"
        for scheme, num_bytes in self.smaller.items():
            total = self.needed_bytes - self.weights_bytes + num_bytes
            if total <= memory.available_bytes:
                return (
                    f"{needs}, {available}: it fits with --quantization {scheme} only "
                    f"({size_text(total)})"
                )
        return f"{needs}, {available}: it does not fit here"


def fit_of(path: Path, weights_bytes: int) -> Fit:
    """Estimate from a directory's config.json, or a GGUF file. Raises ModelError if unsupported.

    weights_bytes: bytes of the weights' files, which may still be missing in a directory.
    """
    spec = open_model(path)
    program = build_program(spec, dtype=compute_dtype(spec), max_positions=spec.max_positions)
    is_gguf, num_tokens = path.suffix == SUFFIX, min(CONTEXT, spec.max_positions)
    # Quantized weights keep about the bytes of their file; f16 is computed in f32, and needs more.
    is_as_stored = is_gguf or spec.dtype == "bf16"
    return Fit(
        architecture=spec.architecture,
        weights_bytes=min(weights_bytes, program.weight_bytes)
        if is_as_stored
        else program.weight_bytes,
        kv_bytes=num_tokens * sum(cache.token_bytes for cache in program.caches),
        num_tokens=num_tokens,
        smaller={} if is_gguf else _smaller(program),
    )


def fit_of_size(weights_bytes: int) -> Fit:
    """Estimate from the size of a GGUF file that is not there yet: its weights alone."""
    return Fit(architecture="", weights_bytes=weights_bytes, kv_bytes=0, num_tokens=0, smaller={})


def _smaller(program: Program) -> dict[str, int]:
    found = {}
    for scheme in _SMALLER:
        try:
            found[scheme] = quantize(program, scheme).weight_bytes
        except SettingError:  # nothing in this program has that precision
            continue
    return found
