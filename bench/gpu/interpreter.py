"""Patch Triton's interpreter where it differs from a GPU, and where it is slow.

Version 3.6 reads loop bounds with int() of an array of one element, which NumPy rejects from 2.5
on, and it rounds a fused multiply-add twice; later versions do neither. All versions patch the
whole language again for each call of a function within a kernel, which the launch has done already.
For proofs on CPU tensors only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from triton.runtime import interpreter

from quire.quant.int_rows import fma


@cache
def mend() -> None:
    """Patch before the first kernel is interpreted; a second call does nothing."""
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
        if module not in changed:  # Triton's own modules alias the language
            changed.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = called


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once, for float32, the only dtype that kernels fuse."""
    assert x.data.dtype == np.float32, f"multiply-adds of {x.data.dtype} are not written anywhere"
    return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)
