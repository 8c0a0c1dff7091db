"""Norm, rope and KV store, fused and separate, match the reference."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.execute import reference_ops  # noqa: E402
from quire.execute.gpu.kernels.cache_layout import CachePool  # noqa: E402
from quire.execute.gpu.kernels.store_kv import (  # noqa: E402
    Angles,
    HeadNorm,
    prepare_heads,
    rope,
    store_kv,
)
from quire.execute.reference_attention import PagedRows  # noqa: E402
from quire.execute.rope_table import RopeTable  # noqa: E402
from quire.program.declarations import RopeSpec  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from tests.gpu.tensors import array, normal, same_bits, tensor, wide  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

BLOCKS, BLOCK_SIZE = 5, 16
SLOTS = np.array([3, 79, -1, 32, 16], np.int32)
POSITIONS = np.array([0, 5, 77, 1_000, 3], np.int32)


def _angles(rotary: int) -> Angles:
    spec = RopeSpec(tuple(float(10_000.0 ** (-i / rotary)) for i in range(rotary // 2)), 1.25)
    table = RopeTable(spec)
    table.reserve(1_001)
    return Angles(tensor(table.cos), tensor(table.sin), torch.from_numpy(POSITIONS))


def _poisoned(precision: str, kv_heads: int, head_dim: int) -> CachePool:
    pool = CachePool.zeros(
        precision,
        layers=2,
        blocks=BLOCKS,
        kv_heads=kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=head_dim,
        device="cpu",
    )
    if pool.scales is None:
        pool.values.fill_(np.nan)
    else:
        pool.scales.fill_(np.nan)
        pool.values.copy_(torch.full(pool.values.shape, 99.0))
    return pool


def _stored(rows: np.ndarray, precision: str, dtype: str, head_dim: int) -> PagedRows:
    """Compare slots with the reference, through their own block tables; other slots stay NaN."""
    kv_heads = rows.shape[1] // head_dim
    kept = PagedRows.zeros(BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    kept.values.fill(np.nan)
    kept.scales.fill(np.nan)
    kept.store(rows, SLOTS, DType(dtype), "int8" if precision == "int8" else "")
    return kept


def _check_side(pool: CachePool, layer: int, side: int, wanted: PagedRows) -> None:
    values = array(pool.values[layer, :, side]).transpose(0, 2, 1, 3)  # the reference's axes
    is_stored = ~np.isnan(wanted.values)
    # Add zero: the reference's integers are floats, and include a negative zero.
    assert same_bits(values[is_stored] + 0, wanted.values[is_stored] + 0)
    untouched = values[~is_stored]
    assert (np.isnan(untouched) if pool.scales is None else untouched == 99.0).all()
    if pool.scales is not None:
        scales = array(pool.scales[layer, :, side]).transpose(0, 2, 1)
        assert same_bits(scales, np.ascontiguousarray(wanted.scales))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bf16"), ("f32", "f32")])
@pytest.mark.parametrize("precision_of_ints", ["", "int8"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (3, 20), (1, 96)])
def test_keys_and_values_are_stored_as_by_the_reference(
    precision: str, dtype: str, precision_of_ints: str, kv_heads: int, head_dim: int
) -> None:
    precision = precision_of_ints or precision
    rng = np.random.default_rng(1)
    k, v = (normal(rng, 5, kv_heads * head_dim, dtype=dtype) for _ in range(2))
    k[1, :head_dim] = 0
    v[3, :head_dim] *= 2.0**-110
    pool = _poisoned(precision, kv_heads, head_dim)
    store_kv(wide(k, dtype), wide(v, dtype), pool.layer(1), torch.from_numpy(SLOTS))
    for side, rows in enumerate((k, v)):
        _check_side(pool, 1, side, _stored(rows, precision, dtype, head_dim))
    assert torch.isnan((pool.values if pool.scales is None else pool.scales)[0]).all()


def test_a_non_finite_head_has_scale_nan_and_affects_no_other() -> None:
    rng = np.random.default_rng(2)
    k, v = (normal(rng, 5, 32) for _ in range(2))
    k[0, 3], v[4, 20] = np.nan, -np.inf
    pool = _poisoned("int8", 2, 16)
    store_kv(tensor(k), tensor(v), pool.layer(0), torch.from_numpy(SLOTS))
    for side, rows in enumerate((k, v)):
        _check_side(pool, 0, side, _stored(rows, "int8", "f32", 16))


def test_fp8_heads_are_divided_by_their_scale_and_rounded_to_nearest() -> None:
    rng = np.random.default_rng(3)
    k, v = (normal(rng, 5, 64) for _ in range(2))
    k[0] *= np.exp(rng.standard_normal(64) * 4).astype(np.float32)  # down to subnormal values
    v[1, :16], v[3, 40] = 0, np.nan
    pool = _poisoned("fp8", 4, 16)
    store_kv(tensor(k), tensor(v), pool.layer(0), torch.from_numpy(SLOTS))
    for side, rows in enumerate((k, v)):
        for row, slot in zip(rows.reshape(5, 4, 16), SLOTS, strict=True):
            if slot < 0:
                continue
            at = (0, slot // 16, side, slice(None), slot % 16)
            largest = np.abs(row).max(axis=1)
            scale = np.where(largest == 0, np.float32(0), largest / np.float32(448))
            assert same_bits(array(pool.scales[at]), scale.astype(np.float32))
            inverse = np.float32(448) / np.where(largest > 0, largest, np.float32(1))
            broken = np.isnan(row).any(axis=1, keepdims=True)
            scaled = np.where(broken, np.float32(0), row * inverse[:, None])
            nearest = torch.from_numpy(scaled).to(torch.float8_e4m3fn)
            assert same_bits(array(pool.values[at]) + 0, array(nearest) + 0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rotary", "head_dim"), [(16, 16), (8, 20), (32, 96)])
def test_rope_matches_the_reference(dtype: str, rotary: int, head_dim: int) -> None:
    x, angles = normal(np.random.default_rng(4), 5, 3 * head_dim, dtype=dtype), _angles(rotary)
    got = wide(x, dtype)
    rope(got, angles, head_dim=head_dim)
    cos, sin = (array(part)[POSITIONS] for part in (angles.cos, angles.sin))
    wanted = reference_ops.rope(x, cos, sin, heads=3, head_dim=head_dim)
    assert same_bits(array(got), array(tensor(wanted, dtype)))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("precision", ["", "int8", "fp8"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_fused_equals_norm_rope_and_store_in_sequence(
    dtype: str, precision: str, has_norm: bool
) -> None:
    heads, kv_heads, head_dim = 5, 2, 24
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, 5, n * head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    angles = _angles(16)
    norm, normed_q, normed_k = None, wide(q, dtype), wide(k, dtype)
    if has_norm:
        # Integers: sums are exact, so the order of columns changes no bit.
        q, k = (np.round(rows * 4) for rows in (q, k))
        weights = [normal(rng, head_dim) for _ in range(2)]
        norm = HeadNorm(*map(tensor, weights), eps=1e-6)
        normed_q, normed_k = (
            wide(
                reference_ops.norm(rows, weight, eps=1e-6, form="rms", bias=None, group=head_dim),
                dtype,
            )
            for rows, weight in zip((q, k), weights, strict=True)
        )
    for rows in (normed_q, normed_k):
        rope(rows, angles, head_dim=head_dim)
    apart, fused = (_poisoned(precision or dtype, kv_heads, head_dim) for _ in range(2))
    slots = torch.from_numpy(SLOTS)
    store_kv(normed_k, wide(v, dtype), apart.layer(0), slots)
    q_out = wide(np.full_like(q, np.nan), dtype)
    prepare_heads(
        wide(q, dtype),
        wide(k, dtype),
        wide(v, dtype),
        fused.layer(0),
        slots,
        angles=angles,
        norm=norm,
        q_out=q_out,
    )
    assert same_bits(array(q_out), array(normed_q))
    assert same_bits(array(fused.values), array(apart.values))
    if fused.scales is not None:
        assert same_bits(array(fused.scales), array(apart.scales))


def test_a_row_is_prepared_alone_as_in_a_batch() -> None:
    rng = np.random.default_rng(6)
    q, k, v = (normal(rng, 5, n * 20, dtype="bf16") for n in (3, 1, 1))
    norm = HeadNorm(tensor(normal(rng, 20)), tensor(normal(rng, 20)), eps=1e-5)
    angles, slots = _angles(20), torch.from_numpy(SLOTS)
    together, alone = (_poisoned("fp8", 1, 20) for _ in range(2))
    out = tensor(q, "bf16")
    prepare_heads(
        out,
        tensor(k, "bf16"),
        tensor(v, "bf16"),
        together.layer(0),
        slots,
        angles=angles,
        norm=norm,
    )
    for row in range(5):
        one = slice(row, row + 1)
        q_row = tensor(q[one], "bf16")
        prepare_heads(
            q_row,
            tensor(k[one], "bf16"),
            tensor(v[one], "bf16"),
            alone.layer(0),
            slots[one],
            angles=Angles(angles.cos, angles.sin, angles.rope_positions[one]),
            norm=norm,
        )
        assert torch.equal(q_row, out[one])
    assert same_bits(array(alone.values), array(together.values))
    assert same_bits(array(alone.scales), array(together.scales))


def test_no_rows_are_accepted() -> None:
    pool, nothing = _poisoned("bf16", 1, 16), torch.empty((0, 16), dtype=torch.bfloat16)
    store_kv(nothing, nothing, pool.layer(0), torch.empty(0, dtype=torch.int32))
    assert torch.isnan(pool.values).all()


def test_rope_wider_than_a_head_is_rejected() -> None:
    with pytest.raises(
        ValueError, match="angles of 16 pairs and 32 columns do not suit heads of 16"
    ):
        rope(torch.zeros((5, 32)), _angles(32), head_dim=16)
