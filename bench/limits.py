"""The machine's limits, by the plain loops of limits.c, compiled here for the machine it runs on.

`python -m bench.limits [--threads N]` prints them. Where there is no C compiler, there are none:
shares of arithmetic are then not told.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from quire.config.machine import num_usable_cpus

SOURCE = Path(__file__).with_name("limits.c")
# Which loops bound the products of a precision: the fastest one that the machine has.
LOOPS = {
    "f32": ("fma_f32",),
    "bf16": ("tile_bf16", "dot_bf16", "fma_f32"),
    "int8": ("tile_int8", "dot_int8"),
    "int4": ("tile_int8", "dot_int8"),
}


def machine_limits(threads: int, *, rounds: int = 5) -> dict[str, float]:
    """10^9 operations (or bytes read) a second for each loop; empty without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        subprocess.run(
            [compiler, "-O2", "-march=native", "-pthread", str(SOURCE), "-o", str(program)],
            check=True,
        )
        done = subprocess.run(
            [str(program), str(threads), str(rounds)], check=True, capture_output=True, text=True
        )
    return {name: float(value) for name, value in json.loads(done.stdout).items()}


def peak_gflops(limits: dict[str, float], precision: str) -> float | None:
    """The arithmetic limit of a precision's products; None where it was not measured."""
    return max((limits[name] for name in LOOPS[precision] if name in limits), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=num_usable_cpus())
    args = parser.parse_args()
    print(json.dumps(machine_limits(args.threads), indent=1))


if __name__ == "__main__":
    main()
