"""Operations of a program that are taken together: heads on their way to the cache, rows on their
way to a product of few bits.

q/k norm, rope and store_kv follow one another in most families; kernels/store_kv.py does all of it
in one pass over queries, keys and values. A norm or an activation makes the bytes that the product
after it takes, which would be a launch of their own. Knows operations; no tensors. Always holds:
heads are taken together only in that order, on the same heads, and where nobody reads the keys
afterwards: these are in the cache then, and nowhere else; rows that others read are there for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.program.ops import Op, OpKind, View
from quire.program.program import Program


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

    maker: Op
    product: Op
    is_read: bool


Step = Op | HeadsToCache | BytesToProduct


def launches(program: Program, segment: str) -> Iterator[Step]:
    """The segment's operations in order, those that are taken together as one."""
    ops = program.segments.get(segment, ())
    at = 0
    while at < len(ops):
        step, count = _step_at(program, segment, at)
        yield step
        at += count


def _step_at(program: Program, segment: str, first: int) -> tuple[Step, int]:
    """What begins at an operation, and how many operations it is."""
    ops = program.segments[segment]
    heads = _heads_at(program, ops, first)
    if heads is not None and not _is_read(program, segment, first + heads[1], heads[0].k):
        return heads
    if _makes_bytes(program, ops[first : first + 2]):
        maker, product = ops[first : first + 2]
        is_read = _is_read(program, segment, first + 2, maker.outputs[0])
        return BytesToProduct(maker=maker, product=product, is_read=is_read), 2
    return ops[first], 1


def _makes_bytes(program: Program, pair: Sequence[Op]) -> bool:
    """Is it a maker of whole rows, and a product of few bits that takes them?"""
    if len(pair) < 2 or pair[1].kind is not OpKind.LINEAR:
        return False
    maker, product = pair
    is_maker = maker.kind is OpKind.ACTIVATION or (
        maker.kind is OpKind.NORM and not maker.attrs["group"]
    )
    is_few = program.weights[product.attrs["weight"]].quantized is not None
    return is_maker and is_few and product.inputs == maker.outputs[:1]


def _heads_at(program: Program, ops: Sequence[Op], first: int) -> tuple[HeadsToCache, int] | None:
    """What begins at an operation, and how many operations it is."""
    norms = _pair(ops, first, OpKind.NORM)
    turns = _pair(ops, first + len(norms), OpKind.ROPE)
    end = first + len(norms) + len(turns)
    if end == first or end >= len(ops) or ops[end].kind is not OpKind.STORE_KV:
        return None
    (k, v), head_dim = ops[end].inputs, program.caches[0].head_dim
    q = ops[first].inputs[0]
    fits = all(pair[0].inputs == (q,) and pair[1].inputs == (k,) for pair in (norms, turns) if pair)
    if not fits or not all(_is_head_norm(op, head_dim) for op in norms):
        return None
    if len({op.attrs["eps"] for op in norms}) > 1 or len({op.attrs["rope"] for op in turns}) > 1:
        return None
    heads = HeadsToCache(
        q=q,
        k=k,
        v=v,
        layer=ops[end].attrs["layer"],
        norms=(norms[0].attrs["weight"], norms[1].attrs["weight"]) if norms else None,
        eps=norms[0].attrs["eps"] if norms else 0.0,
        rope=turns[0].attrs["rope"] if turns else None,
    )
    return heads, end + 1 - first


def _pair(ops: Sequence[Op], first: int, kind: OpKind) -> Sequence[Op]:
    """Two operations of a kind, in place, or none."""
    pair = ops[first : first + 2]
    is_one = len(pair) == 2 and all(op.kind is kind and op.inputs == op.outputs for op in pair)
    return pair if is_one else ()


def _is_head_norm(op: Op, head_dim: int) -> bool:
    attrs = op.attrs
    is_plain = attrs["form"] == "rms" and attrs["weight"] is not None and attrs["bias"] is None
    return is_plain and attrs["group"] == head_dim


def _is_read(program: Program, segment: str, first: int, view: View) -> bool:
    """Does anybody read these columns from the segment's operation `first` on?"""
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
