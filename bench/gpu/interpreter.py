"""Triton's interpreter, mended where it differs from what a card computes, and where it is slow.

Version 3.6 reads bounds of loops with int() of an array of one element, which NumPy refuses from
2.5 on, and it rounds a fused multiply-add twice; later versions do neither. All of them change the
whole language for each call of a function within a kernel, though a launch has done it. For proofs
on CPU tensors only; knows no kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from triton.runtime import interpreter

from quire.quant.int_rows import fma


@cache
def mend() -> None:
    """Before the first kernel is interpreted; a second time does nothing."""
    patch = interpreter._patch_lang_tensor

    def with_bounds(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = with_bounds
    if not hasattr(interpreter._interpreter, "fma_fp32"):
        interpreter.InterpreterBuilder.create_fma = _fused
    changed: set[str] = set()

    def called(function: Any, *arguments: Any, **named: Any) -> Any:
        module = function.fn.__module__
        if module not in changed:  # Triton's own see the language by another name
            changed.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = called


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once; of float32, which is all that kernels fuse."""
    assert x.data.dtype == np.float32, f"multiply-adds of {x.data.dtype} are not written anywhere"
    return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)
