"""Route and Experts bound to kernels: mixtures of experts on a GPU, and what their ranks exchange.

What expert_ops.py is in plain PyTorch. Shapes depend on the rows of a step alone, never on what
they chose, so that nothing waits for the device and steps are captured: a rank with whole experts
gives the others room for the outputs of all slots. Knows operations, loaded weights and ends
(exchange.py); no transport. Always holds: a row's bits depend on its own choices, and its outputs
are added in the order of ids, whichever rank computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.execute.executor import StepLimits
from quire.execute.gpu.expert_ops import Holders, mixtures_of
from quire.execute.gpu.kernels.activation import activation
from quire.execute.gpu.kernels.byte_rows import ByteRows, quantize_rows
from quire.execute.gpu.kernels.grouped import GroupRoom, Groups, grouped
from quire.execute.gpu.kernels.grouped_ints import grouped_ints
from quire.execute.gpu.kernels.routing import (
    HolderTables,
    OwnSlots,
    choose_slots,
    route,
    weighted_sum,
)
from quire.execute.gpu.load import TORCH_TYPES
from quire.execute.gpu.place import Call, Place, rows_exchanged
from quire.execute.gpu.rank_ops import exchange_of
from quire.execute.gpu.step_buffers import Counts
from quire.program.comm_ops import share_of
from quire.program.expert_ops import Experts, Route
from quire.program.forms import RouterScore, RoutingForm
from quire.program.program import Program
from quire.program.tensors import DType, Rows
from quire.quant.scheme import ACTIVATION_GROUP

# A grouped product: rows, or as bytes, by a weight: outputs of slots.
Product = Callable[[Tensor, Tensor, Groups, int], None]


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Memory that the mixtures of a program use in turn, each for the slots of a step: ids, owners
    and places int32 and shares f32; bytes of gate and up, of what comes of them, and of outputs.
    rows: by columns of a product that takes bytes."""

    ids: Tensor
    owners: Tensor
    places: Tensor
    shares: Tensor
    groups: GroupRoom
    both: Tensor
    inner: Tensor
    outputs: Tensor
    rows: Mapping[int, ByteRows]

    @classmethod
    def of(cls, program: Program, limits: StepLimits, device: torch.device) -> ExpertScratch:
        """Return room for the largest mixture of a program."""
        sizes = _Sizes.of(program, limits)
        ids, owners, places = (
            torch.empty(sizes.slots, dtype=torch.int32, device=device) for _ in range(3)
        )
        return cls(
            ids=ids,
            owners=owners,
            places=places,
            groups=GroupRoom.of(sizes.slots, sizes.experts, device),
            shares=torch.empty(sizes.slots, dtype=torch.float32, device=device),
            both=torch.empty(sizes.both, dtype=torch.uint8, device=device),
            inner=torch.empty(sizes.inner, dtype=torch.uint8, device=device),
            outputs=torch.empty(sizes.outputs, dtype=torch.uint8, device=device),
            rows={
                columns: ByteRows.empty(rows, columns, device)
                for columns, rows in sizes.rows.items()
            },
        )

    @staticmethod
    def num_bytes(program: Program, limits: StepLimits) -> int:
        """Return the bytes of all buffers."""
        sizes = _Sizes.of(program, limits)
        of_rows = sum(
            rows * -(-columns // ACTIVATION_GROUP) * (ACTIVATION_GROUP + 4)
            for columns, rows in sizes.rows.items()
        )
        of_slots = 16 * sizes.slots + 4 * sum(GroupRoom.elements(sizes.slots, sizes.experts))
        return of_slots + sizes.both + sizes.inner + sizes.outputs + of_rows


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Slots, bytes, and rows by columns: the largest of a program's mixtures."""

    slots: int
    experts: int
    both: int
    inner: int
    outputs: int
    rows: Mapping[int, int]

    @classmethod
    def of(cls, program: Program, limits: StepLimits) -> _Sizes:
        found = [(0, 0, 0, 0, 0)]
        rows: dict[int, int] = {}
        for op in mixtures_of(program):
            step_rows = limits.rows(op.x.buffer.rows)
            slots, size = step_rows * op.top_k, op.x.dtype.itemsize
            whole = program.weights[op.down].columns
            width = op.x.width if op.holders else op.y.width
            own = op.own_inner(whole)
            found.append(
                (
                    slots,
                    len(op.own_experts),
                    _padded(slots * 2 * own * size),
                    _padded(slots * whole * size),
                    slots * width * DType.F32.itemsize,
                )
            )
            for name, count in ((op.gate_up, step_rows), (op.down, slots)):
                weight = program.weights[name]
                if weight.quantized is not None:
                    rows[weight.columns] = max(rows.get(weight.columns, 0), count)
        slots, experts, both, inner, outputs = map(max, zip(*found, strict=True))
        return cls(slots, experts, both, inner, outputs, rows)


def _padded(num_bytes: int) -> int:
    """Return whole elements of any type."""
    return num_bytes + -num_bytes % 8


def bind_route(op: Route, place: Place) -> Call:
    """Return the call of a choice of experts."""
    bias = place.vector(op.bias)

    def call(counts: Counts) -> None:
        route(
            place.of(op.x, counts),
            bias,
            place.of(op.y, counts),
            top_k=op.top_k,
            groups=op.groups,
            top_groups=op.top_groups,
            scale=op.scale,
            is_sigmoid=op.score is RouterScore.SIGMOID,
            is_normalized=op.form is RoutingForm.NORMALIZED,
        )

    return call


def bind_experts(op: Experts, place: Place, scratch: ExpertScratch) -> Call:
    """Return the call of a mixture. Raises ValueError where there are no such other ranks."""
    if op.degree > 1:
        exchange_of(op, place.ends)
    return _Mixture.of(op, place, scratch).compute


@dataclass(frozen=True, slots=True)
class _Mixture:
    """An Experts operation with its products. columns: inner ones of this rank. holders: where
    ranks have whole experts."""

    op: Experts
    place: Place
    scratch: ExpertScratch
    gate_up: Product
    down: Product
    columns: int
    whole: int
    holders: HolderTables | None

    @classmethod
    def of(cls, op: Experts, place: Place, scratch: ExpertScratch) -> _Mixture:
        """Bind the products of an operation."""
        whole = place.program.weights[op.down].columns
        return cls(
            op,
            place,
            scratch,
            gate_up=_product_of(place, op.gate_up, scratch),
            down=_product_of(place, op.down, scratch),
            columns=op.own_inner(whole),
            whole=whole,
            holders=_tables(op, place.step.token_ids.device) if op.holders else None,
        )

    def compute(self, counts: Counts) -> None:
        """Compute y of all rows of a step."""
        op, place, scratch = self.op, self.place, self.scratch
        x, y, top_k = place.of(op.x, counts), place.of(op.y, counts), op.top_k
        rows = len(x)
        if not rows:
            return
        slots = rows * top_k
        ids, shares = scratch.ids[:slots].view(rows, -1), scratch.shares[:slots].view(rows, -1)
        own = None
        if self.holders is not None:
            own = OwnSlots(
                owners=scratch.owners[:slots].view(rows, -1),
                places=scratch.places[:slots].view(rows, -1),
            )
        self._choose(ids, shares, own, counts)
        here = ids if own is None else own.places
        groups = Groups.of(here, len(op.own_experts), scratch.groups)
        both = _rows(scratch.both, slots, 2 * self.columns, x.dtype)
        self.gate_up(x, both, groups, top_k)
        inner = self._inner(both, slots)
        width = op.x.width if op.holders else op.y.width
        outputs = _rows(scratch.outputs, slots, width, torch.float32)
        self.down(inner, outputs, groups, 1)
        if own is None:
            weighted_sum(outputs, ids, shares, y)
        else:
            self._sum_of_ranks(outputs, ids, shares, own.owners, y)

    def _choose(self, ids: Tensor, shares: Tensor, own: OwnSlots | None, counts: Counts) -> None:
        op, place = self.op, self.place
        routing, starts = place.of(op.routing, counts), place.step.seq_starts
        sequences = counts.sequences
        if op.x.buffer.rows is not Rows.TOKENS:  # rows of samples are never more than the step's
            starts, sequences = starts.new_full((1,), len(routing)), 0
        choose_slots(
            routing,
            ids,
            shares,
            starts=starts,
            sequences=sequences,
            loads=place.loads.get(op.gate_up),
            holders=self.holders,
            own=own,
        )

    def _inner(self, both: Tensor, slots: int) -> Tensor:
        """Return form(gate) * up [slots, whole] of all ranks' columns."""
        op, columns = self.op, self.columns
        gate, up = both[:, :columns], both[:, columns:]
        inner = _rows(self.scratch.inner, slots, self.whole, both.dtype)
        if op.degree == 1 or op.holders:
            activation(gate, up, inner, form=op.form)
            return inner
        shares = [share_of(self.whole, op.unit, rank, op.degree) for rank in range(op.degree)]
        widest = max(end - start for start, end in shares)
        own, every = self.place.room.parts(slots, widest, op.degree, both.dtype)
        activation(gate, up, own[:, :columns], form=op.form)
        exchange_of(op, self.place.ends).all_gather(own, every)
        for part, (start, end) in zip(every, shares, strict=True):
            inner[:, start:end] = part[:, : end - start]
        return inner

    def _sum_of_ranks(
        self, outputs: Tensor, ids: Tensor, shares: Tensor, owners: Tensor, y: Tensor
    ) -> None:
        """Exchange the columns of outputs, and add this rank's up, some rows at a time."""
        op, exchange = self.op, exchange_of(self.op, self.place.ends)
        parts = [share_of(op.x.width, op.unit, rank, op.degree) for rank in range(op.degree)]
        widest = max(end - start for start, end in parts)
        at_once = rows_exchanged(op)
        for first in range(0, len(ids), at_once):
            some = slice(first, min(first + at_once, len(ids)))
            of_slots = outputs[some.start * op.top_k : some.stop * op.top_k]
            own, every = self.place.room.to_each(len(of_slots), widest, op.degree, outputs.dtype)
            for part, (start, end) in zip(own, parts, strict=True):
                part[:, : end - start] = of_slots[:, start:end]
            exchange.all_to_all(own, every)
            weighted_sum(every, ids[some], shares[some], y[some], owners=owners[some])


def _tables(op: Experts, device: torch.device) -> HolderTables:
    holders = Holders.of(op, device)
    return HolderTables(
        ranks=holders.ranks.int(),
        copies=holders.copies.int(),
        places=holders.own.int(),
        rank=op.rank,
    )


def _rows(memory: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return memory.view(dtype)[: rows * columns].view(rows, columns)


def _product_of(place: Place, name: str, scratch: ExpertScratch) -> Product:
    """Return the grouped product of a weight with an expert axis."""
    weight, few = place.program.weights[name], place.weights.few.get(name)
    if few is None:
        matrices = place.weights.plain[name].view(-1, weight.expert_rows, weight.columns)
        assert matrices.dtype == TORCH_TYPES[weight.dtype], "as it was loaded"
        return lambda x, y, groups, slots: grouped(x, matrices, y, groups, slots_a_row=slots)
    room, ints = scratch.rows[weight.columns], few

    def by_bytes(x: Tensor, y: Tensor, groups: Groups, slots: int) -> None:
        grouped_ints(quantize_rows(x, room), ints, y, groups, slots_a_row=slots)

    return by_bytes
