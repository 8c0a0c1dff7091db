"""system_fingerprint: a digest of all an answer depends on beside the request itself.

Weights (names, sizes, headers and a sample of the content: a changed file is noticed, a gigabyte
is not read), the program that runs with the numerics version, the executor's recipe (instruction
set), the parallel degree and the KV dtype. Two engines with one fingerprint give one answer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from quire.program.program import Program
from quire.program.serialize import digest as program_digest

_HEAD_BYTES = 256 * 1024
_SAMPLE_BYTES = 4 * 1024
_NUM_SAMPLES = 64


def system_fingerprint(
    program: Program,
    weight_files: Iterable[Path],
    *,
    recipe: str,
    parallel_degree: int = 1,
) -> str:
    """ "fp_" and 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (
        weights_digest(weight_files),
        program_digest(program),
        recipe,
        str(parallel_degree),
        ",".join(cache.dtype for cache in program.caches),
    ):
        digest.update(part.encode() + b"\0")
    return f"fp_{digest.hexdigest()}"


def weights_digest(files: Iterable[Path]) -> str:
    """Of each file its name, size, first 256 KiB (the header) and 64 evenly spaced pieces."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(files, key=lambda path: path.name):
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{num_bytes}\0".encode())
        with path.open("rb") as file:
            digest.update(os.pread(file.fileno(), _HEAD_BYTES, 0))
            spread = max(num_bytes - _SAMPLE_BYTES, 0)
            for index in range(_NUM_SAMPLES):
                offset = spread * (index + 1) // _NUM_SAMPLES
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()
