"""A layout of ranks as it is asked for: its model, its executors, what is compared with it.

Knows the command line; no times.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from bench.checkpoints import random_checkpoint
from bench.parallel.steps import BLOCK_SIZE, DEPTH, Pairs, run_step, step_batch
from quire.base.errors import SettingError
from quire.config.machine import num_usable_cores
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.declarations import PIECE_POSITIONS
from quire.program.expert_parallel import ExpertPlan
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.rank_executor import MirroredExecutor
from quire.weights.checkpoint import Checkpoint, open_checkpoint

PREFILL_TOKENS = 256
DECODED_ROWS = (1, 4, 16, 64)


# With context parallelism: fewer rows, with more positions before them.
CONTEXT_ROWS, CONTEXT_DEPTH = (1, 4), 4096
# Of each step, and of each step in a cell.
STEP_SECONDS, CELL_SECONDS = 12.0, 4.0


@dataclass(frozen=True)
class Layout:
    """What is measured: a model, what it is asked for, and the sizes of its executors."""

    asked: argparse.Namespace
    program: Program
    checkpoint: Checkpoint
    options: ExecutorOptions

    @property
    def depth(self) -> int:
        """Positions before each step."""
        return self.asked.depth or (DEPTH if self.asked.context == 1 else CONTEXT_DEPTH)

    @property
    def decoded_rows(self) -> tuple[int, ...]:
        """The sizes of the decode steps."""
        return DECODED_ROWS if self.asked.context == 1 else CONTEXT_ROWS

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Rows and tokens of each row, of all steps."""
        return [(rows, 1) for rows in self.decoded_rows] + [(1, PREFILL_TOKENS)]

    @property
    def block_size(self) -> int:
        """Of the ranks' cache."""
        return BLOCK_SIZE if self.asked.context == 1 else self.asked.context * PIECE_POSITIONS

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of a cache."""
        return max(self.decoded_rows) * ((self.depth + PREFILL_TOKENS) // block_size + 2)

    def ranks(self, mode: TpMode, plan: ExpertPlan | None) -> MirroredExecutor:
        """Load the ranks, with an empty cache."""
        asked = self.asked
        shared: dict[str, Any] = {
            "degree": asked.degree * asked.context,
            "context": asked.context,
            "experts": plan,
            "mode": mode,
        }
        made = (
            RankedExecutorClass(**shared)
            if asked.stages == 1
            else PipelineExecutorClass(stages=asked.stages, **shared)
        )
        executor = made(self.program, self.checkpoint, self.options)
        executor.allocate_cache(self.num_blocks(self.block_size), self.block_size)
        assert isinstance(executor, MirroredExecutor), "ranks of the native executor"
        return executor

    def pairs(self, what: str) -> Pairs:
        """Return the pairs of a measurement."""
        asked = self.asked
        seconds = STEP_SECONDS if asked.seconds is None else asked.seconds
        return Pairs(f"{asked.shape}: {what}", asked.pairs, seconds)


def layout_of(asked: argparse.Namespace) -> Layout:
    """Return what is asked for. Exits where ranks would share cores."""
    num_ranks = asked.degree * asked.context * asked.stages
    if num_usable_cores() < num_ranks:
        sys.exit(f"{num_ranks} ranks need as many cores; there are {num_usable_cores()}")
    print(f"{asked.shape}: loading the executors", file=sys.stderr, flush=True)
    folder = random_checkpoint(asked.shape)
    max_positions = (asked.depth or (DEPTH if asked.context == 1 else CONTEXT_DEPTH)) + 512
    plain = build_program(open_model(folder), dtype=DType.BF16, max_positions=max_positions)
    most = max(DECODED_ROWS if asked.context == 1 else CONTEXT_ROWS)
    limits = StepLimits(max_tokens=PREFILL_TOKENS, max_samples=most, max_sequences=most)
    return Layout(
        asked,
        quantize(plain, asked.precision),
        open_checkpoint(folder),
        ExecutorOptions(limits=limits, num_threads=num_ranks),
    )


def expert_plan(experts: str, whole: NativeExecutor, degree: int) -> ExpertPlan | None:
    """Return how experts are placed: by the loads of a few steps where that is asked for."""
    if experts == "split":
        return None
    if experts == "whole":
        return ExpertPlan()
    for number in range(4):
        run_step(whole, step_batch(1, PREFILL_TOKENS, whole.program.vocab_size, number))
    return ExpertPlan(loads=tuple(map(tuple, whole.expert_loads)), redundant=degree)


def has_both_modes(layout: Layout) -> bool:
    """Return whether ranks of such products are measured in both modes. Exits where these are asked
    for and cannot be."""
    asked, why = layout.asked, ""
    if not (asked.stages == asked.context == 1 and asked.experts == "split"):
        why = "--compare modes is for ranks of products: leave out what else divides the model"
    elif asked.mode != TpMode.EXACT:
        why = "--compare modes measures both: leave out --mode"
    else:
        try:
            for rank in range(asked.degree):
                shard(layout.program, degree=asked.degree, rank=rank, mode=TpMode.FAST)
        except SettingError as error:  # of a precision with groups that ranks would divide
            why = str(error)
    if why and asked.compare == "modes":
        sys.exit(why)
    return not why
