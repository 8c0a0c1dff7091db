"""Schemes: how the weights of a product are kept in few bits, by name.

    int8          one scale a row of the weight (an output channel), f32
    int4-g32      one scale for 32 elements of a row, bf16; also g64, g128
    int4-g32-zp   the same with a zero point in each group
    fp8           e4m3, one scale a row of the weight, f32
    fp8-block     e4m3, one scale for a block of 128 rows by 128 elements, f32
    fp8-static    as fp8, of a checkpoint that fixes the scale of activations; nobody can ask for it

Activations are int8 beside integers, with a scale for each token and 128 elements; beside fp8 they
are e4m3, with a scale for each token, beside blocks for each token and 128 elements, and beside
fp8-static with the one scale of the weight. Knows names, sizes and the grammar of rules; quantizes
nothing (int_weights.py, int_rows.py, fp8.py).
Always holds: a scheme is known by one name, and an empty name or "none" is no scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

# Elements of a row of activations that share a scale.
ACTIVATION_GROUP = 128
PLAIN = "none"
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """bits of an element; elements of a row that share a scale (0: all); zero points or none.

    is_float: elements are e4m3, and a group is one of so many rows too. is_static: activations have
    one scale, which is the checkpoint's.
    """

    name: str
    bits: int
    group: int = 0
    has_zero_points: bool = False
    is_float: bool = False
    is_static: bool = False

    def num_groups(self, columns: int) -> int:
        """Scales of one row; the last group may be shorter."""
        return -(-columns // self.group) if self.group else 1

    def row_bytes(self, columns: int) -> int:
        """Bytes a row takes, its scales and zero points included, padding left out."""
        if self.is_float and self.group:  # a row's share of its blocks' scales
            return columns + -(-4 * self.num_groups(columns) // self.group)
        if self.bits == 8:
            return columns + 4
        per_group = 3 if self.has_zero_points else 2
        return -(-columns // 2) + per_group * self.num_groups(columns)


def _all() -> Iterator[Scheme]:
    yield Scheme(name="int8", bits=8)
    for group in GROUPS:
        yield Scheme(name=f"int4-g{group}", bits=4, group=group)
        yield Scheme(name=f"int4-g{group}-zp", bits=4, group=group, has_zero_points=True)
    yield Scheme(name="fp8", bits=8, is_float=True)
    yield Scheme(name="fp8-block", bits=8, group=ACTIVATION_GROUP, is_float=True)
    yield Scheme(name="fp8-static", bits=8, is_float=True, is_static=True)


SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _all()})
# What the compiled kernels multiply; fp8 is for GPUs.
INT_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if not scheme.is_float)
ALIASES: Mapping[str, str] = MappingProxyType({"int4": "int4-g32", "int4-zp": "int4-g32-zp"})


def scheme_names() -> tuple[str, ...]:
    """All that may be written where a precision is asked for, "none" first."""
    return (PLAIN, *(scheme.name for scheme in SCHEMES.values() if not scheme.is_static), *ALIASES)


def canonical(name: str) -> str:
    """The one name of a scheme, "" for none. Raises ValueError, which lists what there is."""
    if name in ("", PLAIN):
        return ""
    found = ALIASES.get(name, name)
    if found not in scheme_names():
        raise ValueError(f"{name!r} is no precision; there are {', '.join(scheme_names())}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The precision of the weights whose names a pattern (`*`, `?`, `[...]`) matches."""

    pattern: str
    precision: str

    def matches(self, name: str) -> bool:
        """Is this weight meant?"""
        return fnmatchcase(name, self.pattern)


def parse_rule(text: str) -> Rule:
    """Reads "PATTERN=PRECISION". Raises ValueError where it is not of that form."""
    pattern, separator, precision = text.rpartition("=")
    if not separator or not pattern or not precision:
        raise ValueError(
            f"{text!r} is no rule; write a weight's name or pattern, =, and a precision, as in "
            "layers.0.*=none"
        )
    return Rule(pattern=pattern, precision=precision)
