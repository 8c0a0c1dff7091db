"""Operations of a rank's program bound to tensors: exchanges with the ranks and stages beside it.

Columns of a rank are packed into one tensor, gathered, and put in place. Knows operations and ends
(exchange.py); no transport. Always holds: AllGather, Send and Recv change no byte; AllReduce adds
in the order of ranks in float32 and rounds once, so that its bits are those of every executor.
"""

from __future__ import annotations

from functools import partial

import torch

from quire.execute.gpu.exchange import RankEnds, TensorExchange
from quire.execute.gpu.place import Call, Place, widest_share
from quire.execute.gpu.step_buffers import Counts
from quire.program.comm_ops import AllGather, AllReduce, share_of
from quire.program.expert_ops import Experts
from quire.program.ops import Attention
from quire.program.stage_ops import Recv, Send

RankOp = AllGather | AllReduce | Send | Recv


def bind_rank_op(op: RankOp, place: Place) -> Call:
    """Return the call of an exchange. Raises ValueError where there is no such other rank."""
    ends = place.ends
    match op:
        case AllGather():
            exchange_of(op, ends)
            return partial(_all_gather, op, place)
        case AllReduce():
            exchange_of(op, ends)
            return partial(_all_reduce, op, place)
        case Send():
            if (target := ends.target) is None:
                raise ValueError(f"{op.kind}: there is no link to another stage")
            return lambda counts: target.send(place.of(op.x, counts))
        case Recv():
            if (source := ends.source) is None:
                raise ValueError(f"{op.kind}: there is no link from another stage")
            return lambda counts: source.receive(place.of(op.y, counts))


def exchange_of(op: AllGather | AllReduce | Experts | Attention, ends: RankEnds) -> TensorExchange:
    """Return what an operation exchanges through. Raises ValueError where there are no such
    ranks; those of attention are some consecutive ones of a group."""
    exchange = ends.exchange
    is_there = exchange is not None and (exchange.rank, exchange.degree) == (op.rank, op.degree)
    if isinstance(op, Attention) and exchange is not None:
        is_there = exchange.degree % op.degree == 0 and exchange.rank % op.degree == op.rank
    if exchange is None or not is_there:
        raise ValueError(f"{op.kind}: there are no ranks, or others, to exchange with")
    return exchange


def _all_gather(op: AllGather, place: Place, counts: Counts) -> None:
    exchange = exchange_of(op, place.ends)
    x, shares = place.of(op.x, counts), _shares(op)
    widest = widest_share(op)
    own, every = place.room.parts(len(x), widest, op.degree, x.dtype)
    start, end = shares[op.rank]
    own[:, : end - start] = x[:, start:end]
    exchange.all_gather(own, every)
    if widest * op.degree == x.shape[1]:  # equal shares: one copy
        x.unflatten(1, (op.degree, widest)).copy_(every.transpose(0, 1))
        return
    for part, (start, end) in zip(every, shares, strict=True):
        x[:, start:end] = part[:, : end - start]


def _all_reduce(op: AllReduce, place: Place, counts: Counts) -> None:
    exchange = exchange_of(op, place.ends)
    x = place.of(op.x, counts)
    own, every = place.room.parts(len(x), x.shape[1], op.degree, x.dtype)
    own.copy_(x)
    exchange.all_gather(own, every)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for part in every:
        total = total + part.float()
    x.copy_(total)


def _shares(op: AllGather) -> list[tuple[int, int]]:
    return [share_of(op.x.width, op.unit, rank, op.degree) for rank in range(op.degree)]
