"""Schemes: quantized weight formats, by name.

    int8          one scale per row of the weight (output channel), f32
    int4-g32      one scale per 32 elements of a row, bf16; also g64, g128
    int4-g32-zp   the same with a zero point in each group
    fp8           e4m3, one scale per row of the weight, f32
    fp8-block     e4m3, one scale per block of 128 rows by 128 elements, f32
    fp8-static    fp8 from a checkpoint that fixes the scale of activations; cannot be requested

Activations are int8 for integer schemes, with a scale per token and 128 elements; for fp8 they are
e4m3, with a scale per token; for fp8-block with a scale per token and 128 elements; for fp8-static
with the one scale of the weight. Defines names, sizes and the syntax of rules; quantization is in
int_weights.py, int_rows.py and fp8.py. Invariant: a scheme has one canonical name; an empty name or
"none" means no scheme.
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
    """A scheme. bits: of an element. group: elements of a row that share a scale; 0: all.

    is_float: elements are e4m3, and a group also spans as many rows. is_static: activations have
    one scale, given by the checkpoint.
    """

    name: str
    bits: int
    group: int = 0
    has_zero_points: bool = False
    is_float: bool = False
    is_static: bool = False

    def num_groups(self, columns: int) -> int:
        """Return the number of scales of a row; the last group may be shorter."""
        return -(-columns // self.group) if self.group else 1

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row with its scales and zero points, without padding."""
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
# Schemes of the compiled kernels; fp8 is for GPUs.
INT_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if not scheme.is_float)
ALIASES: Mapping[str, str] = MappingProxyType({"int4": "int4-g32", "int4-zp": "int4-g32-zp"})


def scheme_names() -> tuple[str, ...]:
    """Return all names that may be requested as a precision, "none" first."""
    return (PLAIN, *(scheme.name for scheme in SCHEMES.values() if not scheme.is_static), *ALIASES)


def canonical(name: str) -> str:
    """Return a scheme's canonical name, "" for none. Raises ValueError with the allowed names."""
    if name in ("", PLAIN):
        return ""
    found = ALIASES.get(name, name)
    if found not in scheme_names():
        raise ValueError(f"{name!r} is not a precision; allowed: {', '.join(scheme_names())}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A precision for the weights with names that match a pattern (`*`, `?`, `[...]`)."""

    pattern: str
    precision: str

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a weight's name."""
        return fnmatchcase(name, self.pattern)


def parse_rule(text: str) -> Rule:
    """Parse "PATTERN=PRECISION". Raises ValueError for any other form."""
    pattern, separator, precision = text.rpartition("=")
    if not separator or not pattern or not precision:
        raise ValueError(
            f"{text!r} is not a rule; write a weight's name or pattern, =, and a precision, as in "
            "layers.0.*=none"
        )
    return Rule(pattern=pattern, precision=precision)
