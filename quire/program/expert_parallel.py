"""Expert parallelism: which ranks have which experts of a mixture.

    shard(program, degree=2, rank=0, placement=even_placement(program, 2))

A rank has the weights of its experts, whole. All ranks have all rows and all routing weights, so
that nothing is sent to an expert; the outputs of experts are exchanged, each rank receives its own
columns of all of them (all_to_all) and sums them by row in the order of the experts' ids: the bits
of one process. No row is dropped. A shared expert is one that all rows choose: it is split by
columns like a dense layer.

Knows no transport and no file. Always holds: every expert is on at least one rank, every rank has
at least one expert of each mixture, and the choice of ranks changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.base.errors import SettingError
from quire.program.comm_ops import share_of
from quire.program.declarations import Weight
from quire.program.expert_ops import Experts
from quire.program.program import Program

Span = tuple[int, int]  # first row and the row after the last


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """holders: for each mixture, by the name of its first weight, the ranks of each expert: bit r
    is set where rank r has it."""

    holders: Mapping[str, tuple[int, ...]]

    def of(self, op: Experts) -> tuple[int, ...]:
        """Return the ranks of an operation's experts; empty where they are split by columns."""
        return self.holders.get(op.gate_up, ())


# Of no mixture: every expert is split by columns.
SPLIT_EXPERTS = ExpertPlacement({})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How experts are to be placed. loads: the rows that chose each expert, by mixture; None: even
    placement. redundant: further copies of the most chosen experts of each mixture."""

    loads: tuple[tuple[int, ...], ...] | None = None
    redundant: int = 0

    def placement(self, program: Program, degree: int) -> ExpertPlacement:
        """Return the placement. Raises SettingError."""
        if self.loads is None:
            return even_placement(program, degree)
        return placement_by_load(program, degree, self.loads, redundant=self.redundant)


def mixtures(program: Program) -> Iterator[Experts]:
    """Yield the operations with several experts, in order."""
    for ops in program.segments.values():
        for op in ops:
            if isinstance(op, Experts) and op.is_mixture:
                yield op


def check_expert_parallel(program: Program, degree: int) -> None:
    """Raise SettingError unless every mixture has an expert for each of `degree` ranks."""
    counts = {op.routing.width for op in mixtures(program)}
    if not counts:
        raise SettingError(
            f"enable_expert_parallel: {program.name} has no mixture of experts; leave it out"
        )
    if min(counts) < degree:
        raise SettingError(
            f"enable_expert_parallel: {program.name} has layers of {min(counts)} experts, fewer "
            f"than {degree} ranks; take a tensor_parallel_size of at most {min(counts)}, or leave "
            "enable_expert_parallel out, which splits each expert"
        )


def even_placement(program: Program, degree: int) -> ExpertPlacement:
    """Return consecutive experts for each rank, as many for each as for the others or one less.

    Which ranks have one less differs from layer to layer, so that their weights take equal memory.
    """
    check_expert_parallel(program, degree)
    holders = {}
    for layer, op in enumerate(mixtures(program)):
        masks = [0] * op.routing.width
        for turn in range(degree):
            start, end = share_of(len(masks), 1, turn, degree)
            rank = turn if len(masks) % degree == 0 else (turn + layer) % degree
            for expert in range(start, end):
                masks[expert] = 1 << rank
        holders[op.gate_up] = tuple(masks)
    return ExpertPlacement(holders)


def placement_by_load(
    program: Program, degree: int, loads: Sequence[Sequence[int]], *, redundant: int = 0
) -> ExpertPlacement:
    """Return a placement by the rows that chose each expert, in each mixture in order.

    The most chosen experts are placed first, each on the rank with the least load that has room:
    ranks have as many experts as each other, or one less. `redundant` more copies in each mixture
    are of the experts with the largest load by copy. Raises SettingError for loads of other layers.
    """
    check_expert_parallel(program, degree)
    sizes = [op.routing.width for op in mixtures(program)]
    if [len(of_layer) for of_layer in loads] != sizes:
        found = f"{len(loads)} layers of {sorted({len(of_layer) for of_layer in loads})} experts"
        raise SettingError(
            f"expert_load_file has loads of {found}; {program.name} has {len(sizes)} layers of "
            f"{sorted(set(sizes))}; take a file that was measured with this model"
        )
    most = min(sizes) * (degree - 1)
    if not 0 <= redundant <= most:
        raise SettingError(f"num_redundant_experts is {redundant}; 0 to {most} are allowed")
    holders = {
        op.gate_up: _by_load(of_layer, degree, redundant, layer)
        for layer, (op, of_layer) in enumerate(zip(mixtures(program), loads, strict=True))
    }
    return ExpertPlacement(holders)


def _by_load(loads: Sequence[int], degree: int, redundant: int, layer: int) -> tuple[int, ...]:
    """Return the ranks of a mixture's experts."""
    experts = len(loads)
    copies = [1] * experts
    for _ in range(redundant):
        more = [e for e in range(experts) if copies[e] < degree]
        copies[max(more, key=lambda e: (loads[e] / copies[e], -e))] += 1
    share = [(load + 1) / count for load, count in zip(loads, copies, strict=True)]
    room = [0] * degree
    for turn in range(degree):
        start, end = share_of(experts + redundant, 1, turn, degree)
        room[(turn + layer) % degree] = end - start
    work, masks = [0.0] * degree, [0] * experts
    for expert in sorted(range(experts), key=lambda e: (-share[e], e)):
        for _ in range(copies[expert]):
            free = [r for r in range(degree) if room[r] and not masks[expert] >> r & 1]
            if not free:  # the rooms that are left are on ranks that have it
                break
            rank = min(free, key=lambda r: (work[r], r))
            masks[expert] |= 1 << rank
            work[rank] += share[expert]
            room[rank] -= 1
    return tuple(masks)


def spans_of(weight: Weight, experts: Sequence[int]) -> list[Span]:
    """Return the rows of some experts of a weight."""
    rows = weight.expert_rows
    return [(expert * rows, (expert + 1) * rows) for expert in experts]


def balance(loads: Sequence[Sequence[int]], placement: ExpertPlacement, degree: int) -> float:
    """Return the mean load of a rank over the largest, of all layers: 1 where all have the same.

    Layers wait for each other, so the largest of each layer counts. A replicated expert's rows
    count in equal parts.
    """
    mean = largest = 0.0
    for of_layer, holders in zip(loads, placement.holders.values(), strict=True):
        of_rank = [
            sum(
                load / masks.bit_count()
                for load, masks in zip(of_layer, holders, strict=True)
                if masks >> rank & 1
            )
            for rank in range(degree)
        ]
        mean += sum(of_rank) / degree
        largest += max(of_rank)
    return mean / largest if largest else 1.0
