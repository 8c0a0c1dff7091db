"""A Program as plain lists, dicts, strings and numbers, and back; and its digest.

    from_plain(json.loads(json.dumps(to_plain(program)))) == program

Workers receive programs this way. Views name their buffer by index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.program.declarations import CacheSpec, RopeSpec, Weight, WeightForm, WeightPart
from quire.program.operation import schema
from quire.program.ops import OPERATIONS, Op
from quire.program.program import NUMERICS_VERSION, Program
from quire.program.tensors import Buffer, DType, Rows, View

FORMAT = 4

Plain = dict[str, Any]


def to_plain(program: Program) -> Plain:
    """Return the program as what JSON can hold."""
    plain: Plain = {
        "format": FORMAT,
        "name": program.name,
        "vocab_size": program.vocab_size,
        "max_positions": program.max_positions,
        "buffers": [[b.name, b.rows.value, b.width, b.dtype.value] for b in program.buffers],
        "segments": {
            name: [_op_to_plain(op) for op in ops] for name, ops in program.segments.items()
        },
        "weights": [_weight_to_plain(weight) for weight in program.weights.values()],
        "caches": [_cache_to_plain(cache) for cache in program.caches],
        "ropes": [[list(r.inv_freq), r.attention_scale] for r in program.ropes],
        "outputs": {name: _view_to_plain(view) for name, view in program.outputs.items()},
        # Left out where it is empty, so that digests of whole programs stay what they are.
        **(
            {"elsewhere": {name: list(shape) for name, shape in program.elsewhere.items()}}
            if program.elsewhere
            else {}
        ),
    }
    return plain | {"is_part": True} if program.is_part else plain


def from_plain(plain: Mapping[str, Any]) -> Program:
    """Return the program `to_plain` wrote; raises ValueError for another format or
    contradictions."""
    if plain.get("format") != FORMAT:
        raise ValueError(f"program format is {plain.get('format')!r}; {FORMAT} can be read")
    buffers = tuple(
        Buffer(index, name, Rows(rows), width, DType(dtype))
        for index, (name, rows, width, dtype) in enumerate(plain["buffers"])
    )
    weights = [_weight_from_plain(weight) for weight in plain["weights"]]
    return Program(
        name=plain["name"],
        buffers=buffers,
        segments={
            name: tuple(_op_from_plain(op, buffers) for op in ops)
            for name, ops in plain["segments"].items()
        },
        weights={weight.name: weight for weight in weights},
        caches=tuple(
            CacheSpec(kind, layers, kv_heads, head_dim, DType(dtype), *more)
            for kind, layers, kv_heads, head_dim, dtype, *more in plain["caches"]
        ),
        ropes=tuple(RopeSpec(tuple(inv_freq), scale) for inv_freq, scale in plain["ropes"]),
        outputs={name: _view_from_plain(view, buffers) for name, view in plain["outputs"].items()},
        vocab_size=plain["vocab_size"],
        max_positions=plain["max_positions"],
        elsewhere={name: tuple(shape) for name, shape in plain.get("elsewhere", {}).items()},
        is_part=plain.get("is_part", False),
    )


def digest(program: Program) -> str:
    """Return 64 hexadecimal digits; programs with equal digests give answers equal in every bit.

    Covers the numerics version. Leaves out max_positions and the order in which weights were
    declared: no answer depends on them.
    """
    plain = to_plain(program)
    del plain["max_positions"]
    plain["weights"].sort(key=lambda weight: weight["name"])
    plain["numerics"] = NUMERICS_VERSION
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _op_to_plain(op: Op) -> Plain:
    return {
        "kind": op.kind,
        "inputs": [_view_to_plain(view) for view in op.inputs],
        "outputs": [_view_to_plain(view) for view in op.outputs],
        "attrs": _attrs(op),
    }


def _attrs(op: Op) -> Plain:
    """Return parameters without those at their default: a field added with one changes no
    digest."""
    defaults = {field.name: field.default for field in fields(op)}
    return {name: value for name, value in op.parameters.items() if value != defaults[name]}


def _op_from_plain(plain: Mapping[str, Any], buffers: tuple[Buffer, ...]) -> Op:
    operation = OPERATIONS.get(plain["kind"])
    if operation is None:
        raise ValueError(f"no operation is called {plain['kind']!r}: {', '.join(OPERATIONS)}")
    values: dict[str, Any] = dict.fromkeys(operation.reads)  # optional views may be missing
    for names, views in ((operation.reads, "inputs"), (operation.writes, "outputs")):
        for name, view in zip(names, plain[views], strict=False):
            values[name] = _view_from_plain(view, buffers)
    for name, value in plain["attrs"].items():
        kind = schema(operation)[name]
        if kind.name == "ints":
            value = tuple(value)
        values[name] = value if kind.choice is None else kind.choice(value)
    return operation(**values)


def _view_to_plain(view: View) -> list[int]:
    return [view.buffer.index, view.offset, view.width]


def _view_from_plain(plain: list[int], buffers: tuple[Buffer, ...]) -> View:
    index, offset, width = plain
    if not 0 <= index < len(buffers):
        raise ValueError(f"a view names buffer {index}; there are {len(buffers)}")
    return View(buffers[index], offset, width)


def _cache_to_plain(c: CacheSpec) -> list[Any]:
    fields = [c.kind, c.layers, c.kv_heads, c.head_dim, c.dtype.value, c.window, c.scheme]
    return [*fields, c.ranks] if c.ranks > 1 else fields


def _weight_to_plain(weight: Weight) -> Plain:
    plain: Plain = {
        "name": weight.name,
        "form": weight.form.value,
        "parts": [_part_to_plain(part) for part in weight.parts],
        "columns": weight.columns,
        "dtype": weight.dtype.value,
        "shard": weight.shard,
        "offset": weight.offset,
        "scheme": weight.scheme,
    }
    # Left out where they are 0, so that digests of other programs stay what they are.
    more = {"experts": weight.experts, "whole_rows": weight.whole_rows}
    return plain | {name: count for name, count in more.items() if count}


def _part_to_plain(part: WeightPart) -> list[Any]:
    fields = [part.name, part.source, part.rows, part.first_row, part.of_rows, part.transposed]
    if part.of_columns:
        return [*fields, part.stacked, part.first_column, part.of_columns]
    return [*fields, part.stacked] if part.stacked else fields


def _weight_from_plain(plain: Mapping[str, Any]) -> Weight:
    return Weight(
        plain["name"],
        WeightForm(plain["form"]),
        tuple(WeightPart(*part) for part in plain["parts"]),
        plain["columns"],
        DType(plain["dtype"]),
        plain["shard"],
        plain["offset"],
        plain["scheme"],
        plain.get("experts", 0),
        plain.get("whole_rows", 0),
    )
