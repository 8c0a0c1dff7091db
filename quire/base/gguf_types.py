"""ggml's storage types: what a GGUF file calls them, and how many bytes hold how many elements.

A row is a whole number of blocks; a block holds `block_size` elements of a row in `block_bytes`.
All published types are listed, so that a file can be measured and named; which of them can
be read is the weights room's to say. Source: ggml.h and the GGUF specification (ggml-org/ggml).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage type; `code` is the number a file has for it."""

    code: int
    name: str
    block_size: int
    block_bytes: int


_LISTED = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(9, "Q8_1", 32, 40),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(15, "Q8_K", 256, 292),
    BlockType(16, "IQ2_XXS", 256, 66),
    BlockType(17, "IQ2_XS", 256, 74),
    BlockType(18, "IQ3_XXS", 256, 98),
    BlockType(19, "IQ1_S", 256, 50),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(21, "IQ3_S", 256, 110),
    BlockType(22, "IQ2_S", 256, 82),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(24, "I8", 1, 1),
    BlockType(25, "I16", 1, 2),
    BlockType(26, "I32", 1, 4),
    BlockType(27, "I64", 1, 8),
    BlockType(28, "F64", 1, 8),
    BlockType(29, "IQ1_M", 256, 56),
    BlockType(30, "BF16", 1, 2),
    BlockType(34, "TQ1_0", 256, 54),
    BlockType(35, "TQ2_0", 256, 66),
    BlockType(39, "MXFP4", 32, 17),
    BlockType(40, "NVFP4", 64, 36),
)

TYPES: Mapping[int, BlockType] = MappingProxyType({known.code: known for known in _LISTED})
