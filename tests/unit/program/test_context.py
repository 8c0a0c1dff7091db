"""Context parallelism of a program: what each rank has and exchanges, by hand; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.models.registry import build_program, open_model
from quire.program.comm_ops import AllGather
from quire.program.cost import StepShape
from quire.program.declarations import PIECE_POSITIONS
from quire.program.ops import Attention, Linear, StoreKV
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.serialize import from_plain, to_plain
from quire.program.shard import shard
from quire.program.table import format_program
from quire.program.tensors import DType
from tests.tiny_models import write_tiny_llama


def llama(folder: Path, **changes: int) -> Program:
    """Return a program of four heads of 16 columns over two KV heads, in bf16."""
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = write_tiny_llama(folder, **(sizes | {"max_position_embeddings": 2048} | changes))
    return build_program(open_model(path), dtype=DType.BF16, max_positions=2048)


def attention_of(program: Program) -> Attention:
    """Return the attention of the first layer."""
    return next(op for op in program.operations() if isinstance(op, Attention))


def test_ranks_have_all_heads_and_their_pieces(tmp_path: Path) -> None:
    program = llama(tmp_path)
    for rank in range(2):
        own = shard(program, degree=2, rank=rank, context=2)
        attention = attention_of(own)
        assert (attention.heads, attention.kv_heads) == (4, 2)
        assert (attention.rank, attention.degree, attention.y.width) == (rank, 2, 2 * 16)
        (cache,) = own.caches
        assert (cache.kv_heads, cache.ranks) == (2, 2)
        assert cache.token_bytes == program.caches[0].token_bytes // 2
        assert own.source_shapes() == program.source_shapes()
        assert from_plain(json.loads(json.dumps(to_plain(own)))) == own
    products = sum(
        shard(program, degree=2, rank=rank, context=2).step_cost(StepShape([3], [9])).product_ops
        for rank in range(2)
    )
    assert products == program.step_cost(StepShape([3], [9])).product_ops


def test_a_layer_exchanges_queries_keys_values_and_parts(tmp_path: Path) -> None:
    own = shard(llama(tmp_path), degree=2, rank=1, context=2)
    trunk = own.segments["trunk"]
    kinds = [
        op.x.buffer.name.split(".")[0] if isinstance(op, AllGather) else op.kind
        for op in trunk
        if isinstance(op, AllGather | Attention)
    ]
    layer = ["qkv", "qkv", "qkv", "attention", "attended", "o", "activated", "down"]
    assert kinds == ["residual", *layer, *layer]
    # All keys and values are there before any is stored.
    stored = next(at for at, op in enumerate(trunk) if isinstance(op, StoreKV))
    assert sum(isinstance(op, AllGather) for op in trunk[:stored]) == 1 + 3
    q = next(op for op in trunk if isinstance(op, Linear))
    assert own.weights[q.weight].rows == 32
    # Position 700 sees three pieces, of which the other rank has two: the parts of two heads each,
    # 16 values, the largest score and the sum, in f32.
    cost = attention_of(own).cost(own, StepShape([1], [700]))
    assert cost.comm_bytes == 2 * 2 * 18 * 4
    assert cost.kv_bytes == 701 * 2 * 2 * 16 * 2 // 2


def test_heads_and_positions_are_divided_together(tmp_path: Path) -> None:
    program = llama(tmp_path)
    found = []
    for rank in range(4):
        own = shard(program, degree=4, rank=rank, context=2)
        attention = attention_of(own)
        assert (attention.heads, attention.kv_heads, attention.degree) == (2, 1, 2)
        assert own.caches[0].kv_heads == 1
        found.append((attention.q.offset, attention.rank, attention.y.offset, attention.y.width))
    # Ranks 0 and 1 have heads 0 and 1, and each merges one of them.
    assert found == [(0, 0, 0, 16), (0, 1, 16, 16), (32, 0, 32, 16), (32, 1, 48, 16)]


def test_heads_need_not_divide(tmp_path: Path) -> None:
    program = llama(tmp_path, hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    widths = [attention_of(shard(program, degree=2, rank=r, context=2)).y.width for r in (0, 1)]
    assert widths == [2 * 16, 16]
    with pytest.raises(
        SettingError, match=r"3 heads over 1 KV heads.*context_parallel_size divides"
    ):
        shard(program, degree=2, rank=0)


@pytest.mark.parametrize("window", [0, 1, 100, 256, 257, 300])
def test_pieces_are_counted_for_each_row(window: int) -> None:
    counts, starts = [1, 5, 300, 0, 513], [0, 254, 511, 90, 700]
    pairs, own = 0, [0, 0, 0]
    for count, start in zip(counts, starts, strict=True):
        for position in range(start, start + count):
            first = max(position - window + 1, 0) if window else 0
            seen = range(first // PIECE_POSITIONS, position // PIECE_POSITIONS + 1)
            pairs += len(seen)
            for piece in seen:
                own[piece % 3] += 1
    step = StepShape(counts, starts)
    assert step.attended_pieces(window) == pairs
    assert [step.attended_pieces(window, rank, 3) for rank in range(3)] == own


def test_the_table_names_the_pieces(tmp_path: Path) -> None:
    own = shard(llama(tmp_path), degree=2, rank=1, context=2)
    text = format_program(own, StepShape([1], [700]))
    assert "pieces of rank 1 of 2, all_to_all of parts" in text


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    program = llama(tmp_path)
    with pytest.raises(SettingError, match=r"context_parallel_size is 5; .* at most 4 ranks work"):
        shard(program, degree=5, rank=0, context=5)
    with pytest.raises(SettingError, match="degree must be a multiple of context"):
        shard(program, degree=3, rank=0, context=2)
    with pytest.raises(SettingError, match="mode exact where context is above 1"):
        shard(program, degree=2, rank=0, context=2, mode=TpMode.FAST)
    with pytest.raises(SettingError, match="context_parallel_size is 65; 1 to 64 ranks"):
        shard(program, degree=65, rank=0, context=65)
