"""The first layers of a model on its ranks, where they draft for it (--speculate self).

Every rank has its share of these layers with its own weights and its own part of the KV cache, and
buffers for their passes; rank 0 sends each pass before it computes it. Knows commands and the group
of ranks; no requests. Always holds: a pass is one more call in the order in which all ranks make
theirs, so that none comes between the exchanges of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire import _native
from quire.execute.native import NONE, TRUNK, Int32s, NativeExecutor
from quire.execute.native_first_layers import NativeFirstLayers
from quire.program.batch import NO_SLOTS, ForwardBatch
from quire.ranks.commands import Run, RunAgain
from quire.ranks.draft_share import DraftShare
from quire.ranks.leading import Lead


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnds:
    """What the first layers of a rank share with its executor. connect: sets what exchanges go
    through. own: turns a batch of the engine into that of the rank's own part of the cache."""

    connect: Callable[[_native.Program], None]
    own: Callable[[ForwardBatch], ForwardBatch]


class RankFirstLayers(NativeFirstLayers):
    """A NativeFirstLayers of a rank, of its share of `num` layers. num_threads: see there."""

    def __init__(
        self,
        model: NativeExecutor,
        share: DraftShare,
        ends: RankEnds,
        *,
        num: int,
        num_threads: int = 0,
        poison: bool = False,
    ) -> None:
        program, limits = share.programs[num], share.limits
        super().__init__(model, program, limits, num_threads=num_threads, poison=poison)
        self.num = num
        ends.connect(self._native)
        self._own = ends.own
        self._last: ForwardBatch | None = None  # of the last Run

    def share_cache(self) -> None:
        """See NativeFirstLayers; a stage may have none of these layers."""
        if self._program.caches[0].layers:
            super().share_cache()

    def do(self, command: Run | RunAgain) -> None:
        """Do what rank 0 does."""
        if isinstance(command, Run):
            self._last = command.batch
            self._reserve_angles(command.batch)
            self._run(command.segment, command.batch, command.sample_rows, command.then)
            return
        assert self._last is not None, "rank 0 runs the trunk first"
        self._run(command.segment, self._last, command.sample_rows)

    def _run(
        self, segment: int, batch: ForwardBatch, sample_rows: Int32s, then: int = NONE
    ) -> None:
        super()._run(segment, self._own(batch) if segment == TRUNK else batch, sample_rows, then)


class LeadingFirstLayers(RankFirstLayers):
    """The first layers of rank 0: what it does, all ranks do. lead: sends it. begin: does what
    comes before a pass, and returns its number where ranks are stages."""

    def __init__(
        self,
        model: NativeExecutor,
        share: DraftShare,
        ends: RankEnds,
        *,
        num: int,
        lead: Lead,
        begin: Callable[[Run], int],
        num_threads: int = 0,
        poison: bool = False,
    ) -> None:
        super().__init__(model, share, ends, num=num, num_threads=num_threads, poison=poison)
        self._lead, self._begin = lead, begin

    def _run(
        self, segment: int, batch: ForwardBatch, sample_rows: Int32s, then: int = NONE
    ) -> None:
        with self._lead.turn:
            if segment == TRUNK:
                plain = replace(batch, sample_rows=sample_rows, late_slots=NO_SLOTS)
                run = Run(
                    step=0,
                    segment=TRUNK,
                    then=then,
                    batch=plain,
                    sample_rows=sample_rows,
                    drafts=self.num,
                )
                self._lead.send(replace(run, step=self._begin(run)))
            else:
                again = RunAgain(segment=segment, first=0, sample_rows=sample_rows)
                self._lead.send(replace(again, drafts=self.num))
            with self._lead.in_step():
                super()._run(segment, batch, sample_rows, then)
