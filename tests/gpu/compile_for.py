"""Compile every kernel that a launcher launches, without a GPU.

    TRITON_INTERPRET=0 python -m tests.gpu.compile_for [CASE...]

Launchers get tensors without memory; instead of launching, the kernel is compiled to machine code
for compute capability 9.0 with Triton's own assembler. Prints a JSON line per kernel: registers,
spilled bytes, shared memory, matrix instructions, whether multiply-adds were fused, and per loop
the kinds of matrix instructions. Needs no device and no driver, and measures no speed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from bench.gpu.launches import tool_output, usage
from quire.execute.gpu.kernels import attention as kernels
from quire.execute.gpu.kernels import block_copy, store_kv
from quire.execute.gpu.kernels import rows as row_kernels
from quire.execute.gpu.kernels.activation import activation
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.kernels.choose_tokens import choose_tokens
from quire.execute.gpu.kernels.context_merge import merge_ranks
from quire.execute.gpu.kernels.device_params import DeviceSamplingParams
from quire.execute.gpu.kernels.edit_logits import Edits, add_late_tokens, edit_logits
from quire.execute.gpu.kernels.grouped import GroupRoom, Groups, grouped
from quire.execute.gpu.kernels.grouped_ints import StackedBytes, StackedInt4, grouped_ints
from quire.execute.gpu.kernels.last_tokens import keep_last_tokens, take_last_tokens
from quire.execute.gpu.kernels.linear_bytes import ByteWeight, linear_bytes
from quire.execute.gpu.kernels.linear_fixed import Workspace, linear
from quire.execute.gpu.kernels.linear_gemv import gemv
from quire.execute.gpu.kernels.linear_int4 import Int4Weight, linear_int4
from quire.execute.gpu.kernels.logprobs import score_listed, score_rows
from quire.execute.gpu.kernels.norm import norm
from quire.execute.gpu.kernels.routing import (
    HolderTables,
    OwnSlots,
    choose_slots,
    route,
    weighted_sum,
)

F32, I32, E4M3 = torch.float32, torch.int32, torch.float8_e4m3fn
TARGET = GPUTarget("cuda", 90, 32)
LOOP_COUNTS = {
    "matrix": r"HGMMA|QGMMA|IGMMA|HMMA|IMMA",
    "waits": r"WARPGROUP\.DEPBAR",
    "spilled": r"LDL|STL",
}
Report = dict[str, Any]


def _compiled(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Report:
    """Compile as a launch would: arguments of 1 become constants, multiples of 16 are
    specialized.
    """
    backend = make_backend(TARGET)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*arguments, **named)
    options, signature, constants, attributes = kernel._pack_args(
        backend, named, bound, specialization, options
    )
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=TARGET, options=options.__dict__)
    return _report(made, kernel.fn.__name__)


def _report(made: Any, name: str) -> Report:
    loops = _matrix_loops(tool_output("nvdisasm", "-c", made.asm["cubin"]))
    return {"kernel": name, **usage(made), "loops": loops}


def _matrix_loops(code: str) -> list[dict[str, int]]:
    """Return counts for each innermost loop with matrix instructions.

    The counts are: instructions, matrix instructions, waits for them, accesses to spilled
    registers.
    """
    names: list[str] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif found := re.search(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)(.*);", line):
            target = re.search(r"\((\.L_\w+)\)", found[2])
            if found[1] == "BRA" and target and target[1] in labels:
                spans.append((labels[target[1]], len(names)))
            names.append(found[1])
    loops = []
    for first, last in spans:
        inside = [other for other in spans if first <= other[0] and other[1] < last]
        counts = {
            name: sum(bool(re.match(form, other)) for other in names[first : last + 1])
            for name, form in LOOP_COUNTS.items()
        }
        is_innermost = not any(
            re.match(LOOP_COUNTS["matrix"], name)
            for other in inside
            for name in names[other[0] : other[1] + 1]
        )
        if counts["matrix"] and is_innermost:
            loops.append({"instructions": last - first + 1} | counts)
    return loops


@contextmanager
def compiling() -> Iterator[list[Report]]:
    """Compile and record launches while open."""
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
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def report(title: str, launch: Callable[[], Any]) -> list[Report]:
    """Report the kernels that one call launches."""
    with compiling() as reports:
        launch()
    return [{"case": title} | found for found in reports]


# ---- attention and the KV cache: heads of an 8B model

LAYERS, BLOCKS, KV_HEADS, GROUP = 2, 64, 8, 4


def _pool(precision: str, head_dim: int, block_size: int = 16) -> CachePool:
    return CachePool.zeros(
        precision,
        layers=LAYERS,
        blocks=BLOCKS,
        kv_heads=KV_HEADS,
        block_size=block_size,
        head_dim=head_dim,
        device="meta",
    )


def attention(
    *,
    precision: str = "bf16",
    head_dim: int = 128,
    exact: bool = False,
    wide: bool = False,
    block_size: int = 16,
    sinks: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Compile wide tiles, or narrow tiles split into work items and merged."""
    dtype = F32 if precision == "f32" else torch.bfloat16
    size = dtype.itemsize
    rows = kernels.narrow_rows(GROUP, is_exact=exact, itemsize=size)
    if wide:
        rows = kernels.wide_rows(GROUP, head_dim, itemsize=size)
    q = tensor(64, KV_HEADS * GROUP * head_dim, dtype=dtype)
    room = {"kv_heads": KV_HEADS, "rows": GROUP, "head_dim": head_dim, "device": "meta"}
    kernels.attention(
        q,
        _pool(precision, head_dim, block_size).layer(0),
        q,
        tiles=kernels.DeviceTiles(
            rows=rows,
            items=tensor(64, 6, dtype=I32),
            merges=tensor(64, 3, dtype=I32),
            partials=None if wide else kernels.Partials.empty(64, **room),
        ),
        positions=tensor(64, dtype=I32),
        tables=tensor(64, 128, dtype=I32),
        scale=0.088,
        window=window,
        soft_cap=soft_cap,
        sinks=tensor(KV_HEADS * GROUP, dtype=F32) if sinks else None,
    )


def _heads(precision: str) -> None:
    dtype = F32 if precision == "f32" else torch.bfloat16
    q, k = (tensor(64, heads * 128, dtype=dtype) for heads in (KV_HEADS * GROUP, KV_HEADS))
    slots, table, weight = (
        tensor(64, dtype=I32),
        tensor(4096, 64, dtype=F32),
        tensor(128, dtype=F32),
    )
    angles, norm = store_kv.Angles(table, table, slots), store_kv.HeadNorm(weight, weight, 1e-6)
    cache = _pool(precision, 128).layer(0)
    store_kv.prepare_heads(q, k, k, cache, slots, angles=angles, norm=norm)
    store_kv.store_kv(k, k, cache, slots)
    store_kv.rope(q, angles, head_dim=128)


def _blocks() -> None:
    pool, listed = _pool("bf16", 128), tensor(2, dtype=I32)
    block_copy.copy_blocks(pool, np.array([0], np.int32), np.array([1], np.int32))
    raw = tensor(2, pool.block_bytes, dtype=torch.uint8)
    block_copy.export_blocks(pool, listed, raw)
    block_copy.import_blocks(pool, listed, raw)


ATTENTION: dict[str, Callable[[], Any]] = {
    "decode attention": lambda: attention(),
    "decode attention, fp8": lambda: attention(precision="fp8"),
    "prefill attention": lambda: attention(wide=True),
    "prefill attention, window, cap and sinks": lambda: attention(
        wide=True, window=1024, soft_cap=30.0, sinks=True
    ),
    "heads into int8": lambda: _heads("int8"),
    "heads into fp8": lambda: _heads("fp8"),
    "blocks": _blocks,
}


# ---- everything else: layers of an 8B model, for one row and for many

WIDTH, MIDDLE = 4096, 14336


def _linear(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x, y = tensor(rows, columns, dtype=dtype), tensor(rows, WIDTH)
    workspace = Workspace.of(2**24, "meta")
    linear(x, tensor(WIDTH, columns, dtype=dtype), y, workspace=workspace)


def _int8(rows: int) -> None:
    x = quantize_rows(tensor(rows, WIDTH), ByteRows.empty(rows, WIDTH, "meta"))
    values, scales = tensor(MIDDLE, WIDTH, dtype=torch.int8), tensor(MIDDLE, dtype=F32)
    linear_bytes(x, ByteWeight(values, scales), tensor(rows, MIDDLE))


def _int4_weight(outputs: int, group: int, *, has_zeros: bool) -> Int4Weight:
    groups = WIDTH // group
    return Int4Weight(
        packed=tensor(outputs // 64, WIDTH // 128, 64, 64, dtype=torch.uint8),
        scales=tensor(groups, outputs),
        zeros=tensor(groups, outputs, dtype=torch.uint8) if has_zeros else None,
        group=group,
        columns=WIDTH,
    )


def _int4(rows: int, group: int, *, has_zeros: bool = False, by_integers: bool = True) -> None:
    x, weight = tensor(rows, WIDTH), _int4_weight(MIDDLE, group, has_zeros=has_zeros)
    values = quantize_rows(x, ByteRows.empty(rows, WIDTH, "meta")) if by_integers else x
    linear_int4(values, weight, tensor(rows, MIDDLE))


def _gemv(weight: ByteWeight | Int4Weight, outputs: int) -> None:
    x = quantize_rows(tensor(1, WIDTH), ByteRows.empty(1, WIDTH, "meta"))
    gemv(x, weight, tensor(1, outputs), workspace=Workspace.of(2**22, "meta"))


def _int8_gemv(outputs: int) -> None:
    values = tensor(outputs, WIDTH, dtype=torch.int8)
    _gemv(ByteWeight(values, tensor(outputs, dtype=F32)), outputs)


def _int4_gemv(outputs: int, group: int, *, has_zeros: bool = False) -> None:
    _gemv(_int4_weight(outputs, group, has_zeros=has_zeros), outputs)


VOCABULARY = 128256


def _params(rows: int) -> DeviceSamplingParams:
    """Return sampling parameters without memory, which cannot be viewed as another type."""
    numbers = {name: tensor(rows, dtype=F32) for name in ("temperature", "top_p", "min_p")}
    ints = {name: tensor(rows, dtype=I32) for name in ("top_k", "streams", "positions")}
    seeds = tensor(rows, dtype=torch.int64)
    return DeviceSamplingParams(words=tensor(8, rows, dtype=I32), seeds=seeds, **numbers, **ints)


def _scores() -> None:
    logits, ids = tensor(4, VOCABULARY, dtype=F32), tensor(4, dtype=I32)
    score_listed(logits, score_rows(logits, ids, ids, max_top=20), ids, ids)


def _last_tokens() -> None:
    ids, last = tensor(8, dtype=I32), tensor(256, dtype=I32)
    take_last_tokens(ids, ids, last)
    keep_last_tokens(last, ids, ids)


def _edits() -> None:
    words = -(-VOCABULARY // 32)
    entries, masked = tensor(8, 100, dtype=I32), tensor(2, 3, dtype=I32)
    masks, late = tensor(3, words, dtype=I32), tensor(3, 2, dtype=I32)
    edits = Edits(entries=entries, late=late, masked=masked, masks=masks)
    add_late_tokens(edits, tensor(256, dtype=I32))
    edit_logits(tensor(4, VOCABULARY, dtype=F32), edits)


def _fp8(rows: int, *, by_block: bool) -> None:
    room = ByteRows.empty(rows, WIDTH, "meta", dtype=E4M3, scaled="block" if by_block else "token")
    shape = (MIDDLE // 128, WIDTH // 128) if by_block else (MIDDLE,)
    weight = ByteWeight(tensor(MIDDLE, WIDTH, dtype=E4M3), tensor(*shape, dtype=F32))
    linear_bytes(quantize_rows(tensor(rows, WIDTH), room), weight, tensor(rows, MIDDLE))


def _norm(into: ByteRows | None = None) -> None:
    x, delta, weight = tensor(8, WIDTH, dtype=F32), tensor(8, WIDTH), tensor(WIDTH, dtype=F32)
    norm(x, delta, weight=weight, delta=delta, eps=1e-5, out=into, stores_y=into is None)


def _activation(form: str, into: ByteRows | None = None) -> None:
    gate = tensor(8, MIDDLE)
    activation(gate, gate, gate, form=form, out=into, stores_y=into is None)


def _rows(columns: int, scaled: str, dtype: torch.dtype = E4M3) -> ByteRows:
    return ByteRows.empty(8, columns, "meta", dtype=dtype, scaled=scaled)


EXPERTS, CHOICES, HIDDEN, INNER = 128, 8, 2048, 768


def _groups(rows: int) -> Groups:
    ids = tensor(rows, CHOICES, dtype=I32)
    return Groups.of(ids, EXPERTS, GroupRoom.of(rows * CHOICES, EXPERTS, "meta"))


def _experts(rows: int) -> None:
    both, y = tensor(rows * CHOICES, 2 * INNER), tensor(rows * CHOICES, HIDDEN, dtype=F32)
    groups = _groups(rows)
    grouped(
        tensor(rows, HIDDEN), tensor(EXPERTS, 2 * INNER, HIDDEN), both, groups, slots_a_row=CHOICES
    )
    grouped(both[:, :INNER], tensor(EXPERTS, HIDDEN, INNER), y, groups)


def _int_experts(rows: int, group: int) -> None:
    x = quantize_rows(tensor(rows, HIDDEN), ByteRows.empty(rows, HIDDEN, "meta"))
    weights: StackedBytes | StackedInt4
    if group:
        packed = tensor(EXPERTS, 2 * INNER // 64, HIDDEN // 128, 64, 64, dtype=torch.uint8)
        scales = tensor(EXPERTS, HIDDEN // group, 2 * INNER)
        weights = StackedInt4(packed, scales, None, group, HIDDEN)
    else:
        values = tensor(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.int8)
        weights = StackedBytes(values, tensor(EXPERTS, 2 * INNER, dtype=F32))
    grouped_ints(x, weights, tensor(rows * CHOICES, 2 * INNER), _groups(rows), slots_a_row=CHOICES)


def _routing() -> None:
    logits, ids = tensor(8, EXPERTS, dtype=F32), tensor(8, CHOICES, dtype=I32)
    shares, starts = tensor(8, CHOICES, dtype=F32), tensor(9, dtype=I32)
    route(logits, tensor(EXPERTS, dtype=F32), logits, top_k=CHOICES, is_normalized=True)
    route(logits, None, logits, top_k=CHOICES, groups=8, top_groups=4, is_sigmoid=True)
    table, copies = tensor(EXPERTS, 2, dtype=I32), tensor(EXPERTS, dtype=I32)
    choose_slots(
        logits,
        ids,
        shares,
        starts=starts,
        sequences=8,
        loads=tensor(EXPERTS, dtype=torch.int64),
        holders=HolderTables(table, copies, copies, rank=1),
        own=OwnSlots(ids, ids),
    )
    outputs, y = tensor(2, 8 * CHOICES, HIDDEN, dtype=F32), tensor(8, HIDDEN, dtype=F32)
    weighted_sum(outputs, ids, shares, y, owners=ids)


def _context() -> None:
    parts, merges = tensor(2, 16, 8, 1, 128 + 2, dtype=F32), tensor(8, 3, dtype=I32)
    y = tensor(64, 16 * 128)
    merge_ranks(parts, merges, tensor(64, dtype=I32), y, heads=16, window=1024)


CASES: dict[str, Callable[[], Any]] = ATTENTION | {
    "norm with residual": _norm,
    "norm into fp8 by token": lambda: _norm(_rows(WIDTH, "token")),
    "norm into int8": lambda: _norm(_rows(WIDTH, "block", torch.int8)),
    "activation": lambda: _activation("gelu_tanh"),
    "activation into fp8 by token": lambda: _activation("silu", _rows(MIDDLE, "token")),
    "wide activation into fp8 by token": lambda: _activation("gelu_tanh", _rows(MIDDLE, "token")),
    "activation into fp8 by a given scale": lambda: _activation("silu", _rows(MIDDLE, "tensor")),
    "activation into int8": lambda: _activation("gelu_tanh", _rows(MIDDLE, "block", torch.int8)),
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
        tensor(4, VOCABULARY, dtype=F32), _params(4), tensor(4, dtype=I32)
    ),
    "scores": _scores,
    "last tokens": _last_tokens,
    "edits of logits": _edits,
    "fp8 by block, 1 row": lambda: _fp8(1, by_block=True),
    "fp8 by block, 2048 rows": lambda: _fp8(2048, by_block=True),
    "fp8 by channel, 2048 rows": lambda: _fp8(2048, by_block=False),
    "experts, 4 rows": lambda: _experts(4),
    "experts, 4096 rows": lambda: _experts(4096),
    "experts in int8, 4096 rows": lambda: _int_experts(4096, 0),
    "experts in int4-g32, 4 rows": lambda: _int_experts(4, 32),
    "experts in int4-g128, 4096 rows": lambda: _int_experts(4096, 128),
    "choice of experts": _routing,
    "parts of ranks": _context,
    "int8, 1 row": lambda: _int8(1),
    "int8, 33 rows": lambda: _int8(33),
    "int8, 2048 rows": lambda: _int8(2048),
    "int8, 1 row of few outputs": lambda: _int8_gemv(WIDTH),
    "int8, 1 row of many outputs": lambda: _int8_gemv(VOCABULARY),
    "int4-g32, 1 row of few outputs": lambda: _int4_gemv(WIDTH, 32),
    "int4-g128-zp, 1 row of many outputs": lambda: _int4_gemv(VOCABULARY, 128, has_zeros=True),
    "int4-g32 by int8, 1 row": lambda: _int4(1, 32),
    "int4-g32 by int8, 2048 rows": lambda: _int4(2048, 32),
    "int4-g128-zp by int8, 1 row": lambda: _int4(1, 128, has_zeros=True),
    "int4-g64 by bf16, 1 row": lambda: _int4(1, 64, by_integers=False),
    "int4-g128 by bf16, 2048 rows": lambda: _int4(2048, 128, by_integers=False),
}
# Only selected by name: nearly identical to the cases above.
MORE: dict[str, Callable[[], Any]] = {
    "decode attention, blocks of 64": lambda: attention(block_size=64),
    "decode attention, exact": lambda: attention(exact=True),
    "decode attention, heads of 64": lambda: attention(head_dim=64),
    "decode attention, heads of 256": lambda: attention(head_dim=256),
    "decode attention, int8": lambda: attention(precision="int8"),
    "decode attention, f32": lambda: attention(precision="f32", head_dim=64),
    "prefill attention, blocks of 64": lambda: attention(wide=True, block_size=64),
    "prefill attention, heads of 80": lambda: attention(wide=True, head_dim=80),
    "prefill attention, heads of 256": lambda: attention(wide=True, head_dim=256),
    "prefill attention, int8": lambda: attention(wide=True, precision="int8"),
    "heads into bf16": lambda: _heads("bf16"),
    "heads into f32": lambda: _heads("f32"),
}


def main(titles: list[str]) -> None:
    """Print the compiled kernels of the named cases, or of all tested cases."""
    known = CASES | MORE
    for title in titles or CASES:
        for found in report(title, known[title]):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
