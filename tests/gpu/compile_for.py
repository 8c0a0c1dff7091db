"""Compiles every kernel that a launcher launches, for a card that is not there.

    TRITON_INTERPRET=0 python -m tests.gpu.compile_for [CASE...]

Launchers are given tensors without memory; instead of a launch the kernel is compiled down to
machine code for compute capability 9.0, with Triton's own assembler. Prints a JSON line a kernel:
registers, bytes spilled, shared memory, matrix instructions, whether multiply-adds were fused.
Needs no device and no driver. Knows nothing of speed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint32: "*u32",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "maxnreg")
Report = dict[str, Any]


def _argument(value: Any) -> tuple[str, bool]:
    """Its type, and whether it counts as a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype], True
    if isinstance(value, float):
        return "fp32", False
    return ("i32" if abs(value) < 2**31 else "i64"), value % 16 == 0


def _compiled(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Report:
    options = {name: named.pop(name) for name in OPTIONS if name in named}
    bound = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    signature, constants, attributes = {}, {}, {}
    for place, (parameter, name) in enumerate(zip(kernel.params, kernel.arg_names, strict=True)):
        value = bound[name]
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name], is_aligned = _argument(value)
        if is_aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=TARGET, options=options)
    return _report(made, kernel.fn.__name__)


def _report(made: Any, name: str) -> Report:
    ptx = made.asm["ptx"]
    return {
        "kernel": name,
        **_usage(made.asm["cubin"]),
        "shared": made.metadata.shared,
        "matrix": sorted(set(re.findall(r"wgmma\.mma_async[.\w]+|mma\.sync[.\w]+", ptx))),
        "copies": ptx.count("cp.async"),
        "in_flight": [int(count) for count in re.findall(r"wgmma\.wait_group\S* (\d+)", ptx)],
        "fused": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
    }


def _usage(cubin: bytes) -> Report:
    """Registers a thread, and bytes of its stack: what did not fit into registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"]}


@contextmanager
def compiling() -> Iterator[list[Report]]:
    """While open, launches compile and are recorded."""
    reports: list[Report] = []
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        reports.append(_compiled(self, arguments, dict(named)))

    JITFunction.run = run
    try:
        yield reports
    finally:
        JITFunction.run = launch


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def report(title: str, launch: Callable[[], Any]) -> list[Report]:
    """What one call launches."""
    with compiling() as reports:
        launch()
    return [{"case": title} | found for found in reports]


def main(titles: list[str]) -> None:
    """Print what these cases compile to, or all that are tested."""
    from tests.gpu import compile_attention, compile_cases

    cases = compile_attention.CASES | compile_cases.CASES
    known = cases | compile_attention.MORE
    for title in titles or cases:
        for found in report(title, known[title]):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
