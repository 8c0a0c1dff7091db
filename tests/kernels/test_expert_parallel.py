"""Experts distributed over ranks: the columns of all ranks together are the bits of one process,
whichever rank has an expert, in one batch or several, and what is received is counted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank
from quire.program.comm_ops import share_of
from tests.cases import each_case
from tests.kernels.isas import ISAS
from tests.kernels.one_op import OneOp, Operand
from tests.kernels.test_experts import Mixture
from tests.rank_threads import on_all_ranks, shared_memory_ranks

UNIT = 4


@dataclass(frozen=True)
class OfRank:
    """What a rank has after the operation."""

    y: NDArray[np.float32]
    received_bytes: int
    loads: list[list[int]]
    reads: int


def on_ranks(
    mixture: Mixture, holders: tuple[int, ...], degree: int, *, isa: str, slot_bytes: int = 1 << 14
) -> list[OfRank]:
    """Run the operation on ranks, expert e on the ranks of the bits of holders[e]."""

    def run(group: SharedMemoryRank) -> OfRank:
        own = [expert for expert, mask in enumerate(holders) if mask >> group.rank & 1]
        start, end = share_of(mixture.hidden, UNIT, group.rank, degree)
        op = OneOp(
            "experts",
            [
                Operand(mixture.hidden, mixture.dtype),
                Operand(mixture.experts),
                Operand(end - start),
            ],
            isa,
            num_threads=1 + group.rank % 2,
            values={
                **{"form": mixture.form, "top_k": mixture.top_k, "holders": holders},
                **{"rank": group.rank, "degree": degree, "unit": UNIT},
            },
            weights=[
                ("matrix", mixture.scheme or mixture.dtype, mixture.made[name][own])
                for name in ("gate_up", "down")
            ],
            max_rows=mixture.rows + 2,
        )
        program = op.state["program"]
        program.set_group(group.native)
        y = op({0: mixture.made["x"], 1: mixture.made["routing"]}, num_rows=mixture.rows)[2]
        return OfRank(y, group.native.received_bytes, program.expert_loads, program.experts_read)

    sizes = SegmentSizes(slot_bytes=slot_bytes, message_bytes=64)
    return on_all_ranks(shared_memory_ranks(degree, sizes), run)


def masks(experts: int, degree: int, seed: int) -> tuple[int, ...]:
    """Draw the ranks of each expert: a rank at least, each rank at least one."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(1, 1 << degree, experts)
    drawn[rng.permutation(experts)[:degree]] = 1 << np.arange(degree)
    return tuple(drawn.tolist())


CASES = {
    "one row": (Mixture(rows=1, experts=5, top_k=3, hidden=37, inner=21), 2),
    "bf16": (Mixture(rows=20, experts=8, top_k=2, hidden=66, inner=45, dtype="bf16"), 3),
    "int8": (Mixture(rows=20, experts=6, top_k=4, hidden=130, inner=75, scheme="int8"), 2),
    "int4": (
        Mixture(rows=17, experts=6, top_k=4, hidden=96, inner=64, scheme="int4-g32", dtype="bf16"),
        4,
    ),
    "a rank per expert": (Mixture(rows=50, experts=5, top_k=2, hidden=40, inner=12), 5),
    "several batches": (Mixture(rows=1300, experts=7, top_k=6, hidden=20, inner=12), 2),
    "an expert of more rows than a batch": (
        Mixture(rows=1500, experts=2, top_k=2, hidden=9, inner=5),
        2,
    ),
}


@each_case("isa", ISAS)
@each_case("name", CASES)
def test_columns_of_all_ranks_are_the_bits_of_one_process(isa: str, name: str) -> None:
    mixture, degree = CASES[name]
    whole = mixture.native(isa)[0]
    routing = mixture.made["routing"]
    loads = [(routing != 0).sum(axis=0).tolist()]
    consecutive = tuple(
        1 << expert * degree // mixture.experts for expert in range(mixture.experts)
    )
    for holders in (consecutive, masks(mixture.experts, degree, 1)):
        found = on_ranks(mixture, holders, degree, isa=isa)
        np.testing.assert_array_equal(np.concatenate([one.y for one in found], axis=1), whole)
        assert all(one.loads == loads for one in found)
    assert sum(one.reads for one in on_ranks(mixture, consecutive, degree, isa=isa)) >= sum(
        (routing != 0).any(axis=0)
    )


def test_a_rank_receives_its_columns_of_the_pairs_of_others() -> None:
    mixture = Mixture(rows=30, experts=6, top_k=3, hidden=42, inner=10)
    holders = (1, 2, 1, 2, 2, 2)
    chosen = (mixture.made["routing"] != 0).sum(axis=0)
    for rank, one in enumerate(on_ranks(mixture, holders, 2, isa="", slot_bytes=400)):
        others = sum(n for n, mask in zip(chosen, holders, strict=True) if mask != 1 << rank)
        assert one.received_bytes == others * one.y.shape[1] * 4


def test_rows_without_an_expert_are_zero_and_end() -> None:
    mixture = Mixture(rows=4, experts=4, top_k=2, hidden=16, inner=8)
    mixture.made["routing"][:] = 0
    for one in on_ranks(mixture, (1, 1, 2, 2), 2, isa=""):
        assert not one.y.any()


@each_case(
    ("holders", "words"),
    [
        ((1, 2, 0, 1), "an expert is on no rank"),
        ((1, 2, 4, 1), "on one that does not exist"),
        ((1, 2, 1), "holders are not the experts"),
    ],
)
def test_wrong_holders_are_refused(holders: tuple[int, ...], words: str) -> None:
    mixture = Mixture(rows=4, experts=4, top_k=2, hidden=16, inner=8)
    with pytest.raises(ValueError, match=words):
        on_ranks(mixture, holders, 2, isa="")


def test_a_row_that_fits_no_slot_is_refused() -> None:
    mixture = Mixture(rows=4, experts=4, top_k=2, hidden=32, inner=8)
    with pytest.raises(ValueError, match="a row's part of 128 bytes; slots have 64"):
        on_ranks(mixture, (1, 1, 2, 2), 2, isa="", slot_bytes=64)
