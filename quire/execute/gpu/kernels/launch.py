"""What launchers share: checks of shapes and strides, block sizes, and how kernels are compiled.

Kernels run on an accelerator's tensors, or on CPU tensors in Triton's interpreter. Knows no
operation. Always holds: nothing here depends on how many rows there are, and multiplications and
additions are fused only where a kernel writes fma, in every version of Triton (EXACT). A number
that differs from step to step is one Triton does not specialize for: a kernel is compiled for each
shape of tile, once, and not again in the middle of an answer for one row, or for sixteen.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

# Given to every launch: what is rounded once and what twice must not be the compiler's choice.
EXACT: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": False})


def cdiv(size: int, part: int) -> int:
    """Return parts that hold `size`. (triton.cdiv is made for kernels: on the host it takes 3
    us.)"""
    return -(-size // part)


def power_of_two(size: int, *, least: int = 1, most: int = 2**30) -> int:
    """Return the smallest power of two that holds `size`, within bounds that are powers of two."""
    return min(max(1 << max(size - 1, 0).bit_length(), least), most)


def launch_staged(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_stages: int, **named: Any
) -> None:
    """With so many stages of loads on their way, or as many fewer as the card's shared memory has
    room for. They change no bit. A kernel that does not fit is refused before it is launched."""
    try:
        kernel[grid](*arguments, num_stages=num_stages, **named)
    except OutOfResources:
        if num_stages == 1:
            raise
        launch_staged(kernel, grid, *arguments, num_stages=num_stages - 1, **named)


def check_rows(
    name: str, x: torch.Tensor, rows: int | None = None, columns: int | None = None
) -> None:
    """Raise ValueError where x is not [rows, columns] with columns side by side."""
    wanted = (x.shape[0] if rows is None else rows, x.shape[-1] if columns is None else columns)
    if x.dim() != 2 or tuple(x.shape) != wanted or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"{name} is {tuple(x.shape)} with strides {x.stride()}; {list(wanted)} with elements "
            "of a row side by side is needed"
        )


def check_vector(name: str, x: torch.Tensor | None, size: int, dtype: torch.dtype) -> None:
    """Raise ValueError where x is there and is not [size] of a dtype, side by side."""
    if x is None:
        return
    if tuple(x.shape) != (size,) or x.dtype != dtype or (size > 1 and x.stride(0) != 1):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}; {dtype} [{size}], side by side, is needed"
        )
