"""Weights on a device: a program's parameter table filled from a checkpoint, a tensor a weight.

Knows parts, sources and their order, as quire/execute/packing.py does for the compiled kernels.
bf16 and fp8 tensors of a checkpoint go to the device as they are (upload.py), part by part, so that
loading takes no second copy; all others pass through float32. Integers are made as quire/quant
says, on the host; fp8 is made on the device, to the same bits. Threads digest meanwhile.
Always holds: every byte of every tensor is digested once, and a tensor's pages are given back.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.execute.executor import Progress
from quire.execute.gpu.plain import E4M3, quantize_fp8
from quire.execute.gpu.stream import Stream, stream_of
from quire.execute.gpu.upload import Bytes, Upload
from quire.execute.quantized_weights import (
    fixed_input_scale,
    quantize_weight,
    read_f32,
    stored_fp8,
    stored_scales,
)
from quire.program.declarations import Weight, WeightForm, WeightPart
from quire.program.program import Program
from quire.program.tensors import DType
from quire.quant.int_weights import IntMatrix
from quire.quant.scheme import Scheme
from quire.weights.binding import Binding
from quire.weights.content import WeightsDigest, content_digest
from quire.weights.safetensors import StoredTensor

DIGESTING_THREADS, MAX_DIGESTING = 8, 16  # tensors that are read and not digested yet
ROWS_AT_ONCE = 8192  # of a weight that becomes fp8: whole blocks, in float32 for a while
TORCH_TYPES: Mapping[DType, torch.dtype] = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntWeight:
    """A weight [N, K] of integers: values int8 [N, K] with the zero points taken off, scales f32
    [N, groups], one group where the scheme has one scale a row."""

    scheme: Scheme
    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: IntMatrix, device: torch.device) -> IntWeight:
        """Return an integer weight on a device."""
        return cls(
            scheme=matrix.scheme,
            values=torch.from_numpy(matrix.values.astype(np.int8)).to(device),
            scales=torch.from_numpy(np.ascontiguousarray(matrix.scales)).to(device),
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows by id in float32, as the products use them."""
        columns = self.values.shape[1]
        scales = self.scales[ids].repeat_interleave(self.scheme.group or columns, dim=1)
        return self.values[ids].float() * scales[:, :columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight:
    """A weight [N, K] in fp8: values e4m3 [N, K], scales f32 [N], or [ceil(N / 128), ceil(K / 128)]
    where the scheme has blocks. input_scale: f32 [1] that rows are divided by where the scheme is
    static, else None."""

    scheme: Scheme
    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    @classmethod
    def of(cls, whole: Tensor, scheme: Scheme) -> Fp8Weight:
        """Made where the weight is, some rows at a time."""
        codes = torch.empty(whole.shape, dtype=torch.uint8, device=whole.device)
        scales = []
        for first in range(0, len(whole), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            values, of_part = quantize_fp8(whole[part], scheme)
            codes[part] = values.view(torch.uint8)
            scales.append(of_part)
        return cls(scheme=scheme, values=codes.view(E4M3), scales=torch.cat(scales))

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows by id in float32."""
        values, group = self.values[ids].float(), self.scheme.group
        if not group:
            return values * self.scales[ids, None]
        scales = self.scales[ids // group].repeat_interleave(group, dim=1)
        return values * scales[:, : values.shape[1]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """All weights by name, those in few bits by themselves, integers as the operations that compute
    packs them, those of experts as it stacks them; the digest of what they were made of; rows that
    8 bits are too coarse for, by weight."""

    plain: Mapping[str, Tensor]
    few: Mapping[str, Any]
    digest: str = ""
    coarse_rows: Mapping[str, int] = field(default_factory=dict)


# A weight by name as it is kept: on the device, or elsewhere.
Kept = Callable[[str, Any], Any]
# An integer weight as a device's products take it; and such weights of experts as one.
Pack = Callable[[IntMatrix, torch.device], Any]
Stack = Callable[[Sequence[Any], torch.device], Any]
_HOST = torch.device("cpu")


def in_a_row(weights: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """Return the weights of experts one by one, as plain PyTorch takes them."""
    return tuple(weights)


def load(
    program: Program,
    binding: Binding,
    device: torch.device,
    progress: Progress | None,
    *,
    pack: Pack = IntWeight.of,
    stack: Stack = in_a_row,
    stream: Stream | None = None,
    kept: Kept = lambda name, weight: weight,
) -> Loaded:
    """Put the weights of a program on a device.

    kept: what becomes of each weight once it is there. stream: of the device, where a test has its
    own. Raises torch.OutOfMemoryError where the device has no room.
    """
    plain: dict[str, Tensor] = {}
    few: dict[str, Any] = {}
    coarse: dict[str, int] = {}
    total, done = program.weight_bytes, 0
    with Upload(stream or stream_of(device)) as upload, _Digesting(binding) as digesting:
        for name, weight in program.weights.items():
            if weight.quantized is None:
                plain[name] = _plain(weight, binding, device, upload)
            elif weight.quantized.is_float:
                few[name] = _fp8(weight, weight.quantized, binding, device, upload)
            else:
                few[name], count = _integers(weight, binding, device, pack, stack)
                if count:
                    coarse[name] = count
            found = few if name in few else plain
            found[name] = kept(name, found[name])
            for part in weight.parts:
                digesting.add(part)
            done += weight.num_bytes
            if progress is not None:
                progress(done, total)
        for source in program.elsewhere:  # of which other ranks have all rows
            digesting.add_source(source)
        return Loaded(plain, few, digesting.text(is_part=program.is_part), coarse)


def _integers(
    weight: Weight, binding: Binding, device: torch.device, pack: Pack, stack: Stack
) -> tuple[Any, int]:
    """Return a weight of integers, those of experts put together in host memory; and how many of
    its rows 8 bits are too coarse for."""
    packed, coarse = [], 0
    for one in weight.by_expert() or [weight]:
        matrix, count = quantize_weight(one, binding)
        assert isinstance(matrix, IntMatrix), f"{weight.name} is of integers"
        packed.append(pack(matrix, _HOST if weight.experts else device))
        coarse += count
    return (stack(packed, device) if weight.experts else packed[0]), coarse


class _Digesting:
    """The digest of what was added so far, by threads, until it is closed."""

    def __init__(self, binding: Binding) -> None:
        self._binding, self._digest = binding, WeightsDigest()
        count = min(DIGESTING_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="quire-digest")
        self._begun: set[str] = set()
        self._out: deque[tuple[StoredTensor, Future[tuple[int, int]] | None, Callable[[], None]]]
        self._out = deque()

    def __enter__(self) -> _Digesting:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def add(self, part: WeightPart) -> None:
        """Add a part with its tensor already read for its weight."""
        self._add(self._binding.content(part), lambda: self._binding.release(part))

    def add_source(self, source: str) -> None:
        """Add a tensor that no weight here is made of."""
        self._add(self._binding.content_of(source), lambda: self._binding.release_source(source))

    def text(self, *, is_part: bool) -> str:
        """Of all of it, when it is there: see WeightsDigest."""
        while self._out:
            self._finish_one()
        return self._digest.text(is_part=is_part)

    def _add(self, tensor: StoredTensor, release: Callable[[], None]) -> None:
        future = None
        if tensor.name not in self._begun:
            self._begun.add(tensor.name)
            future = self._threads.submit(content_digest, tensor.raw)
        self._out.append((tensor, future, release))
        while len(self._out) > MAX_DIGESTING:
            self._finish_one()

    def _finish_one(self) -> None:
        tensor, future, release = self._out.popleft()
        if future is not None:
            self._digest.add(tensor, future.result())
        release()


def _fp8(
    weight: Weight, scheme: Scheme, binding: Binding, device: torch.device, upload: Upload
) -> Fp8Weight:
    """Return the checkpoint's own codes and scales; or made from its elements, whatever the program
    computes in."""
    assert not weight.experts, f"{weight.name}: blocks of scales would span experts"
    if (stored := stored_fp8(weight, binding)) is not None:
        codes = torch.empty((weight.rows, weight.columns), dtype=torch.uint8, device=device)
        first = 0
        for part in stored:
            upload.copy(part.codes.reshape(-1), codes[first : first + len(part.codes)])
            first += len(part.codes)
        scales = torch.from_numpy(stored_scales(stored)).to(device)
        kept = scales if scheme.group else scales[:, 0].contiguous()
        fixed = fixed_input_scale(weight, stored)
        return Fp8Weight(
            scheme=scheme,
            values=codes.view(E4M3),
            scales=kept,
            input_scale=None if fixed is None else torch.tensor([float(fixed)], device=device),
        )
    assert not scheme.is_static, f"{weight.name} is not in fp8; nothing fixes its scale"
    is_bf16 = all(binding.content(part).dtype == "bf16" for part in weight.parts)
    dtype = DType.BF16 if is_bf16 and not weight.offset else DType.F32
    return Fp8Weight.of(_plain(replace(weight, dtype=dtype), binding, device, upload), scheme)


def _plain(weight: Weight, binding: Binding, device: torch.device, upload: Upload) -> Tensor:
    """[rows, columns], or [rows] of a vector, which stays in float32."""
    dtype = torch.float32 if weight.form is WeightForm.VECTOR else TORCH_TYPES[weight.dtype]
    shape = (weight.rows, weight.columns) if weight.columns else (weight.rows,)
    whole = torch.empty(shape, dtype=dtype, device=device)
    first = 0
    for part in weight.parts:
        stored, rows = _as_stored(part, weight, binding), whole[first : first + part.rows]
        if stored is not None:
            upload.copy(stored, rows)
        else:
            wide = torch.from_numpy(read_f32(replace(weight, parts=(part,)), binding))
            # A vector is kept in f32, with the values that its dtype has.
            rows.copy_(wide.to(TORCH_TYPES[weight.dtype]))
        first += part.rows
    return whole


def _as_stored(part: WeightPart, weight: Weight, binding: Binding) -> Bytes | None:
    """Return bytes of the part's rows where the file has them just as they are wanted."""
    wanted = weight.form is not WeightForm.VECTOR and weight.dtype is DType.BF16
    is_stored = not part.transposed and binding.content(part).dtype == "bf16"
    if not wanted or not is_stored or weight.offset:
        return None
    stored = binding.tensor(part)
    # The rows of stacked experts are counted through all of them.
    raw = stored.raw.reshape(math.prod(stored.shape[:-1]), -1)
    rows = raw[part.first_row :][: part.rows]
    if part.of_columns:
        size = weight.dtype.itemsize
        rows = rows[:, size * part.first_column :][:, : size * weight.columns]
    return np.ascontiguousarray(rows).reshape(-1)
