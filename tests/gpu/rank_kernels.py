"""Ranks of the torch executor in threads, which compute by kernels, from captured steps too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.execute.executor import StepLimits
from quire.execute.gpu.exchange import HostExchange, RankEnds
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor
from quire.execute.gpu.load import load
from quire.program.expert_parallel import SPLIT_EXPERTS, ExpertPlan
from quire.program.program import Program
from quire.program.shard import shard
from quire.weights.binding import bind
from quire.weights.checkpoint import open_checkpoint
from tests.gpu.launch_capture import RankCapture
from tests.gpu.torch_models import CPU, packed_for, sequence_logits
from tests.models.generate import sequence_batch
from tests.rank_threads import on_all_ranks

Float32s = NDArray[np.float32]
IDS, CHUNK, POSITIONS = list(range(3, 43)), 17, 64
LIMITS = StepLimits(max_tokens=CHUNK, max_samples=CHUNK, max_sequences=1)


class ByTurns(HostExchange):
    """An exchange of threads of which one computes at a time, as the interpreter needs it. kept:
    gets its calls while a step is captured, in which nothing is exchanged."""

    is_captured = True
    turn = threading.Lock()
    kept: Callable[[Callable[[], None]], None] | None = None

    def all_gather(self, own: Tensor, every: Tensor) -> None:
        self._do(lambda: HostExchange.all_gather(self, own, every))

    def all_to_all(self, own: Tensor, every: Tensor) -> None:
        self._do(lambda: HostExchange.all_to_all(self, own, every))

    def broadcast(self, values: Tensor) -> None:
        self._do(lambda: HostExchange.broadcast(self, values))

    def _do(self, call: Callable[[], None]) -> None:
        def in_turn() -> None:
            ByTurns.turn.release()
            try:
                call()
            finally:
                ByTurns.turn.acquire()

        if self.kept is None:
            in_turn()
        else:
            self.kept(in_turn)


def of_rank(
    folder: Path,
    own: Program,
    exchange: HostExchange,
    *,
    kernels: bool = False,
    capture: RankCapture | None = None,
) -> TorchExecutor:
    """Return the executor of one rank in a thread."""
    binding = bind(own, open_checkpoint(folder))
    return TorchExecutor(
        own,
        load(own, binding, CPU, None, **packed_for(kernels)),
        device=CPU,
        exact=True,
        limits=LIMITS,
        launch=LaunchOptions(
            kernels=kernels,
            capture=capture,
            ends=RankEnds(exchange=exchange),
        ),
        poison=True,
    )


def kernel_rank(
    folder: Path, own: Program, exchange: HostExchange | None, limits: StepLimits
) -> TorchExecutor:
    """Return the executor of a rank, or of one process, of which kernels compute all steps."""
    return TorchExecutor(
        own,
        load(own, bind(own, open_checkpoint(folder)), CPU, None, **packed_for(kernels=True)),
        device=CPU,
        exact=True,
        limits=limits,
        launch=LaunchOptions(kernels=True, ends=RankEnds(exchange=exchange)),
        poison=True,
    )


def kernel_logits(executor: TorchExecutor, *, late_at: int | None = None) -> Float32s:
    """Return the logits of a short prompt, in chunks and then token by token.

    late_at: a rank; of each second token the device of the first one has the id, and no host.
    """
    chunks = sequence_logits(executor, IDS[:6], max_positions=POSITIONS, chunk=3)
    tokens = []
    for position, token_id in enumerate(IDS[:4]):
        batch = sequence_batch([token_id], position, POSITIONS)
        if late_at is not None and position % 2:
            slot = np.zeros(1, np.int32)
            batch = replace(batch, token_ids=np.zeros(1, np.int32), late_slots=slot)
            executor._last.put(slot, np.array([0 if late_at else token_id], np.int32))
        executor.run_trunk(batch, head_rows=1)
        tokens.append(torch.as_tensor(executor.run_head(batch, 0, 1)).clone().numpy())
    return np.concatenate([chunks, *tokens])


def by_kernels(
    folder: Path, program: Program, degree: int, experts: ExpertPlan | None = None
) -> list[tuple[Float32s, int, list[list[int]]]]:
    """Return the logits of each rank, how many of its steps were replayed, and the rows that chose
    each expert. experts: how whole ones are placed."""
    placement = SPLIT_EXPERTS if experts is None else experts.placement(program, degree)

    def run(group: InProcessRank) -> tuple[Float32s, int, list[list[int]]]:
        own = shard(program, degree=degree, rank=group.rank, placement=placement)
        exchange = ByTurns(group, rank=group.rank, degree=degree)
        capture = RankCapture(exchange)
        with ByTurns.turn:
            executor = of_rank(folder, own, exchange, kernels=True, capture=capture)
            executor.allocate_cache(POSITIONS // 16 + 1, 16)
            first = kernel_logits(executor, late_at=group.rank)
            again = kernel_logits(executor, late_at=group.rank)
            np.testing.assert_array_equal(first, again, strict=True)
            # Late tokens are one more exchange.
            assert max(capture.exchanges) == min(capture.exchanges) + 1
            return again, executor.steps_replayed, executor.expert_loads

    return on_all_ranks(InProcessGroup(degree, timeout_s=300.0).ranks(), run)
