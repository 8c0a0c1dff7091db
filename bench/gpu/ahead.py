"""Compile all kernels of the check, with one process per processor, before the GPU is used.

What sections launch is then in Triton's cache; launches.py determines the kernels. A dry run
compiles a small share, without launcher stubs, which need a driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

from bench.gpu.stage import Stage

MAX_PROCESSES = 32
ONE_IN = 150  # a dry run compiles one kernel in 150
CAPABILITY = 90  # compute capability in a dry run


def compile_all(stage: Stage) -> dict[str, Any]:
    """Return how many kernels were compiled, and the time. Raises RuntimeError with a process's
    errors.
    """
    capability, processes, parts = CAPABILITY, 1, ONE_IN
    if stage.is_on_card:
        major, minor = torch.cuda.get_device_capability(stage.device)
        capability = 10 * major + minor
        processes = parts = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    command = [sys.executable, "-m", "bench.gpu.launches", "--capability", str(capability)]
    command += ["--stubs"] if stage.is_on_card else []
    began = time.perf_counter()
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, "--share", f"{number}/{parts}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    outputs = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"compiling ahead failed: {errors[-1200:]}")
    counts = [json.loads(out.splitlines()[-1])["compiled"] for out, _ in outputs]
    return {
        "compiled": sum(counts),
        "processes": processes,
        "seconds": time.perf_counter() - began,
    }
