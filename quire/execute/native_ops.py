"""Encodes operations for the native executor: their fields by name.

The classes that quire/program/ops.py lists (those of experts are in expert_ops.py, of exchanges in
comm_ops.py and stage_ops.py) are the only description on the Python side. The compiled
module exports the fields it reads (native/include/quire/operations.h); a difference between the
two tables is an error when this module is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire import _native
from quire.program.operation import schema
from quire.program.ops import OPERATIONS, Op
from quire.program.tensors import View

NativeView = tuple[int, int, int]
Table = Mapping[str, Mapping[str, str]]


def encode(op: Op, weights: Mapping[str, _native.Weight]) -> tuple[str, dict[str, Any]]:
    """Return an operation's kind and its fields, with native views and weights."""
    encoded: dict[str, Any] = {}
    for name, kind in schema(type(op)).items():
        value = getattr(op, name)
        if isinstance(value, View):
            value = encode_view(value)
        elif kind.name == "weight" and value is not None:
            value = weights[value]
        encoded[name] = value
    return op.kind, encoded


def encode_view(view: View) -> NativeView:
    """Return (buffer index, offset, width)."""
    return view.buffer.index, view.offset, view.width


def operation_table() -> Table:
    """Return the fields of every operation class and the names of their types."""
    return {
        kind: {name: str(of_field) for name, of_field in schema(operation).items()}
        for kind, operation in OPERATIONS.items()
    }


def check_table(native: Table) -> None:
    """Raise ImportError where the compiled module's operations differ from the Python classes."""
    ours = operation_table()
    differing = [
        f"{kind}: {ours.get(kind, 'missing')} in Python, {native.get(kind, 'missing')} in C++"
        for kind in dict.fromkeys((*ours, *native))
        if ours.get(kind) != native.get(kind)
    ]
    if differing:
        raise ImportError(
            "quire/program/ops.py and native/include/quire/operations.h describe different "
            "operations; rebuild the native module (scripts/build-native):\n  "
            + "\n  ".join(differing)
        )


check_table(_native.OPERATIONS)
