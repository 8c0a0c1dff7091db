"""Print the memory of this process while weights are packed: one JSON line per scheme.

    python -m tests.unit.execute.packing_memory FOLDER SCHEME...

Knows nothing of the limits. A first load is not counted: it starts the threads and their arenas.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.quantize import quantize
from quire.program.tensors import DType
from quire.weights.checkpoint import open_checkpoint


def load(folder: Path, scheme: str) -> tuple[int, list[tuple[int, int]]]:
    """Return the bytes of the weights, and (packed, held) bytes at each progress report."""
    plain = build_program(open_model(folder), dtype=DType.BF16, max_positions=64)
    program, checkpoint = quantize(plain, scheme), open_checkpoint(folder)
    counted: list[tuple[int, int]] = []
    ctypes.CDLL(None).malloc_trim(0)
    before = _anonymous_bytes()
    executor = NativeExecutor(
        program,
        checkpoint,
        ExecutorOptions(
            limits=StepLimits(max_tokens=4, max_samples=1, max_sequences=1),
            num_threads=2,
            progress=lambda done, _: counted.append((done, _anonymous_bytes() - before)),
        ),
    )
    executor.close()
    return program.weight_bytes, counted


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.M)
    return int(kilobytes) * 1024


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    load(folder, "int4")
    for scheme in sys.argv[2:]:
        weight_bytes, counted = load(folder, scheme)
        print(json.dumps({"scheme": scheme, "weight_bytes": weight_bytes, "counted": counted}))
