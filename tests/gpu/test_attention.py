"""Attention kernels: values match plain softmax, and a row's bits do not depend on other rows."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.gpu.paged_attention import Shape, World  # noqa: E402

# In the interpreter, NumPy warns of NaN in padding rows.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]

NARROW, EXACT, WIDE = 16, 64, 128


def _check(world: World, spans, got, *, tolerance: float | None = None) -> None:
    wanted = [world.expected(s, p) for s, first, end in spans for p in range(first, end)]
    if tolerance is None:
        tolerance = 2e-2 if world.shape.query == "bf16" else 2e-5
    np.testing.assert_allclose(got.float().numpy(), np.stack(wanted), rtol=0, atol=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "f32", "int8", "fp8"])
@pytest.mark.parametrize("rows", [NARROW, WIDE])
def test_mixed_chunks_and_decode_rows_match_softmax(precision: str, rows: int) -> None:
    shape = Shape(precision=precision, query="f32" if precision == "f32" else "bf16")
    world = World(shape, [290, 70, 1, 33])
    spans = [(0, 285, 290), (1, 0, 70), (2, 0, 1), (3, 32, 33)]
    if rows == NARROW:
        spans[1] = (1, 61, 70)
    _check(world, spans, world.run(spans, rows=rows))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(window=20, block_size=16),
        Shape(block_size=4),
        Shape(precision="int8", window=70, block_size=8),
        Shape(window=70, block_size=64, soft_cap=5.0),
        Shape(window=300, has_sinks=True, group=3, kv_heads=1),
        Shape(soft_cap=2.0, has_sinks=True, head_dim=20, block_size=48),
        Shape(query="f32", precision="int8", window=33, head_dim=40, group=5),
        Shape(precision="fp8", has_sinks=True, block_size=128, group=1),
    ],
    ids=str,
)
def test_windows_soft_caps_sinks_and_odd_shapes_match_softmax(shape: Shape) -> None:
    world = World(shape, [281, 40])
    spans = [(0, 270, 281), (1, 0, 40)]
    _check(world, spans, world.run(spans, rows=EXACT))


def test_a_head_wider_than_128_matches_softmax() -> None:
    world = World(Shape(head_dim=160, kv_heads=1, group=1), [66])
    _check(world, [(0, 60, 66)], world.run([(0, 60, 66)], rows=EXACT))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("window", [0, 50, 260])
def test_a_row_is_bitwise_equal_alone_and_in_a_batch(precision: str, window: int) -> None:
    world = World(Shape(precision=precision, window=window, kv_heads=1), [283, 90, 5])
    chunk = world.run([(1, 30, 90), (0, 250, 283), (2, 0, 5)], rows=EXACT)
    for position, place in [(250, 60), (256, 66), (282, 92)]:
        alone = world.run([(0, position, position + 1)], rows=EXACT)
        assert torch.equal(alone[0], chunk[place])
    # Other cuts of the same chunk start tiles elsewhere. Tiles of other sizes add in the same order
    # in the interpreter (on a GPU those of 64 rows and more do).
    again = world.run([(0, 239, 283)], rows=EXACT)
    assert torch.equal(again[11:], chunk[60:93])
    assert torch.equal(world.run([(0, 250, 283)], rows=WIDE), chunk[60:93])
    assert torch.equal(world.run([(0, 276, 283)], rows=NARROW), chunk[86:93])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("window", [0, 257])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_work_items_of_any_split_merge_to_the_same_bits(
    precision: str, window: int, has_sinks: bool
) -> None:
    shape = Shape(precision=precision, window=window, has_sinks=has_sinks, head_dim=32)
    world = World(shape, [600, 290, 20])
    spans = [(0, 599, 600), (1, 286, 290), (2, 19, 20)]
    whole = world.run(spans, rows=NARROW)
    assert torch.isfinite(whole).all()
    for programs in (1, 6, 1_000):
        assert torch.equal(world.run(spans, rows=NARROW, programs=programs), whole)
    assert torch.equal(world.run(spans, rows=NARROW, programs=99, max_partials=3, idle=2), whole)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_nan_token_reaches_only_rows_that_attend_to_it(precision: str) -> None:
    shape = Shape(precision=precision, window=30)
    sound, broken = World(shape, [60]), World(shape, [60])
    block, place = broken.at(0, 20)
    held = broken.pool.values if broken.pool.scales is None else broken.pool.scales
    held[1, block, :, :, place] = np.inf
    spans = [(0, 0, 60)]
    wanted, got = (world.run(spans, rows=WIDE) for world in (sound, broken))
    assert torch.equal(got[:20], wanted[:20])
    assert torch.isnan(got[20:50]).all()
    assert torch.equal(got[50:], wanted[50:])


def test_an_empty_launch_succeeds() -> None:
    assert World(Shape(), [1]).run([(0, 0, 1)], rows=NARROW, programs=1, idle=3).isfinite().all()


def test_more_heads_than_rows_of_a_tile_are_rejected() -> None:
    with pytest.raises(ValueError, match="20 query heads share a KV head; tiles of 16 rows"):
        World(Shape(group=20), [1]).run([(0, 0, 1)], rows=NARROW)
