"""Record what a GPU would launch, without one, and compile it in advance.

    python -m bench.gpu.launches [--capability 90] [--share 0/1] [--service] [--stubs] [--look]

Sections of the check, and with --service serving engines (service.py), are rehearsed: real shapes,
tensors without memory. Each launch goes through Triton's own launcher up to the compiler, with its
real types, alignments and constants, so a GPU run later finds the compiled kernel in Triton's
cache, and every launch is recorded. --share I/N: compile each N-th kernel in one of N processes.
--stubs: also build the launcher stubs, which needs libcuda. --look: print a JSON line per kernel:
registers, spilled bytes, shared memory. Needs no device, and measures no speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.gpu.sections import SECTIONS
from bench.gpu.stage import Stage

# Other sections launch kernels of others or none; build calls this module.
OTHERS = ("build", "limits", "gaps", "peer", "ranks")
SERVICE = "bench.gpu.service:service"
Made = Callable[[str, str, Any], None]


class AbsentDriver:
    """A GPU driver as Triton's launcher queries it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return the compilation target."""
        return self._target

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return 0; it is never used."""
        return 0


class Placed:
    """A tensor without memory as the launcher sees it: its type, and an address aligned like memory
    of a GPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = 2**20 + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """Return the address."""
        return self._at

    def key(self) -> tuple[str, bool]:
        """Return everything that the launcher derives from it."""
        return str(self.dtype), self._at % 16 == 0


def _key(argument: Any) -> Any:
    """Return everything that may cause a kernel to be recompiled."""
    if isinstance(argument, Placed):
        return argument.key()
    if isinstance(argument, bool) or not isinstance(argument, int):
        return type(argument).__name__ if isinstance(argument, float) else argument
    return "int", argument == 1, argument % 16 == 0, abs(argument) < 2**31


@contextmanager
def seen(made: Made, share: tuple[int, int], where: list[str]) -> Iterator[set[str]]:
    """Compile launches of this share on first use while open, and report (section, kernel,
    compiled). Yields the set of the names of all launched kernels, filled as they are launched.
    """
    launch, known, names = JITFunction.run, set[Any](), set[str]()

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        placed = [Placed(one) if isinstance(one, torch.Tensor) else one for one in arguments]
        kept = [
            one if parameter.is_constexpr else _key(one)
            for one, parameter in zip(placed, self.params, strict=False)
        ]
        key = (self, repr(kept), repr(sorted(named.items())))
        if key in known:
            return
        known.add(key)
        names.add(self.fn.__name__)
        if len(known) % share[1] == share[0]:
            compiled = launch(self, *placed, grid=grid, warmup=True, **named)
            made(where[0], self.fn.__name__, compiled)

    JITFunction.run = run
    try:
        yield names
    finally:
        JITFunction.run = launch


def rehearse(
    capability: int, share: tuple[int, int], made: Made, *, with_service: bool = False
) -> set[str]:
    """Run all sections that launch our kernels; return the names of the kernels."""
    driver.set_active(AbsentDriver(capability))
    where = [""]
    stage = Stage(
        is_dry=False,
        is_rehearsal=True,
        ends=time.monotonic() + 3600,
        report=lambda what, value: None,
    )
    functions = {name: section.function for name, section in SECTIONS.items() if name not in OTHERS}
    if with_service:
        functions["service"] = SERVICE
    with seen(made, share, where) as names:
        for name, place in functions.items():
            where[0] = name
            module, _, function = place.partition(":")
            getattr(importlib.import_module(module), function)(stage)
    return names


def usage(compiled: Any) -> dict[str, Any]:
    """Return registers per thread, stack bytes (spills), shared memory, matrix instructions, and
    whether multiply-adds were fused.
    """
    text = tool_output("cuobjdump", "-res-usage", compiled.asm["cubin"])
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    ptx = compiled.asm["ptx"]
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "matrix": sorted(set(re.findall(r"wgmma\.mma_async[.\w]+|mma\.sync[.\w]+", ptx))),
        "copies": ptx.count("cp.async"),
        "in_flight": [int(count) for count in re.findall(r"wgmma\.wait_group\S* (\d+)", ptx)],
        "fused": len(re.findall(r"\bfma\.rn\.f32\b", ptx)),
    }


def tool_output(tool: str, option: str, cubin: bytes) -> str:
    """Return the output of one of the binary tools in Triton's package for machine code."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    """Compile a share; print the counts."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--service", action="store_true")
    parser.add_argument("--stubs", action="store_true")
    parser.add_argument("--look", action="store_true")
    arguments = parser.parse_args()
    number, _, of = arguments.share.partition("/")
    count, began = 0, time.monotonic()

    def made(where: str, kernel: str, compiled: Any) -> None:
        nonlocal count
        count += 1
        if arguments.stubs:
            CudaLauncher(compiled.src, compiled.metadata)
        if arguments.look:
            said = {"section": where, "kernel": kernel, **usage(compiled)}
            print(json.dumps(said), flush=True)

    share = int(number), int(of)
    names = rehearse(arguments.capability, share, made, with_service=arguments.service)
    last = {"compiled": count, "seconds": time.monotonic() - began, "launched": sorted(names)}
    print(json.dumps(last), flush=True)


if __name__ == "__main__":
    sys.exit(main())
