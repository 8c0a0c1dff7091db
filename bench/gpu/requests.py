"""512 requests of 1,024 prompt tokens and 512 output tokens, 256 running: tokens a second.

The runner computes plans made here by the simplest policy (a slot is refilled as soon as its
request is done; prompts are computed in chunks beside decoding requests), since the scheduler needs
the compiled module. Every request has all its blocks from the start, so nothing is preempted. In a
section of its own (peer.py), transformers' continuous batching runs on the same shapes.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.gpu.batches import BLOCK_SIZE, columns_for
from bench.gpu.limits import device_limits
from bench.gpu.loop import GREEDY, Idle, run
from bench.gpu.models import executor_of, program_of
from bench.gpu.stage import Stage
from quire.base.records import Admission, StepPlan
from quire.execute.gpu.executor import TorchExecutor
from quire.program.cost import StepShape
from quire.program.program import Program
from quire.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of the load."""

    requests: int
    prompt: int
    answer: int
    running: int
    step_tokens: int


FULL = Load(requests=512, prompt=1024, answer=512, running=256, step_tokens=4096)
# Every size of a step, few of each: launches do not depend on the repetition.
REHEARSAL = replace(FULL, requests=300, prompt=96, answer=3)
FEW = 16  # requests of the peer's first wave
DRY = Load(requests=3, prompt=4, answer=2, running=2, step_tokens=6)


@dataclass(slots=True)
class Slots:
    """Positions computed and known per slot; -1 computed for a free slot."""

    load: Load
    columns: int
    waiting: int
    computed: dict[int, int] = field(default_factory=dict)
    free: deque[int] = field(default_factory=deque)

    def plan(self, step: int) -> StepPlan | None:
        """Return the next step, or None when all is done."""
        admissions = []
        while self.free and self.waiting:
            slot = self.free.popleft()
            self.waiting -= 1
            self.computed[slot] = 0
            admissions.append(self._admission(slot))
        if not self.computed:
            return None
        rows: list[tuple[int, int, int]] = []
        left = self.load.step_tokens
        for slot, start in self.computed.items():  # decoding requests come first
            if start >= self.load.prompt:
                rows.append((slot, start, 1))
                left -= 1
        for slot, start in self.computed.items():
            if start < self.load.prompt and left > 0:
                count = min(self.load.prompt - start, left)
                rows.append((slot, start, count))
                left -= count
        slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        admitted = np.array([admission.slot for admission in admissions], np.int32)
        table_slots = np.repeat(admitted, self.columns).astype(np.int32)
        table_columns = np.tile(np.arange(self.columns, dtype=np.int32), len(admitted))
        return StepPlan(
            step=step,
            admissions=tuple(admissions),
            table_slots=table_slots,
            table_columns=table_columns,
            table_blocks=table_slots * np.int32(self.columns) + table_columns,
            slots=slots,
            starts=starts,
            counts=counts,
            store_from=starts,
            sample_counts=(starts + counts >= self.load.prompt).astype(np.int32),
        )

    def advance(self, plan: StepPlan) -> None:
        """Count what a plan computes, and free slots that it finishes."""
        for slot, start, count in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            self.computed[slot] = start + count
            if start + count >= self.load.prompt + self.load.answer - 1:
                del self.computed[slot]
                self.free.append(slot)

    def _admission(self, slot: int) -> Admission:
        rng = np.random.default_rng(self.waiting)
        return Admission(
            slot=slot,
            request_id=str(self.waiting),
            stream=0,
            token_ids=rng.integers(0, 100, self.load.prompt).astype(np.int32),
            num_prompt_tokens=self.load.prompt,
            stop_ids=(),
            sampling=GREEDY,
        )


def requests(stage: Stage) -> None:
    """Run the requests, in fast mode and then exact, and as few as the peer answers first."""
    load = _load(stage)
    few = replace(load, requests=min(FEW, load.requests), running=min(FEW, load.running))
    limits = device_limits(stage)
    for exact in (False, True):
        mode = "exact" if exact else "fast"
        program = program_of(stage, "Llama-3.1-8B")
        executor = executor_of(
            stage,
            program,
            exact=exact,
            max_tokens=load.step_tokens,
            max_sequences=load.running,
            blocks=load.running * columns_for(load.prompt + load.answer),
        )
        for title, asked in ((mode, load), (f"{mode}, {few.requests} requests", few)):
            if stage.has_time():
                stage.report(title, _answered(stage, executor, program, asked, limits))
        executor.close()
        # Weights and cache of both modes at once do not fit into 80 GB.
        del executor
        gc.collect()
        stage.release()


def _answered(
    stage: Stage, executor: TorchExecutor, program: Program, load: Load, limits: dict[str, Any]
) -> dict[str, Any]:
    """Return what the requests of a load took."""
    runner = ModelRunner(
        executor,
        num_slots=load.running,
        max_model_len=load.prompt + load.answer,
        block_size=BLOCK_SIZE,
        max_samples=load.running,
        overlap=True,
    )
    columns = columns_for(load.prompt + load.answer)
    slots = Slots(load, columns, load.requests, free=deque(range(load.running)))
    computed: list[StepPlan] = []

    def plans() -> Iterator[StepPlan]:
        """Yield plans without reading tokens: the end of each request is known beforehand."""
        while stage.has_time() and (plan := slots.plan(len(computed))) is not None:
            slots.advance(plan)
            computed.append(plan)
            yield plan

    idle, began = Idle(stage, executor), time.perf_counter()
    answered = sum(
        len(result.token_ids) for result in run(runner, plans(), plans_in_flight=2, idle=idle)
    )
    stage.settle()
    seconds = time.perf_counter() - began
    runner.end_thread()
    floor_s = sum(_floor_s(program, plan, limits) for plan in computed)
    return {
        "is_whole": answered == load.requests * load.answer,
        "seconds": seconds,
        "steps": {"all": len(computed), **idle.host()},
        "idle_between_steps_s": idle.seconds(),
        "answered_tokens_per_s": answered / seconds,
        "share_of_floor": floor_s / seconds,
    }


def _load(stage: Stage) -> Load:
    if stage.is_rehearsal:
        return REHEARSAL
    return DRY if stage.is_dry else FULL


def _floor_s(program: Program, plan: StepPlan, limits: dict[str, Any]) -> float:
    cost = program.step_cost(StepShape(plan.counts.tolist(), plan.starts.tolist()))
    return max(
        cost.memory_bytes / limits["copy_bytes_per_s"],
        cost.operations / limits["bf16_ops_per_s"],
    )
