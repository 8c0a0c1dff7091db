"""Operations of a program that are taken together: heads on their way to the cache, rows on their
way to a product of few bits.

q/k norm, rope and store_kv follow one another in most families; kernels/store_kv.py does all of it
in one pass over queries, keys and values. A norm or an activation makes the bytes that the product
after it takes, which would be a launch of their own. Knows operations; no tensors. Always holds:
heads are taken together only in that order, on the same heads, and where no operation reads
the keys afterwards, since they are in the cache only; rows that later operations read are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire.program.forms import NormForm
from quire.program.ops import Activation, Linear, Norm, Op, Rope, StoreKV
from quire.program.program import Program
from quire.program.tensors import View


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsToCache:
    """Queries and keys normed where `norms` has their weights, turned where there is a rope, and
    keys and values stored."""

    q: View
    k: View
    v: View
    layer: int
    norms: tuple[str, str] | None
    eps: float
    rope: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesToProduct:
    """A norm or an activation that makes its rows in bytes for a product, and as they are where
    `is_read`."""

    maker: Norm | Activation
    product: Linear
    is_read: bool


T = TypeVar("T", Norm, Rope)
Step = Op | HeadsToCache | BytesToProduct


def launches(program: Program, segment: str) -> Iterator[Step]:
    """Yield the segment's operations in order, those that are taken together as one."""
    ops = program.segments.get(segment, ())
    at = 0
    while at < len(ops):
        step, count = _step_at(program, segment, at)
        yield step
        at += count


def _step_at(program: Program, segment: str, first: int) -> tuple[Step, int]:
    """Return what begins at an operation, and how many operations it is."""
    ops = program.segments[segment]
    heads = _heads_at(program, ops, first)
    if heads is not None and not _is_read(program, segment, first + heads[1], heads[0].k):
        return heads
    match ops[first : first + 2]:
        case (Activation() | Norm(group=0)) as maker, Linear() as product if _takes_bytes(
            program, maker.y, product
        ):
            is_read = _is_read(program, segment, first + 2, maker.y)
            return BytesToProduct(maker=maker, product=product, is_read=is_read), 2
    return ops[first], 1


def _takes_bytes(program: Program, rows: View, product: Linear) -> bool:
    """Return whether a product takes these rows, and in bytes."""
    return product.x == rows and program.weights[product.weight].quantized is not None


def _heads_at(program: Program, ops: Sequence[Op], first: int) -> tuple[HeadsToCache, int] | None:
    """Return the heads that begin at an operation, and how many operations they cover."""
    norms = _in_place_pair(ops, first, Norm)
    ropes = _in_place_pair(ops, first + len(norms), Rope)
    end = first + len(norms) + len(ropes)
    if end == first or end >= len(ops):
        return None
    store, q = ops[end], ops[first].inputs[0]
    if not isinstance(store, StoreKV):
        return None
    pairs = [[op.x for op in pair] for pair in (norms, ropes) if pair]
    if any(pair != [q, store.k] for pair in pairs):
        return None
    if not all(_is_head_norm(op, program.caches[0].head_dim) for op in norms):
        return None
    if len({op.eps for op in norms}) > 1 or len({op.rope for op in ropes}) > 1:
        return None
    names = [op.weight for op in norms if op.weight is not None]
    heads = HeadsToCache(
        q=q,
        k=store.k,
        v=store.v,
        layer=store.layer,
        norms=(names[0], names[1]) if names else None,
        eps=norms[0].eps if norms else 0.0,
        rope=ropes[0].rope if ropes else None,
    )
    return heads, end + 1 - first


def _in_place_pair(ops: Sequence[Op], first: int, kind: type[T]) -> Sequence[T]:
    """Two operations of a kind, in place, or none."""
    pair = [op for op in ops[first : first + 2] if isinstance(op, kind) and op.inputs == op.outputs]
    return pair if len(pair) == 2 else ()


def _is_head_norm(op: Norm, head_dim: int) -> bool:
    is_plain = op.form is NormForm.RMS and op.weight is not None and op.bias is None
    return is_plain and op.group == head_dim


def _is_read(program: Program, segment: str, first: int, view: View) -> bool:
    """Return whether these columns are read from the segment's operation `first` on."""
    names = list(program.segments)
    later = [
        *program.segments[segment][first:],
        *(op for name in names[names.index(segment) + 1 :] for op in program.segments[name]),
    ]
    read = [other for op in later for other in op.inputs] + list(program.outputs.values())
    return any(
        other.buffer.index == view.buffer.index
        and other.offset < view.offset + view.width
        and view.offset < other.offset + other.width
        for other in read
    )
