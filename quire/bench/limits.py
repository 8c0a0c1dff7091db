"""The machine's limits: memory bandwidth and peak arithmetic rates.

Measured by plain loops of the compiled module (native/src/limits.cc), which share no code with the
kernels, for one instruction set: features that the kernels do not use do not count. Rates are 10^9
bytes or operations per second, all threads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from quire import _native
from quire.bench.reading import ReadProbe

# Loops by what they do; a multiplication and an addition are two operations.
ARITHMETIC = ("fma_f32", "dot_bf16", "tile_bf16", "dot_int8", "tile_int8")
# Which of them bound the products of a precision: the fastest one that there is.
LOOPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "f32": ("fma_f32",),
        "bf16": ("tile_bf16", "dot_bf16", "fma_f32"),
        "int8": ("tile_int8", "dot_int8"),
        "int4": ("tile_int8", "dot_int8"),
    }
)
READ = "read_gb_per_s"
FORK_JOIN = "fork_join_us"
_CHUNKS_EACH = 20  # of each thread: a loop takes some 10 ms
_FORKS = 2000
_NOTHING = np.empty(0, np.uint8)


def machine_limits(threads: int, *, rounds: int = 5, isa: str = "") -> dict[str, float]:
    """Return medians over some rounds: read bandwidth, arithmetic rates, and fork-join time.

    The time to hand work to all threads is in microseconds; 0 for one thread.
    """
    pool = _native.Pool(threads, isa=isa)
    with ReadProbe(threads, isa=isa) as probe:
        limits = {READ: probe.gb_per_s(rounds=rounds)}
    for name in ARITHMETIC:
        rates = [_rate(pool, name) for _ in range(rounds)]
        if rates[0]:
            limits[name] = float(np.median(rates))
    limits[FORK_JOIN] = _fork_join_us(pool) if threads > 1 else 0.0
    return limits


def peak_gflops(limits: Mapping[str, float], precision: str) -> float | None:
    """Return the peak arithmetic rate of a precision's products; None if not measured."""
    return max((limits[name] for name in LOOPS[precision] if name in limits), default=None)


def _rate(pool: _native.Pool, name: str) -> float:
    done, seconds = _native.limit(pool, name, _CHUNKS_EACH * pool.num_threads, _NOTHING)
    return done / seconds / 1e9


def _fork_join_us(pool: _native.Pool) -> float:
    times = [_native.limit(pool, "fork_join", _FORKS, _NOTHING) for _ in range(5)]
    return float(np.median([1e6 * seconds / done for done, seconds in times]))
