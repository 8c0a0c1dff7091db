"""All kernels of the check compiled by as many processes as there are processors, before the card
is asked for anything: what sections then launch is in Triton's cache.

Knows no kernel (launches.py sees which). A dry run compiles one in many, and makes no stubs: these
need a driver.
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
ONE_IN = 150  # of a dry run's kernels
CAPABILITY = 90  # of a dry run


def compile_all(stage: Stage) -> dict[str, Any]:
    """How many, and how long that took. Raises RuntimeError with the words of a process that
    failed."""
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
    told = [process.communicate() for process in running]
    for process, (_, words) in zip(running, told, strict=True):
        if process.returncode:
            raise RuntimeError(f"compiling ahead failed: {words[-1200:]}")
    counts = [json.loads(said.splitlines()[-1])["compiled"] for said, _ in told]
    return {
        "compiled": sum(counts),
        "processes": processes,
        "seconds": time.perf_counter() - began,
    }
