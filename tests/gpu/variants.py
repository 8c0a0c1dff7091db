"""Count the variants Triton compiles of each kernel, and print {case: {kernel: count}}.

    TRITON_INTERPRET=0 python -m tests.gpu.variants

Nothing is compiled or launched: launches are bound to Triton's own keys. A case is one launcher
called for several row counts that use the same tile. Needs no device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.choose_tokens import choose_tokens
from quire.execute.gpu.kernels.device_params import WORDS, DeviceSamplingParams
from quire.execute.gpu.kernels.edit_logits import Edits, add_late_tokens, edit_logits
from quire.execute.gpu.kernels.int4_layout import Int4Weight
from quire.execute.gpu.kernels.last_tokens import keep_last_tokens, take_last_tokens
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.kernels.linear_fixed import Workspace, linear
from quire.execute.gpu.kernels.linear_gemv import MAX_ROWS, gemv
from quire.execute.gpu.kernels.linear_int4 import linear_int4
from quire.execute.gpu.kernels.logprobs import score_listed, score_rows
from tests.gpu.compile_for import TARGET

MOST, WIDTH, OUTPUTS, VOCABULARY = 512, 2048, 64, 1024
FEW, MANY = (1, 2, 7, 12, 16), (385, 400, 500, 512)
Launch = Callable[[int], Any]


@contextmanager
def keys() -> Iterator[dict[str, set[str]]]:
    """Bind launches and record their keys by kernel while open."""
    found: dict[str, set[str]] = {}
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, make_backend(TARGET))
        _, specialization, options = bind(*arguments, **named)
        found.setdefault(self.fn.__name__, set()).add(f"{specialization} {options}")

    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run = launch


def _rows(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> torch.Tensor:
    return torch.empty((MOST, width), dtype=dtype)


def _linear() -> Launch:
    x, y, weight = _rows(), _rows(width=OUTPUTS), _rows()[:OUTPUTS]
    workspace = Workspace.of(2**22, "cpu")
    return lambda rows: linear(x[:rows], weight, y[:rows], workspace=workspace)


def _bytes(dtype: torch.dtype, scaled: str) -> Launch:
    x, y = _rows(), _rows(width=OUTPUTS)
    room = ByteRows.empty(MOST, WIDTH, "cpu", dtype=dtype, scaled=scaled)
    weight = ByteWeight(torch.empty((OUTPUTS, WIDTH), dtype=dtype), torch.ones(OUTPUTS))
    return lambda rows: linear_bytes(quantize_rows(x[:rows], room), weight, y[:rows])


def _int4() -> Launch:
    x, y = _rows(), _rows(width=OUTPUTS)
    room = ByteRows.empty(MOST, WIDTH, "cpu")
    weight = Int4Weight(
        packed=torch.empty((OUTPUTS // 64, WIDTH // 128, 64, 64), dtype=torch.uint8),
        scales=torch.ones((WIDTH // 128, OUTPUTS)),
        zeros=None,
        group=128,
        columns=WIDTH,
    )
    return lambda rows: linear_int4(quantize_rows(x[:rows], room), weight, y[:rows])


def _gemv() -> Launch:
    x, y = _rows(), _rows(width=OUTPUTS)
    room = ByteRows.empty(MOST, WIDTH, "cpu")
    weight = ByteWeight(torch.empty((OUTPUTS, WIDTH), dtype=torch.int8), torch.ones(OUTPUTS))
    workspace = Workspace.of(2**22, "cpu")

    def launch(rows: int) -> None:
        taken = min(rows, MAX_ROWS)
        gemv(quantize_rows(x[:taken], room), weight, y[:taken], workspace=workspace)

    return launch


def _choice() -> Launch:
    logits = _rows(torch.float32, VOCABULARY)

    def launch(rows: int) -> None:
        params = DeviceSamplingParams.seen_in(torch.zeros((WORDS, rows), dtype=torch.int32))
        choose_tokens(logits[:rows], params, torch.empty(rows, dtype=torch.int32))

    return launch


def _scores() -> Launch:
    logits = _rows(torch.float32, VOCABULARY)

    def launch(rows: int) -> None:
        ids = torch.zeros(rows, dtype=torch.int32)
        score_listed(logits[:rows], score_rows(logits[:rows], ids, ids, max_top=2), ids, ids)

    return launch


def _edits() -> Launch:
    logits, last = _rows(torch.float32, VOCABULARY), torch.zeros(MOST, dtype=torch.int32)

    def launch(rows: int) -> None:
        edits = Edits(
            entries=torch.zeros((8, rows), dtype=torch.int32),
            late=torch.zeros((3, rows), dtype=torch.int32),
            masked=torch.zeros((2, rows), dtype=torch.int32),
            masks=torch.zeros((1, VOCABULARY // 32), dtype=torch.int32),
        )
        add_late_tokens(edits, last)
        edit_logits(logits[:rows], edits)

    return launch


def _last() -> Launch:
    last = torch.zeros(MOST, dtype=torch.int32)

    def launch(rows: int) -> None:
        ids = torch.from_numpy(np.zeros(rows, np.int32))
        take_last_tokens(ids, ids, last)
        keep_last_tokens(last, ids, ids)

    return launch


CASES: dict[str, Callable[[], Launch]] = {
    "exact": _linear,
    "int8": lambda: _bytes(torch.int8, "block"),
    "fp8": lambda: _bytes(torch.float8_e4m3fn, "token"),
    "int4": _int4,
    "one row or two": _gemv,
    "choice": _choice,
    "scores": _scores,
    "edits": _edits,
    "last tokens": _last,
}


def main() -> None:
    """Print the counts, for few rows and for many."""
    found: dict[str, dict[str, int]] = {}
    for title, make in CASES.items():
        for counts in (FEW, MANY):
            launch = make()
            with keys() as kept:
                for rows in counts:
                    launch(rows)
            of_case = {kernel: len(variants) for kernel, variants in kept.items()}
            found[f"{title}, {counts[0]} to {counts[-1]} rows"] = of_case
    print(json.dumps(found))


if __name__ == "__main__":
    main()
