"""Estimate the memory a model needs from its configuration, before its weights are downloaded.

Uses the program's weights and KV bytes and the reserve of the memory plan (quire/config/memory.py).
Step buffers and the packed layout, which depend on settings, are left out: an estimate, not a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import SettingError
from quire.config.machine import MachineMemory
from quire.config.memory import RESERVE_BYTES
from quire.hub.gguf_choice import size_text
from quire.models.head_kind import heads_in
from quire.models.registry import build_program, compute_dtype, open_model
from quire.program.program import Program
from quire.program.quantize import quantize

CONTEXT = 8192
_SMALLER = ("int8", "int4")
# Usual bits of a weight in files of types that become 8 bits.
_GGUF_BITS = {"Q2_K": 3.2, "Q3_K": 3.9, "Q4_1": 5.0, "Q4_K": 4.8, "Q5_": 5.7, "Q6_K": 6.6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes of weights, and of KV for `num_tokens` tokens.

    smaller: weights' bytes by --quantization. architecture: "" if only the GGUF file knows it; then
    kv_bytes is 0.
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
        kv = f"{size_text(self.kv_bytes)} KV for {self.num_tokens} tokens"
        parts = f"{size_text(self.weights_bytes)} weights, {kv if self.kv_bytes else 'without KV'}"
        available = f"{size_text(memory.available_bytes)} available ({memory.limit})"
        about = "" if self.architecture else "about "
        needs = f"{about}{size_text(self.needed_bytes)} needed ({parts})"
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


def fit_of_directory(path: Path, weights_bytes: int) -> Fit:
    """Estimate from a directory's config.json. Raises ModelError if it is not supported.

    weights_bytes: bytes of the weights' files, which need not be there. Draft heads are computed in
    the dtype of their model, which is not known here.
    """
    if (kind := heads_in(path)) is not None:
        return Fit(
            architecture=f"{kind} heads",
            weights_bytes=weights_bytes,
            kv_bytes=0,
            num_tokens=0,
            smaller={},
        )
    spec = open_model(path)
    program = build_program(spec, dtype=compute_dtype(spec), max_positions=spec.max_positions)
    num_tokens = min(CONTEXT, spec.max_positions)
    # Weights in fp8 keep the bytes of their files; those in f16 are computed in f32.
    is_as_stored = spec.dtype == "bf16"
    return Fit(
        architecture=spec.architecture,
        weights_bytes=min(weights_bytes, program.weight_bytes)
        if is_as_stored
        else program.weight_bytes,
        kv_bytes=num_tokens * sum(cache.token_bytes for cache in program.caches),
        num_tokens=num_tokens,
        smaller=_smaller(program),
    )


def fit_of_gguf(file_name: str, num_bytes: int) -> Fit:
    """Estimate the weights of a GGUF file from its name and size; its metadata is in the file.

    Types of fewer than 8 bits become 8 bits in memory, except Q4_0 (docs/gguf.md).
    """
    found = [bits for kind, bits in _GGUF_BITS.items() if kind in file_name.upper()]
    weights_bytes = int(num_bytes * 8 / found[0]) if found else num_bytes
    return Fit(architecture="", weights_bytes=weights_bytes, kv_bytes=0, num_tokens=0, smaller={})


def _smaller(program: Program) -> dict[str, int]:
    found = {}
    for scheme in _SMALLER:
        try:
            found[scheme] = quantize(program, scheme).weight_bytes
        except SettingError:  # nothing in this program has that precision
            continue
    return found
