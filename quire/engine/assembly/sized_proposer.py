"""SizedProposer: what proposes drafts in an engine, read and sized before a byte is loaded.

Each kind (quire/config/proposer_kinds.py) has a class that derives from it, in a file of its own;
proposers.py chooses one. Knows no kind. Order: made, counted in the memory plan, checked, and
loaded beside the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.base.clock import Clock
from quire.base.rare_records import Speculation
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.config.memory import DraftNeeds, MemoryPlan
from quire.execute.executor import Executor, ExecutorClass, ExecutorOptions, StepLimits
from quire.program.program import Program
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.passes import DraftLimits
from quire.speculative.proposer import Proposer

if TYPE_CHECKING:
    from quire.runner.tapped_runner import Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What a proposer is loaded beside.

    executor: of the model. options: as the model's. block_tokens: of a block of a KV cache in this
    process; those of the memory plan may be divided over ranks. settle: lets the stages of a
    pipeline finish the steps that they have begun. taps: where its runner leaves hidden states;
    None: it leaves none.
    """

    executor: Executor
    executor_class: ExecutorClass
    options: ExecutorOptions
    memory: MemoryPlan
    limits: SchedulerLimits
    clock: Clock
    block_tokens: int
    settle: Callable[[], None]
    taps: Taps | None

    @property
    def draft_blocks(self) -> int:
        """Return the KV blocks of what drafts."""
        memory = self.memory
        return memory.draft_blocks * (memory.block_size // self.block_tokens)

    def options_of(self, limits: StepLimits) -> ExecutorOptions:
        """Return the options of an executor for passes within `limits`. It shares the threads of
        the model's unless the model computes in another thread meanwhile."""
        beside = self.executor if self.limits.plans_in_flight == 1 else None
        return replace(self.options, limits=limits, beside=beside)

    def draft_limits(
        self, *, max_model_len: int, max_tokens: int, num_blocks: int | None = None
    ) -> DraftLimits:
        """Return the sizes of what drafts. num_blocks: None: all of the memory plan."""
        return DraftLimits(
            num_slots=self.limits.max_num_seqs,
            num_blocks=self.draft_blocks if num_blocks is None else num_blocks,
            block_size=self.block_tokens,
            max_model_len=min(max_model_len, self.memory.max_model_len),
            max_tokens=max_tokens,
        )


class SizedProposer(ABC):
    """A proposer that fits the model. needs: the memory that it takes besides."""

    needs: DraftNeeds

    def check(self, executor_class: ExecutorClass) -> None:  # noqa: B027  nothing is computed
        """Raise where executors of this class cannot compute what drafts."""

    def tap(self, program: Program) -> Program:
        """Return the model's program, with the outputs that the proposer reads."""
        return program

    def taps(self, num_slots: int) -> Taps | None:
        """Return an empty store for hidden states of requests; None where nothing reads them."""
        return None

    @abstractmethod
    def notes(self, max_model_len: int) -> list[str]:
        """Return lines for the log."""

    @abstractmethod
    def load(self, model: LoadedModel) -> Proposer:
        """Load what computes drafts and time its passes."""


def made_up_request() -> Request:
    """Return a request of two tokens, for timing passes."""
    return Request(
        request_id="warm-up",
        group_id="warm-up",
        stream=0,
        prompt_ids=np.zeros(2, np.int32),
        sampling=SamplingParams(seed=0),
        stop_ids=(),
        max_total_tokens=4,
        arrival_ms=0.0,
        speculation=Speculation(max_drafts=3),
    )
