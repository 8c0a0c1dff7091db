"""Compiles launches for a GPU that is not there: what the interpreter takes, a compiler may not.

Run as a program, without TRITON_INTERPRET. Stands in for a driver of compute capability 9.0, calls
launchers with CPU tensors, and lets each launch stop where it would start. Prints a line a kernel:
its name and bytes of shared memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

MAX_SHARED_BYTES = 232_448  # of a program on compute capability 9.0


class NoGpu(DriverBase):
    """A driver of one GPU that can be compiled for and nothing else."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    @staticmethod
    def is_active() -> bool:
        return True


def watch() -> list[Any]:
    """From here on launches compile and do not start; what was compiled is in the list."""
    triton.runtime.driver.set_active(NoGpu())
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only
    return compiled


def main(names: list[str]) -> int:
    """Compile the cases named."""
    compiled = watch()
    for name in names:
        CASES[name]()
        for kernel in compiled:
            print(name, kernel.metadata.name, kernel.metadata.shared, flush=True)
            assert kernel.metadata.shared <= MAX_SHARED_BYTES
        assert compiled, f"{name} launched nothing"
        compiled.clear()
    return 0


def _attention(**settings: Any) -> Callable[[], None]:
    def case() -> None:
        from tests.gpu.attention_world import Shape, World

        rows = settings.pop("rows")
        programs = settings.pop("programs", 0)
        world = World(Shape(**settings), [260])
        world.run([(0, 257, 260 if programs == 0 else 258)], rows=rows, programs=programs)

    return case


def _heads(precision: str, dtype: torch.dtype) -> None:
    from quire.execute.gpu.kernels import store_kv
    from quire.execute.gpu.kernels.cache_layout import CachePool

    pool = CachePool.zeros(
        precision, layers=1, blocks=2, kv_heads=2, block_size=16, head_dim=128, device="cpu"
    )
    q, k = torch.zeros((2, 1024), dtype=dtype), torch.zeros((2, 256), dtype=dtype)
    slots, table = torch.zeros(2, dtype=torch.int32), torch.zeros((8, 64))
    angles, weight = store_kv.Angles(table, table, slots), torch.zeros(128)
    norm = store_kv.HeadNorm(weight, weight, 1e-6)
    store_kv.prepare_heads(q, k, k, pool.layer(0), slots, angles=angles, norm=norm)
    store_kv.store_kv(k, k, pool.layer(0), slots)
    store_kv.rope(q, angles, head_dim=128)


def _blocks() -> None:
    from quire.execute.gpu.kernels import block_copy
    from quire.execute.gpu.kernels.cache_layout import CachePool

    pool = CachePool.zeros(
        "fp8", layers=2, blocks=4, kv_heads=2, block_size=16, head_dim=64, device="cpu"
    )
    one, raw = (
        torch.ones(1, dtype=torch.int32),
        torch.zeros((1, pool.block_bytes), dtype=torch.uint8),
    )
    block_copy.copy_blocks(pool, np.array([0], np.int32), np.array([1], np.int32))
    block_copy.export_blocks(pool, one, raw)
    block_copy.import_blocks(pool, one, raw)


CASES: dict[str, Callable[[], None]] = {
    "decode": _attention(rows=16, head_dim=128, group=4, programs=4),
    "prefill": _attention(rows=128, head_dim=128, group=4, block_size=64),
    "decode int8": _attention(rows=16, precision="int8", head_dim=64, programs=4, window=99),
    "prefill fp8": _attention(rows=64, precision="fp8", head_dim=80, soft_cap=5.0, has_sinks=True),
    "heads bf16": lambda: _heads("bf16", torch.bfloat16),
    "heads int8": lambda: _heads("int8", torch.bfloat16),
    "heads fp8": lambda: _heads("fp8", torch.float32),
    "blocks": _blocks,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CASES)))
