"""Native attention matches the NumPy reference on every instruction set, for odd shapes too."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.program.declarations import KV_SCALE_BYTES
from quire.program.tensors import DType
from tests.cases import each_case
from tests.kernels.attention_cases import Geometry, Kept, PagedCache, Rows, Tokens
from tests.kernels.isas import ISAS

TOLERANCE = {DType.F32: 1e-5, DType.BF16: 4e-3}  # a probability rounds to 8 bits
SHAPES = (
    (1, 1, 1),
    (3, 1, 5),
    (4, 4, 16),
    (6, 2, 31),
    (2, 1, 33),
    (8, 2, 64),
    (2, 2, 80),
    (4, 1, 96),
    (2, 1, 100),
    (4, 2, 128),
    (2, 1, 192),
    (1, 1, 255),
    (2, 2, 256),
    (130, 1, 8),
)


@lru_cache(maxsize=4)  # the same for each instruction set
def _reference(
    geometry: Geometry, positions: int, block_size: int, calls: tuple[Rows, ...]
) -> NDArray[np.float32]:
    """Return the reference's attention in two sequences."""
    tokens = Tokens(geometry, sequences=2, positions=positions)
    return PagedCache(tokens, block_size=block_size).reference(calls)


CALLS = (Rows(0, 238, 40), Rows(1, 511, 1), Rows(0, 0, 7), Rows(1, 509, 2))


@each_case("isa", ISAS)
@each_case("kept", list(Kept))
@each_case(("heads", "kv_heads", "head_dim"), SHAPES)
def test_matches_the_reference_for_any_head_width_and_grouping(
    isa: str, kept: Kept, heads: int, kv_heads: int, head_dim: int
) -> None:
    geometry = Geometry(kept=kept, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    cache = PagedCache(Tokens(geometry, sequences=2, positions=512), isa=isa)
    cache.store([Rows(0, 0, 278), Rows(1, 0, 512)])
    expected = _reference(geometry, 512, 16, CALLS)
    np.testing.assert_allclose(cache.attend(CALLS), expected, atol=TOLERANCE[kept.dtype], rtol=0)


@each_case("isa", ISAS)
@each_case("kept", list(Kept))
@each_case("window", [0, 1, 2, 17, 255, 256, 257, 300])
@each_case("soft_cap", [0.0, 3.0])
def test_matches_the_reference_with_a_window_and_a_soft_cap(
    isa: str, kept: Kept, window: int, soft_cap: float
) -> None:
    geometry = Geometry(kept=kept, head_dim=24, window=window, soft_cap=soft_cap)
    cache = PagedCache(Tokens(geometry, sequences=2, positions=560), isa=isa, block_size=32)
    calls = (Rows(0, 505, 15), Rows(1, 0, 20), Rows(1, 250, 10))
    cache.store([Rows(0, 0, 520), Rows(1, 0, 260)])
    expected = _reference(geometry, 560, 32, calls)
    np.testing.assert_allclose(cache.attend(calls), expected, atol=TOLERANCE[kept.dtype], rtol=0)


@each_case("isa", ISAS)
@each_case("kept", list(Kept))
def test_a_row_that_sees_one_position_copies_its_value(isa: str, kept: Kept) -> None:
    geometry = Geometry(kept=kept, heads=6, kv_heads=2, head_dim=13, window=1)
    tokens = Tokens(geometry, sequences=1, positions=300)
    cache = PagedCache(tokens, isa=isa)
    cache.store([Rows(0, 0, 300)])
    expected = np.repeat(tokens.v[0], 3, axis=1)
    if kept.scheme:
        expected = cache.reference([Rows(0, 0, 300)])
    np.testing.assert_array_equal(cache.attend([Rows(0, 0, 300)]), expected)


@each_case("isa", ISAS)
@each_case("kept", list(Kept))
def test_large_scores_neither_overflow_nor_vanish(isa: str, kept: Kept) -> None:
    tokens = Tokens(Geometry(kept=kept), sequences=1, positions=520)
    tokens.q *= np.float32(2.0**14)
    tokens.k *= np.float32(2.0**14)
    cache = PagedCache(tokens, isa=isa)
    cache.store([Rows(0, 0, 520)])
    y, expected = cache.attend([Rows(0, 0, 520)]), cache.reference([Rows(0, 0, 520)])
    np.testing.assert_allclose(y, expected, atol=TOLERANCE[kept.dtype], rtol=0)


@each_case("kept", list(Kept))
def test_an_empty_call_is_accepted(kept: Kept) -> None:
    cache = PagedCache(Tokens(Geometry(kept=kept), sequences=1, positions=16))
    assert cache.attend([Rows(0, 0, 0)]).shape == (0, 4, 32)


@each_case("isa", ISAS)
@each_case("kept", list(Kept))
@each_case("head_dim", [1, 7, 64])
@each_case("block_size", [4, 8, 16, 48, 128])
def test_every_set_bit_of_the_cache_was_stored_by_one_slot(
    isa: str, kept: Kept, head_dim: int, block_size: int
) -> None:
    geometry = Geometry(kept=kept, head_dim=head_dim)
    cache = PagedCache(Tokens(geometry, sequences=1, positions=130), isa=isa, block_size=block_size)
    changed = np.zeros(len(cache.bytes), bool)
    scale_bytes = KV_SCALE_BYTES if kept.scheme else 0
    item_bytes = 2 * geometry.kv_heads * (head_dim * kept.itemsize + scale_bytes)
    padding_bytes = geometry.kv_heads * kept.itemsize * (head_dim % 2) * (kept.dtype is DType.BF16)
    for position in (0, 1, 2, 15, 16, 47, 48, 64, 127, 128, 129):
        cache.bytes[:] = 0xFF
        cache.store([Rows(0, position, 1)])
        first = cache.bytes != 0xFF
        cache.bytes[:] = 0
        cache.store([Rows(0, position, 1)])
        now = first | (cache.bytes != 0)
        assert not (now & changed).any()
        assert now.sum() <= item_bytes + padding_bytes
        changed |= now


@each_case("head_dim", [0, 257])
def test_an_unsupported_head_width_is_rejected(head_dim: int) -> None:
    program = _native.Program(_native.Pool(1), 64)
    with pytest.raises(ValueError, match=f"heads of {head_dim}; .* of 1 to 256"):
        program.allocate_cache(
            dtype="f32", kv_heads=1, head_dim=head_dim, block_size=16, layers=1, num_blocks=1
        )
