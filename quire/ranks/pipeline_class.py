"""PipelineExecutorClass: an executor of several stages, of one or more ranks each, as one to what
uses it.

Sizes, starts and compares the ranks as executor_class.py does; each loads the weights of its
stage's layers only, and has the KV cache of these. Always holds: answers are those of the native
executor, bit for bit (quire/program/split.py), and so is the digest of the weights, which is put
together from what the stages have read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quire.base.log import Log
from quire.comm.links import LinkSizes
from quire.comm.shared_memory import SegmentSizes, SharedMemoryRank
from quire.execute.executor import ExecutorMemory, ExecutorOptions, StepLimits
from quire.program.expert_parallel import mixtures
from quire.program.program import Program
from quire.program.split import check_stages, layers_of_stages, split, split_first_layers
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.leading import LeadingExecutor
from quire.ranks.shared_pools import PoolShare
from quire.ranks.stage_loads import StageLoads
from quire.ranks.stages import StageLayout, StageLinks, row_sizes
from quire.ranks.start import RankReady, RankStart, check_ready, ready_of
from quire.weights.binding import bind
from quire.weights.checkpoint import Checkpoint
from quire.weights.content import content_sample, joined_digest


@dataclass(frozen=True, kw_only=True)
class PipelineExecutorClass(RankedExecutorClass):
    """An ExecutorClass of `stages` stages; `degree` ranks share each of them."""

    stages: int

    @property
    def layout(self) -> StageLayout:
        """Where each rank is."""
        return StageLayout(stages=self.stages, tp=self.degree)

    @property
    def num_ranks(self) -> int:
        """See RankedExecutorClass."""
        return self.layout.num_ranks

    def check_program(self, program: Program) -> None:
        """Raise SettingError where it cannot be split so, ModelError where a kernel lacks."""
        check_stages(program, self.stages)
        super().check_program(program)

    def programs(self, program: Program) -> list[Program]:
        """Return each rank's program, by rank."""
        stages, layout = split(program, self.stages), self.layout
        placement = self.placement(program)
        return [
            self._share(stages[layout.stage_of(rank)], rank % self.degree, placement)
            for rank in range(self.num_ranks)
        ]

    def _together(
        self, programs: Sequence[Program], limits: StepLimits, parts: Sequence[ExecutorMemory]
    ) -> ExecutorMemory:
        """See RankedExecutorClass; and of the rows between stages."""
        memory = super()._together(programs, limits, parts)
        rows = row_sizes(programs, limits)
        links = len(self.layout.early_ranks) * rows.total if self.kind.shares_memory else 0
        return replace(memory, step_bytes=memory.step_bytes + links)

    def _first_layers(self, program: Program, num: int) -> list[Program]:
        stages = split_first_layers(program, num, self.stages)
        return [stages[self.layout.stage_of(rank)] for rank in range(self.num_ranks)]

    def pool_shares(self, program: Program) -> list[PoolShare]:
        """See RankedExecutorClass; of the layers of each rank's stage."""
        of_ranks, layout = super().pool_shares(program), self.layout
        counts = layers_of_stages(program, self.stages)
        ends = [sum(counts[: stage + 1]) for stage in range(self.stages)]
        return [
            replace(
                of_ranks[rank % self.degree],
                layers=(ends[stage] - counts[stage], ends[stage]),
            )
            for rank in range(self.num_ranks)
            for stage in [layout.stage_of(rank)]
        ]

    def plans_in_flight(self) -> int:
        """See ExecutorClass: a step for each stage."""
        return self.stages

    def __call__(
        self, program: Program, checkpoint: Checkpoint, options: ExecutorOptions
    ) -> LeadingExecutor:
        bind(program, checkpoint)  # a stage does not know what else the checkpoint should have
        Log("engine").event("layers are divided", stages=self.shares(program))
        return super().__call__(program, checkpoint, options)

    def shares(self, program: Program) -> str:
        """Return the layers and bytes of each stage, in words."""
        counts = layers_of_stages(program, self.stages)
        ends = [sum(counts[:stage]) for stage in range(self.stages + 1)]
        parts = zip(pairwise(ends), split(program, self.stages), strict=True)
        return "; ".join(
            f"layers {first}-{end - 1}: {own.weight_bytes} bytes of weights, "
            f"{own.caches[0].token_bytes} of KV cache a token"
            for (first, end), own in parts
        )

    def _rank_zero(
        self,
        programs: Sequence[Program],
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        group: SharedMemoryRank,
        sizes: SegmentSizes,
    ) -> LeadingExecutor:
        layout, rows = self.layout, _rows_of(sizes)
        layers = tuple(
            programs[layout.rank_at(stage, 0)].caches[0].layers for stage in range(self.stages)
        )
        links = StageLinks(group, layout, rows, sizes)
        executor = self.kind.leading_stages(
            programs[0],
            checkpoint,
            replace(options, num_threads=self._threads(options), beside=None),
            links,
            layers,
            poison=self.poison,
        )
        executor.lead.loads = StageLoads(
            links.loads,
            [
                [one.routing.width for one in mixtures(programs[layout.rank_at(stage, 0)])]
                for stage in range(self.stages - 1)
            ],
        )
        return executor

    def _sizes(self, programs: Sequence[Program], limits: StepLimits) -> SegmentSizes:
        plain = super()._sizes(programs, limits)
        return _PipelineSizes(
            slot_bytes=plain.slot_bytes,
            message_bytes=plain.message_bytes,
            rows=row_sizes(programs, limits),
        )

    def _stage_link_bytes(self, sizes: SegmentSizes) -> int:
        return self.layout.link_bytes(_rows_of(sizes), sizes)

    def _start(
        self,
        rank: int,
        program: Program,
        checkpoint: Checkpoint,
        options: ExecutorOptions,
        sizes: SegmentSizes,
        cpus: tuple[int, ...],
    ) -> RankStart:
        start = super()._start(rank, program, checkpoint, options, sizes, cpus)
        rows = _rows_of(sizes)
        return replace(
            start, stages=self.stages, row_slot_bytes=rows.slot_bytes, row_slots=rows.slots
        )

    def _sample(self, checkpoint: Checkpoint) -> str:
        """See RankedExecutorClass; stages read different tensors."""
        return content_sample(checkpoint)

    def _compare(self, executor: LeadingExecutor, ranks: Sequence[tuple[int, RankReady]]) -> None:
        """Compare the ranks of each stage with each other, and all in what is not their weights;
        then let the executor have the digest of all weights."""
        layout = self.layout
        own = ready_of(executor.recipe, executor.weights_digest)
        digests = {layout.stage_of(0): own.weights_digest}
        for rank, ready in ranks:
            digest = digests.setdefault(layout.stage_of(rank), ready.weights_digest)
            check_ready(rank, ready, replace(own, weights_digest=digest))
        executor.weights_digest = joined_digest(list(digests.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PipelineSizes(SegmentSizes):
    """With the sizes of a link for rows."""

    rows: LinkSizes


def _rows_of(sizes: SegmentSizes) -> LinkSizes:
    assert isinstance(sizes, _PipelineSizes), "made by _sizes"
    return sizes.rows
