"""One Answer over ranks that read weights from disk in each step: bit for bit that of one process
with all weights in memory.

Cases are those of test_ranks.py and test_stages.py, without drafts of the first layers, which are
refused beside weights on disk. Every matrix of a layer is on disk, in the smallest window, so that
each is read again in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from quire.base.log import Log
from quire.config.proposer_kinds import COMPUTED
from quire.execute import streamed_weights
from quire.execute.executor import Executor, ExecutorOptions
from quire.execute.streamed_weights import StreamSize, streamable_bytes
from quire.program.expert_parallel import ExpertPlan
from quire.program.program import Program
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.kinds import NativeRanks
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.rank_executor import MirroredExecutor
from quire.runner.pipelined_runner import PipelinedRunner
from quire.weights.pack_cache import PackCache
from tests.exact.divided_models import (
    LIMITS,
    DividedModel,
    compare_drafts,
    compare_with_one_process,
    drafted_cases,
)
from tests.exact.families import MAX_SHOWN
from tests.exact.rig import AloneRuns, Model
from tests.exact.test_ranks import case_for_ranks
from tests.exact.test_stages import case_for_stages
from tests.exact.workload import Case

OPTIONS: dict[str, Any] = {"binds": False, "poison": True, "shares_blocks": True}
# The ranks, and the models with the numbers of their cases.
LAYOUTS: dict[str, tuple[RankedExecutorClass, dict[str, int]]] = {
    "TP 2": (
        RankedExecutorClass(degree=2, **OPTIONS),
        {"llama": 0, "gemma3": 2, "qwen3_moe": 6, "tied int4": 5},
    ),
    "EP 2": (RankedExecutorClass(degree=2, experts=ExpertPlan(), **OPTIONS), {"qwen3_moe": 0}),
    "PP 2": (PipelineExecutorClass(stages=2, degree=1, **OPTIONS), {"llama": 1, "mixtral": 3}),
}


class OnDisk(DividedModel):
    """A DividedModel with weights on disk, in files of `folder`. step_bytes: that rank 0 reads in
    a step; read_bytes: that it has read when it ends."""

    def __init__(self, whole: Model, made: RankedExecutorClass, folder: Path) -> None:
        sizes = [streamable_bytes(own) for own in made.programs(whole.program)]
        kind = NativeRanks(on_disk=StreamSize(offload_bytes=sum(sizes)))
        super().__init__(whole, replace(made, kind=kind))
        self._cache = PackCache(folder, Log("test"))
        self.step_bytes, self.read_bytes = sizes[0], 0

    def make_executor(self, num_threads: int) -> Executor:
        """Start the processes, which have no first layers that draft."""
        return self._started(self._class, self.program)

    def _started(self, made: RankedExecutorClass, program: Program) -> Executor:
        options = ExecutorOptions(limits=LIMITS, num_threads=1, pack_cache=self._cache)
        return made(program, self.checkpoint, options)

    def close(self) -> None:
        """Note what was read; end the processes."""
        for executor in (*self._executors.values(), *self._tapped.values()):
            weights = cast(MirroredExecutor, executor).weights.values()
            stream = next(one.stream for one in weights if one.stream is not None)
            self.read_bytes += stream.bytes_read
        super().close()


@pytest.fixture(autouse=True)
def _smallest_window() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_weights, "WINDOW_BYTES", 0)
        yield


def drafted(case: Case) -> Case:
    """Return a case of which another model drafts, where the first layers would."""
    is_self = case.settings.proposer == "self"
    return replace(case, settings=replace(case.settings, proposer="draft")) if is_self else case


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_weights_on_disk_answer_as_one_process(
    wholes: dict[str, Model], alone: AloneRuns, layout: str, tmp_path: Path
) -> None:
    made, numbers = LAYOUTS[layout]
    is_staged = isinstance(made, PipelineExecutorClass)
    models = [OnDisk(wholes[name], made, tmp_path) for name in numbers]
    cases = [
        replace(case_for_stages(number, 1, 2) if is_staged else case_for_ranks(number, 1), model=at)
        for at, number in enumerate(numbers.values())
    ]
    runner = {"runner_type": PipelinedRunner} if is_staged else {}
    lines, reached = compare_with_one_process(
        models, map(drafted, cases), ["chunked"], alone=alone, **runner
    )
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert reached["chunked"]
    for model in models:
        assert model.read_bytes > 10 * model.step_bytes > 0
    files = list(tmp_path.iterdir())
    assert len(files) == 2 * len(models), "each rank has its share in a file of its own"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_what_computes_drafts_changes_no_answer(
    wholes: dict[str, Model], alone: AloneRuns, name: str, tmp_path: Path
) -> None:
    kinds = sorted(set(COMPUTED) - {"self"})
    cases = drafted_cases((case_for_ranks(number, 1) for number in count()), kinds, 1)
    model = OnDisk(wholes[name], LAYOUTS["TP 2"][0], tmp_path)
    lines, drafts = compare_drafts(model, cases, alone=alone)
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(drafts[kind] for kind in kinds), drafts
    assert model.read_bytes > 10 * model.step_bytes > 0
