"""The instruction sets of this machine: all, and those with kernels of their own.

A set with VNNI differs from its base set only in integer products (native/src/vnni/table.cc), so
only these are tested with it.
"""

from __future__ import annotations

from quire import _native

EVERY_ISA = tuple(_native.available_isas())
ISAS = tuple(isa for isa in EVERY_ISA if not isa.endswith("vnni"))
