"""The launches that are compiled for an H200: layers of an 8B model, for one row and for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.execute.gpu.kernels import rows as row_kernels
from quire.execute.gpu.kernels.activation import activation
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.choose_tokens import choose_tokens
from quire.execute.gpu.kernels.edit_logits import Edits, edit_logits
from quire.execute.gpu.kernels.grouped import Groups
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.kernels.linear_fixed import Workspace, linear
from quire.execute.gpu.kernels.linear_int4 import Int4Weight, linear_int4
from quire.execute.gpu.kernels.logprobs import score_listed, score_rows
from quire.execute.gpu.kernels.lora import adapt
from quire.execute.gpu.kernels.moe import experts
from quire.execute.gpu.kernels.norm import norm
from quire.execute.gpu.kernels.wishes import Wishes
from tests.gpu.compile_for import tensor

F32, I32, E4M3 = torch.float32, torch.int32, torch.float8_e4m3fn
WIDTH, MIDDLE = 4096, 14336


def _linear(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x, y = tensor(rows, columns, dtype=dtype), tensor(rows, WIDTH)
    workspace = Workspace.of(2**24, "meta")
    linear(x, tensor(WIDTH, columns, dtype=dtype), y, workspace=workspace)


def _int8(rows: int) -> None:
    x = quantize_rows(tensor(rows, WIDTH), ByteRows.empty(rows, WIDTH, "meta"))
    values, scales = tensor(MIDDLE, WIDTH, dtype=torch.int8), tensor(MIDDLE, dtype=F32)
    linear_bytes(x, ByteWeight(values, scales), tensor(rows, MIDDLE))


def _int4(rows: int, group: int, *, has_zeros: bool = False, by_integers: bool = True) -> None:
    groups, x = WIDTH // group, tensor(rows, WIDTH)
    weight = Int4Weight(
        packed=tensor(MIDDLE // 64, WIDTH // 128, 64, 64, dtype=torch.uint8),
        scales=tensor(groups, MIDDLE),
        zeros=tensor(groups, MIDDLE, dtype=torch.uint8) if has_zeros else None,
        group=group,
        columns=WIDTH,
    )
    values = quantize_rows(x, ByteRows.empty(rows, WIDTH, "meta")) if by_integers else x
    linear_int4(values, weight, tensor(rows, MIDDLE))


VOCABULARY = 128256


def _wishes(rows: int) -> Wishes:
    """Without memory, whose bits cannot be seen as another type's."""
    numbers = {name: tensor(rows, dtype=F32) for name in ("temperature", "top_p", "min_p")}
    ints = {name: tensor(rows, dtype=I32) for name in ("top_k", "streams", "positions")}
    seeds = tensor(rows, dtype=torch.int64)
    return Wishes(words=tensor(8, rows, dtype=I32), seeds=seeds, **numbers, **ints)


def _scores() -> None:
    logits, ids = tensor(4, VOCABULARY, dtype=F32), tensor(4, dtype=I32)
    score_listed(logits, score_rows(logits, ids, ids, most_top=20), ids, ids)


def _edits() -> None:
    words = -(-VOCABULARY // 32)
    entries, masked = tensor(8, 100, dtype=I32), tensor(2, 3, dtype=I32)
    edits = Edits(entries=entries, masked=masked, masks=tensor(3, words, dtype=I32))
    edit_logits(tensor(4, VOCABULARY, dtype=F32), edits)


def _fp8(rows: int, *, by_block: bool) -> None:
    room = ByteRows.empty(rows, WIDTH, "meta", dtype=E4M3, scaled="block" if by_block else "token")
    shape = (MIDDLE // 128, WIDTH // 128) if by_block else (MIDDLE,)
    weight = ByteWeight(tensor(MIDDLE, WIDTH, dtype=E4M3), tensor(*shape, dtype=F32))
    linear_bytes(quantize_rows(tensor(rows, WIDTH), room), weight, tensor(rows, MIDDLE))


def _experts(rows: int) -> None:
    ids, shares = tensor(rows, 8, dtype=I32), tensor(rows, 8, dtype=F32)
    x, gate_up, down = tensor(rows, 2048), tensor(128, 2 * 768, 2048), tensor(128, 2048, 768)
    experts(x, gate_up, down, ids, shares, tensor(rows, 2048, dtype=F32))


def _adapt(rows: int) -> None:
    groups = Groups.of(tensor(rows, dtype=I32), 8)
    shrink, expand, y = tensor(8, 16, WIDTH), tensor(8, MIDDLE, 16), tensor(rows, MIDDLE)
    adapt(tensor(rows, WIDTH), shrink, expand, tensor(8, dtype=F32), groups, y)


CASES: dict[str, Callable[[], Any]] = {
    "norm with residual": lambda: norm(
        tensor(8, WIDTH, dtype=F32),
        tensor(8, WIDTH),
        weight=tensor(WIDTH, dtype=F32),
        delta=tensor(8, WIDTH),
        eps=1e-5,
    ),
    "activation": lambda: activation(
        tensor(8, MIDDLE), tensor(8, MIDDLE), tensor(8, MIDDLE), form="gelu_tanh"
    ),
    "gather": lambda: row_kernels.gather_rows(
        tensor(128256, WIDTH), tensor(8, dtype=I32), tensor(8, WIDTH, dtype=F32)
    ),
    "gather of fp8": lambda: row_kernels.gather_rows(
        tensor(128256, WIDTH, dtype=E4M3),
        tensor(8, dtype=I32),
        tensor(8, WIDTH, dtype=F32),
        scales=tensor(128256, dtype=F32),
    ),
    "soft cap": lambda: row_kernels.soft_cap(tensor(8, 128256, dtype=F32), 30.0),
    "exact bf16, 1 row": lambda: _linear(1, MIDDLE),
    "exact bf16, 33 rows": lambda: _linear(33, MIDDLE),
    "exact bf16, 2048 rows": lambda: _linear(2048, MIDDLE),
    "exact bf16, 2048 rows of 1024": lambda: _linear(2048, 1024),
    "exact f32, 2048 rows": lambda: _linear(2048, WIDTH, F32),
    "token choice": lambda: choose_tokens(
        tensor(4, VOCABULARY, dtype=F32), _wishes(4), tensor(4, dtype=I32)
    ),
    "scores": _scores,
    "edits of logits": _edits,
    "fp8 by block, 1 row": lambda: _fp8(1, by_block=True),
    "fp8 by block, 2048 rows": lambda: _fp8(2048, by_block=True),
    "fp8 by channel, 2048 rows": lambda: _fp8(2048, by_block=False),
    "experts, 4 rows": lambda: _experts(4),
    "experts, 4096 rows": lambda: _experts(4096),
    "adapters, 4 rows": lambda: _adapt(4),
    "int8, 1 row": lambda: _int8(1),
    "int8, 33 rows": lambda: _int8(33),
    "int8, 2048 rows": lambda: _int8(2048),
    "int4-g32 by int8, 1 row": lambda: _int4(1, 32),
    "int4-g32 by int8, 2048 rows": lambda: _int4(2048, 32),
    "int4-g128-zp by int8, 1 row": lambda: _int4(1, 128, has_zeros=True),
    "int4-g64 by bf16, 1 row": lambda: _int4(1, 64, by_integers=False),
    "int4-g128 by bf16, 2048 rows": lambda: _int4(2048, 128, by_integers=False),
}
