"""Stages: where each rank of a pipeline is, and the links between ranks.

    rank    0 .. tp - 1   tp .. 2 tp - 1   and so on
    stage   the last      0                1, up to the last but one

Rank 0 is the engine's: it is in the last stage, which has the logits, so that tokens are chosen
where they are needed. Each rank sends its rows to the rank at the same place in the next stage. The
ranks of earlier stages get their commands through a link from rank 0; those of the last one by its
broadcast (rank_executor.py), since they run a step later. Knows no process. Always holds: links are
numbered alike in all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire._native import RankLink
from quire.comm.links import Link, LinkMemory, LinkSizes
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank
from quire.execute.executor import StepLimits
from quire.program.program import Program
from quire.program.stage_ops import Recv
from quire.ranks.stage_loads import LoadEnd, load_ends, load_link_bytes

# Rows that are on the way between two stages at once: as many as a step has, within these bounds.
_SLOT_BYTES, _MIN_SLOTS, _MAX_LINK_BYTES = 1 << 17, 4, 64 << 20
# A plan is at most a copy of blocks and a run; beside the plans in flight some may not be taken
# yet. Rank 0 must never wait for room while a stage waits for rank 0.
_COMMANDS_A_PLAN, _FURTHER_COMMANDS = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """`stages` stages of `tp` ranks each."""

    stages: int
    tp: int

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.stages * self.tp

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank."""
        return (rank // self.tp - 1) % self.stages

    def rank_at(self, stage: int, place: int) -> int:
        """Return the rank at a place of a stage."""
        return (stage + 1) % self.stages * self.tp + place

    @property
    def early_ranks(self) -> range:
        """The ranks of all stages but the last."""
        return range(self.tp, self.num_ranks)

    def message_sizes(self, sizes: SegmentSizes) -> LinkSizes:
        """Return the sizes of a link for commands."""
        slots = _COMMANDS_A_PLAN * self.stages + _FURTHER_COMMANDS
        return LinkSizes(slot_bytes=sizes.message_bytes, slots=slots)

    def link_bytes(self, rows: LinkSizes, sizes: SegmentSizes) -> int:
        """Return the bytes of all links, and what aligns them."""
        each = rows.total + self.message_sizes(sizes).total
        links = len(self.early_ranks) * each + load_link_bytes(self.stages)
        return _alignment(sizes.total(self.num_ranks)) + links


def row_sizes(programs: Iterable[Program], limits: StepLimits) -> LinkSizes:
    """Return the sizes of the links between the stages of these programs."""
    received = [
        [op.y.width * op.y.dtype.itemsize for op in own.segments["trunk"] if isinstance(op, Recv)]
        for own in programs
    ]
    slot_bytes = max([_SLOT_BYTES, *(max(widths, default=0) for widths in received)])
    step_bytes = limits.max_tokens * max(sum(widths) for widths in received)
    slots = -(-min(step_bytes, _MAX_LINK_BYTES) // slot_bytes)
    return LinkSizes(slot_bytes=slot_bytes, slots=max(slots + 1, _MIN_SLOTS))


class StageLinks:
    """The ends that one rank has. commands: from rank 0, or None in the last stage; to_early: to
    the ranks of the stages before, at rank 0; loads: of the counts of experts, by stage."""

    def __init__(
        self,
        group: SharedMemoryRank,
        layout: StageLayout,
        rows: LinkSizes,
        sizes: SegmentSizes,
    ) -> None:
        self.group = group
        used = sizes.total(layout.num_ranks)
        messages = layout.message_sizes(sizes)
        memory = LinkMemory(
            group,
            first_byte=(first := used + _alignment(used)),
            rows=rows,
            messages=messages,
            num_rows=len(layout.early_ranks),
            num_messages=len(layout.early_ranks),
        )
        rank, tp = group.rank, layout.tp
        stage, place = layout.stage_of(rank), rank % tp
        self.source: Link | None = None
        self.target: Link | None = None
        self.commands: Link | None = None
        if stage > 0:
            before = layout.rank_at(stage - 1, place)
            self.source = memory.rows(before - tp, group, peer=before, sends=False)
        if rank >= tp:
            after = layout.rank_at(stage + 1, place)
            self.target = memory.rows(rank - tp, group, peer=after, sends=True)
            self.commands = memory.messages(rank - tp, group, peer=0, sends=False)
        self.loads: dict[int, LoadEnd] = load_ends(
            group,
            first_byte=first + len(layout.early_ranks) * (rows.total + messages.total),
            leads=[layout.rank_at(early, 0) for early in range(layout.stages - 1)],
        )
        self.to_early: dict[int, Link] = {}
        if rank == 0:
            self.to_early = {
                early: memory.messages(early - tp, group, peer=early, sends=True)
                for early in layout.early_ranks
            }

    @property
    def ends(self) -> tuple[RankLink | None, RankLink | None]:
        """What recv and send move rows through."""
        source, target = self.source, self.target
        return (
            None if source is None else source.native,
            None if target is None else target.native,
        )

    @property
    def waited_ms(self) -> float:
        """Milliseconds that rows of the stage before were waited for."""
        return 0.0 if self.source is None else 1e-6 * self.source.native.waited_ns

    def begin(self, step: int) -> None:
        """Begin a step: the rows that are sent and received are its rows."""
        for link in (self.source, self.target):
            if link is not None:
                link.native.begin(step)

    def reject(self) -> None:
        """Let the next stage reject the step that was begun."""
        if self.target is not None:
            self.target.reject()


def _alignment(num_bytes: int) -> int:
    return -num_bytes % 64
