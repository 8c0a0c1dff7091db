"""Sums, and exp, tanh and erf, in plain PyTorch with bits that depend on an element alone.

A library's sums and curves may round an element otherwise beside others: it chooses instructions by
shape, by alignment and by what is left at an end. Here all is made of additions, multiplications
and divisions of single elements, each rounded once, so that it does not matter how many rows or
columns are computed together, nor which of a matrix's outputs a rank has. Curves are computed in
float64 and rounded to float32 at the end. Knows no rows and no program.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LN_2, _LOG2_E = math.log(2.0), math.log2(math.e)
# Where float32 has 0 and infinity; -inf and inf become these.
_EXP_MIN, _EXP_MAX = -110.0, 110.0
_EXP_TERMS, _ERF_TERMS = 10, 64
# From here on erf is 1 in float32; tanh(x) is x - x^3 / 3 below.
_ERF_END, _TANH_SERIES = 4.0, 1e-3
_F64_BIAS, _F64_FRACTION_BITS = 1023, 52
# A sum's last terms are added with the others beside them in memory.
_FEW_TERMS = 16


def sum_last(terms: Tensor) -> Tensor:
    """Return the sums over the last axis, in an order that depends on its length alone; overwrites
    `terms`."""
    while terms.shape[-1] > _FEW_TERMS:
        terms = _added_halves(terms, -1)
    terms = terms.movedim(-1, 0).contiguous()
    while len(terms) > 1:
        terms = _added_halves(terms, 0)
    return terms[0]


def exp(x: Tensor) -> Tensor:
    """e ** x of float32 or float64, in its dtype."""
    return _exp(x.double()).to(x.dtype)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of float32."""
    wide = x.double()
    power = _exp(-2.0 * wide.abs())
    far = (1.0 - power) / (1.0 + power)
    near = wide - wide * wide * wide / 3.0
    return torch.where(wide.abs() < _TANH_SERIES, near, far * torch.sign(wide)).float()


def erf(x: Tensor) -> Tensor:
    """Return the error function of float32, by its series."""
    wide = x.double().clamp(-_ERF_END, _ERF_END)
    square = wide * wide
    power, total = wide, wide
    for n in range(1, _ERF_TERMS):
        power = power * square * (-1.0 / n)
        total = total + power * (1.0 / (2 * n + 1))
    return (total * (2.0 / math.sqrt(math.pi))).float()


def _exp(x: Tensor) -> Tensor:
    """Of float64: 2 ** whole times the series of what is left."""
    x = x.clamp(_EXP_MIN, _EXP_MAX)
    whole = torch.round(x * _LOG2_E)
    rest = x - whole * _LN_2
    total = torch.ones_like(x)
    for n in range(_EXP_TERMS, 0, -1):
        total = total * rest * (1.0 / n) + 1.0
    bits = (whole.nan_to_num().long() + _F64_BIAS) << _F64_FRACTION_BITS
    return total * bits.view(torch.float64)


def _added_halves(terms: Tensor, axis: int) -> Tensor:
    """Add the second half of an axis to the first one; a middle term stays alone."""
    size = terms.shape[axis]
    half = (size + 1) // 2
    terms.narrow(axis, 0, size - half).add_(terms.narrow(axis, half, size - half))
    return terms.narrow(axis, 0, half)
