"""The machine card of the GPU check: what its numbers were measured on, without its owner.

Like quire/bench/machine.py, without the compiled module, which may be missing.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torch", "triton", "numpy", "transformers", "ml_dtypes", "msgspec", "pyzmq")
ASKED = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"


def machine_card() -> dict[str, Any]:
    """Return plain numbers and product names, ready for JSON."""
    return {
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "compiled_module": _is_compiled(),
    }


def _is_compiled() -> bool:
    try:
        import quire._native  # noqa: F401  whether it is there is what is asked
    except ImportError:
        return False
    return True


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gpus() -> list[str] | str:
    """Return the GPUs as reported by nvidia-smi; a missing nvidia-smi is no error."""
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not available: {type(error).__name__}"
    return said.stdout.strip().splitlines()
