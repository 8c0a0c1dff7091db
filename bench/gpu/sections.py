"""The sections of the GPU check in the order they run: cheap and informative ones first.

Names and limits only; nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Section:
    """`function`: module:name, called with a Stage. max_s: seconds it may take at most."""

    function: str
    max_s: float


SECTIONS: Mapping[str, Section] = MappingProxyType(
    {
        "build": Section("bench.gpu.proofs:build", 240),
        "limits": Section("bench.gpu.limits:limits", 90),
        "parity": Section("bench.gpu.proofs:parity", 240),
        "exact": Section("bench.gpu.proofs:exact", 240),
        "mixtures": Section("bench.gpu.proofs:mixtures", 240),
        "decode_one": Section("bench.gpu.steps:decode_one", 300),
        "attention_decode": Section("bench.gpu.attention:decode", 120),
        "attention_prefill": Section("bench.gpu.attention:prefill", 120),
        "prefill": Section("bench.gpu.steps:prefill", 180),
        "exact_price": Section("bench.gpu.steps:exact_price", 240),
        "requests": Section("bench.gpu.requests:requests", 420),
        "mixed": Section("bench.gpu.steps:mixed", 120),
        "gaps": Section("bench.gpu.gaps:gaps", 60),
        "bf16_products": Section("bench.gpu.products:bf16_products", 120),
        "fp8_products": Section("bench.gpu.products:fp8_products", 120),
        "where_time_goes": Section("bench.gpu.breakdown:where_time_goes", 150),
        "peer": Section("bench.gpu.peer:peer", 420),
        "ready": Section("bench.gpu.ready:ready", 240),
        "host_tier": Section("bench.gpu.host_tier:host_tier", 180),
        "exchange": Section("bench.gpu.exchange:exchange", 150),
        "ranks": Section("bench.gpu.ranks:ranks", 120),
    }
)
