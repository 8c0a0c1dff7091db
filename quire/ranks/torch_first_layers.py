"""The first layers of a model on its ranks of the torch executor, where they draft for it.

As first_layers.py has them of the native executor: each rank its share, with the weights, the part
of the KV cache and the ends of exchanges of its executor; rank 0 sends each pass before it computes
it. Knows commands and the group of ranks; no requests. Always holds: a pass is one more call in the
order in which all ranks make theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.first_layers import TorchFirstLayers
from quire.execute.native import HEAD, NONE, TRUNK
from quire.program.batch import ForwardBatch
from quire.ranks.commands import Run, RunAgain
from quire.ranks.draft_share import DraftShare
from quire.ranks.leading import Lead

OwnBatch = Callable[[ForwardBatch], ForwardBatch]


class TorchRankFirstLayers(TorchFirstLayers):
    """A TorchFirstLayers of a rank, of its share of `num` layers. own: turns a batch of the engine
    into that of the rank's own part of the cache."""

    def __init__(
        self,
        model: TorchExecutor,
        share: DraftShare,
        own: OwnBatch,
        *,
        num: int,
        poison: bool = False,
    ) -> None:
        super().__init__(model, share.programs[num], share.limits, poison=poison)
        self.num = num
        self._own = own
        self._ran: ForwardBatch | None = None  # the batch of the last pass

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """See Executor."""
        super().run_trunk(self._own(batch), head_rows=head_rows)

    def do(self, command: Run | RunAgain) -> None:
        """Do what rank 0 does."""
        if isinstance(command, Run):
            self._ran = command.batch
            self.run_trunk(command.batch, head_rows=len(command.sample_rows))
            return
        assert self._ran is not None, "rank 0 runs the trunk first"
        batch, first = self._ran, command.first
        if first < 0:
            batch, first = replace(batch, sample_rows=command.sample_rows), 0
        self.run_head(batch, first, len(command.sample_rows))


class LeadingTorchFirstLayers(TorchRankFirstLayers):
    """The first layers of rank 0: what it does, all ranks do. lead: sends it. begin: does what
    comes before a pass, and returns its number where ranks are stages."""

    def __init__(
        self,
        model: TorchExecutor,
        share: DraftShare,
        own: OwnBatch,
        *,
        num: int,
        lead: Lead,
        begin: Callable[[Run], int],
        poison: bool = False,
    ) -> None:
        super().__init__(model, share, own, num=num, poison=poison)
        self._lead, self._begin = lead, begin

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        """See Executor."""
        run = Run(
            step=0,
            segment=TRUNK,
            then=HEAD if head_rows else NONE,
            batch=batch,
            sample_rows=batch.sample_rows[:head_rows],
            drafts=self.num,
        )
        self._lead.send(replace(run, step=self._begin(run)))
        self._ran = batch
        with self._lead.in_step():
            super().run_trunk(batch, head_rows=head_rows)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> Any:
        """See Executor."""
        rows = batch.sample_rows[first : first + count]
        begins = first if batch is self._ran else -1
        again = RunAgain(segment=HEAD, first=begins, sample_rows=rows, drafts=self.num)
        self._lead.send(again)
        with self._lead.in_step():
            return super().run_head(batch, first, count)
