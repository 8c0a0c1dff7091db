"""The instruction sets that this machine has: all, and those that have kernels of their own.

A set with VNNI differs from the one it is named after by its integer products alone
(native/src/vnni/table.cc), so only these are tested with it.
"""

from __future__ import annotations

from quire import _native

EVERY_ISA = tuple(_native.available_isas())
ISAS = tuple(isa for isa in EVERY_ISA if not isa.endswith("vnni"))
