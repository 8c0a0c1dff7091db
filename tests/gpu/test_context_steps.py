"""Attention by kernels over pieces of several ranks: bit for bit that of one process, whichever
ranks there are, whatever is computed at once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.execute.gpu import context_steps
from quire.execute.gpu.context_steps import ContextSteps, context_bytes, tiles_of_rank
from quire.execute.gpu.exchange import RankEnds
from quire.execute.gpu.kernels.attention import DeviceTiles, attention, narrow_rows, wide_rows
from quire.execute.gpu.kernels.attention_plan import PIECE_POSITIONS, plan_tiles
from quire.execute.gpu.kernels.cache_layout import CachePool
from quire.execute.gpu.step_buffers import Counts
from quire.execute.gpu.stream import CpuStream
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.ops import Attention
from quire.program.tensors import Buffer, DType, Rows, View
from quire.ranks.own_pieces import OwnPieces
from tests.gpu.rank_kernels import ByTurns
from tests.rank_threads import on_all_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 16
# A decoded token at a depth of four pieces, a chunk at the end of the second, and a new request.
SEQUENCES = [(900, 1), (505, 4), (0, 2)]
POSITIONS = 1024


def step(pieces: OwnPieces | None, ranks: int) -> ForwardBatch:
    """Return the step with tables of one process, or of a rank."""
    size = BLOCK if pieces is None else pieces.engine_block_size
    columns = -(-POSITIONS // (ranks * PIECE_POSITIONS)) * ranks * PIECE_POSITIONS // size
    tables = np.arange(len(SEQUENCES) * columns, dtype=np.int32).reshape(-1, columns)
    positions = np.concatenate([np.arange(first, first + n) for first, n in SEQUENCES])
    starts = np.cumsum([0, *(count for _, count in SEQUENCES)])
    rows = positions.astype(np.int32)
    batch = ForwardBatch(
        token_ids=np.zeros(len(rows), np.int32),
        positions=rows,
        rope_positions=rows,
        caches=(CacheRows(kv_slots=np.zeros(len(rows), np.int32), block_tables=tables),),
        seq_starts=starts.astype(np.int32),
        sample_rows=np.zeros(0, np.int32),
    )
    return batch if pieces is None else pieces.batch(batch)


def pool(ranks: int, rank: int | None) -> CachePool:
    """Return a pool with all positions of the sequences, or those of a rank's pieces."""
    generator = torch.Generator().manual_seed(3)
    padded = -(-POSITIONS // (ranks * PIECE_POSITIONS)) * ranks * PIECE_POSITIONS
    shape = len(SEQUENCES), POSITIONS, 2, KV_HEADS, HEAD_DIM
    values = torch.randn(shape, generator=generator)
    values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, 0, 0, padded - POSITIONS))
    if rank is not None:
        values = values.unflatten(1, (-1, ranks, PIECE_POSITIONS))[:, :, rank].flatten(1, 2)
    blocks = values.reshape(-1, BLOCK, 2, KV_HEADS, HEAD_DIM).permute(0, 2, 3, 1, 4)
    return CachePool(blocks.contiguous()[None], None)


def operation(rank: int, degree: int, window: int) -> Attention:
    """Return the operation; queries and outputs are buffers 0 and 1."""
    width = HEADS * HEAD_DIM
    q, y = (View(Buffer(n, "b", Rows.TOKENS, width, DType.F32), 0, width) for n in (0, 1))
    return Attention(
        q=q,
        y=y,
        cache=0,
        layer=0,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=0.25,
        window=window,
        soft_cap=0.0,
        rank=rank,
        degree=degree,
    )


def queries() -> Tensor:
    """Return those of the step's rows."""
    rows = sum(count for _, count in SEQUENCES)
    return torch.randn(rows, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(4))


def one_process(window: int) -> Tensor:
    """Return attention by whole tiles."""
    batch, q = step(None, 1), queries()
    y = torch.full_like(q, torch.nan)
    counts = np.diff(batch.seq_starts)
    group = HEADS // KV_HEADS
    for rows, chosen in (
        (narrow_rows(group, is_exact=True, itemsize=4), counts == 1),
        (wide_rows(group, HEAD_DIM, itemsize=4), counts > 1),
    ):
        plan = plan_tiles(
            batch.seq_starts,
            batch.positions[batch.seq_starts[:-1]],
            np.flatnonzero(chosen),
            group=group,
            rows=rows,
            kv_heads=KV_HEADS,
            programs=0,
            max_partials=0,
        )
        items, merges = torch.from_numpy(plan.items), torch.from_numpy(plan.merges)
        attention(
            q,
            pool(1, None).layer(0),
            y,
            tiles=DeviceTiles(rows=rows, items=items, merges=merges, partials=None),
            positions=torch.from_numpy(batch.positions),
            tables=torch.from_numpy(batch.caches[0].block_tables),
            scale=0.25,
            window=window,
        )
    return y


def of_ranks(degree: int, window: int) -> Tensor:
    """Return the columns of all ranks, one after the other."""

    def run(group: InProcessRank) -> Tensor:
        pieces = OwnPieces(ranks=degree, rank=group.rank, block_size=BLOCK)
        batch, q, op = step(pieces, degree), queries(), operation(group.rank, degree, window)
        first, end = (HEADS * r // degree for r in (group.rank, group.rank + 1))
        y = torch.full((len(q), (end - first) * HEAD_DIM), torch.nan)
        exchange: Any = ByTurns(group, rank=group.rank, degree=degree)
        spec: Any = SimpleNamespace(dtype=DType.F32)
        place: Any = SimpleNamespace(
            of=lambda view, counts: (q, y)[view.buffer.index],
            program=SimpleNamespace(max_positions=POSITIONS, caches=[spec]),
            ends=RankEnds(exchange=exchange),
            pool=lambda: pool(degree, group.rank),
            step=SimpleNamespace(
                positions=torch.from_numpy(batch.positions),
                block_tables=torch.from_numpy(batch.caches[0].block_tables),
            ),
        )
        rows = len(batch.positions)
        counts = Counts(tokens=rows, sequences=len(SEQUENCES), samples=0, batch=batch)
        with ByTurns.turn:
            ContextSteps(place, CpuStream(), exact=True).attend(op, counts)
        return y

    return torch.cat(on_all_ranks(InProcessGroup(degree, timeout_s=300.0).ranks(), run), dim=1)


@pytest.mark.parametrize("window", [0, 300])
def test_ranks_have_the_bits_of_one_process(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one_process(window)
    assert torch.isfinite(whole).all()
    for degree in (2, 3):
        assert torch.equal(of_ranks(degree, window), whole), degree
    monkeypatch.setattr(context_steps, "PARTS_BYTES", 1)  # one tile at a time
    assert torch.equal(of_ranks(2, window), whole)


def test_a_rank_has_an_item_for_each_of_its_pieces() -> None:
    items = np.array([[0, 5, 1, 0, 4, -1], [1, 0, 2, 0, 1, -1]], np.int32)
    rounds = np.array([2, 1], np.int32)
    own, merges = tiles_of_rank(items, rounds, rank=1, degree=2)
    assert own.tolist() == [[0, 5, 1, 1, 2, 0], [0, 5, 1, 3, 4, 1]]
    assert merges.tolist() == [[5, 0, 0], [0, 2, 0], [1, 2, 1]]
    first, _ = tiles_of_rank(items, rounds, rank=0, degree=2)
    assert first.tolist() == [[0, 5, 1, 0, 1, 0], [0, 5, 1, 2, 3, 1], [1, 0, 2, 0, 1, 2]]


def test_parts_are_counted_where_ranks_divide_positions() -> None:
    spec: Any = SimpleNamespace(dtype=DType.F32)

    def program(degree: int) -> Any:
        op = operation(0, degree, 0)
        return SimpleNamespace(max_positions=POSITIONS, caches=[spec], operations=lambda: [op])

    assert context_bytes(program(1), exact=True) == 0
    assert context_bytes(program(2), exact=True) >= 4 * context_steps.PARTS_BYTES // 2
