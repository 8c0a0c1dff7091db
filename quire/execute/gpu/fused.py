"""Operations of a program that are one launch: heads on their way to the cache.

q/k norm, rope and store_kv follow one another in most families; kernels/store_kv.py does all of it
in one pass over queries, keys and values. Knows operations; no tensors. Always holds: they are
taken together only in that order, on the same heads, and where nobody reads the keys afterwards:
these are in the cache then, and nowhere else.
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


def launches(program: Program, segment: str) -> Iterator[Op | HeadsToCache]:
    """The segment's operations in order, those that are one launch as one."""
    ops = program.segments.get(segment, ())
    at = 0
    while at < len(ops):
        found = _heads_at(program, ops, at)
        if found is None or _is_read(program, segment, at + found[1], found[0].k):
            yield ops[at]
            at += 1
        else:
            yield found[0]
            at += found[1]


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
