"""Run steps through the runner as the engine does on a GPU, with two plans in flight.

The scheduler needs the compiled module, so plans are made here, of requests with known lengths.
Knows no model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu.batches import BLOCK_SIZE, columns_for
from bench.gpu.stage import Stage
from quire.base.records import Admission, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.execute.gpu.executor import TorchExecutor
from quire.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, seed=0)


def warm_tokens(stage: Stage) -> int:
    """Return how many tokens precede the timed ones: kernels are compiled, graphs captured."""
    return 1 if stage.is_dry else 8


class Idle:
    """The device's idle time between steps, and the host's time to launch steps.

    Idle is from the end of one step's launches to the start of the next one's; gaps within a step
    are not measured. Steps are replayed from graphs or launched kernel by kernel.
    """

    def __init__(self, stage: Stage, executor: TorchExecutor) -> None:
        self._is_on_card, self._executor = stage.is_on_card, executor
        self._places: list[tuple[Any, Any]] = []
        self._host_s: dict[str, list[float]] = {"replayed": [], "launched": []}

    def submit(self, runner: ModelRunner, plan: StepPlan) -> Any:
        """Submit a plan between two events of the device's stream."""
        if not self._is_on_card:
            return self._submitted(runner, plan)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        handle = self._submitted(runner, plan)
        last.record()
        self._places.append((first, last))
        return handle

    def host(self) -> dict[str, Any]:
        """Return the steps of either kind, and the median seconds of submitting one."""
        return {
            kind: {"steps": len(taken), "host_s": median(taken) if taken else None}
            for kind, taken in self._host_s.items()
        }

    def _submitted(self, runner: ModelRunner, plan: StepPlan) -> Any:
        before, began = self._executor.steps_replayed, time.perf_counter()
        handle = runner.submit(plan)
        taken = time.perf_counter() - began
        kind = "replayed" if self._executor.steps_replayed > before else "launched"
        self._host_s[kind].append(taken)
        return handle

    def seconds(self) -> float:
        """Return the total, once the device is idle."""
        pairs = zip(self._places, self._places[1:], strict=False)
        return sum(before[1].elapsed_time(after[0]) for before, after in pairs) / 1e3


def run(
    runner: ModelRunner, plans: Iterable[StepPlan], *, plans_in_flight: int, idle: Idle
) -> Iterator[StepResult]:
    """Return results of plans, with so many in flight. Raises RuntimeError if a row fails."""
    out: deque[Any] = deque()

    def oldest() -> StepResult:
        result = runner.collect(out.popleft())
        if result.errors:
            raise RuntimeError(f"step {result.step}: {result.errors[0].message}")
        return result

    for plan in plans:
        out.append(idle.submit(runner, plan))
        if len(out) == plans_in_flight:
            yield oldest()
    while out:
        yield oldest()


def decode(
    stage: Stage, executor: TorchExecutor, *, depth: int, tokens: int, plans_in_flight: int
) -> dict[str, Any]:
    """Decode `tokens` tokens of one request from a depth on.

    Returns seconds per token by the host's clock, and the idle part of them.
    """
    warm = warm_tokens(stage)
    runner = _runner(executor, depth + warm + tokens, plans_in_flight)
    plans = _plans(depth, warm + tokens)
    _warm_up(Idle(stage, executor), runner, islice(plans, warm), plans_in_flight)
    stage.settle()
    idle, began, seen = Idle(stage, executor), time.perf_counter(), 0
    for _ in run(runner, plans, plans_in_flight=plans_in_flight, idle=idle):
        seen += 1
    stage.settle()
    seconds = time.perf_counter() - began
    runner.end_thread()
    return {
        "seconds_a_token": seconds / seen,
        "idle_between_steps_s": idle.seconds() / seen,
        "steps": idle.host(),
    }


def what_waits(stage: Stage, executor: TorchExecutor, *, depth: int) -> str:
    """Return PyTorch's message on the first call that waits for the device before the next step
    is launched, or that there is none. Waiting for an event, as reading tokens does, is allowed."""
    if not stage.is_on_card:
        return "not on a GPU"
    warm = warm_tokens(stage)
    runner = _runner(executor, depth + 2 * warm, 2)
    plans = _plans(depth, 2 * warm)
    _warm_up(Idle(stage, executor), runner, islice(plans, warm), 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in run(runner, plans, plans_in_flight=2, idle=Idle(stage, executor)):
            pass
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.end_thread()
    return "nothing"


def _warm_up(
    idle: Idle, runner: ModelRunner, plans: Iterable[StepPlan], plans_in_flight: int
) -> None:
    for _ in run(runner, plans, plans_in_flight=plans_in_flight, idle=idle):
        pass


def _runner(executor: TorchExecutor, longest: int, plans_in_flight: int) -> ModelRunner:
    return ModelRunner(
        executor,
        num_slots=1,
        max_model_len=longest + 1,
        block_size=BLOCK_SIZE,
        max_samples=1,
        overlap=plans_in_flight > 1,
    )


def _plans(depth: int, tokens: int) -> Iterator[StepPlan]:
    """Return plans of one request with room for all of them, with `depth` positions cached."""
    columns = np.arange(columns_for(depth + tokens + 1), dtype=np.int32)
    prompt = np.random.default_rng(0).integers(0, 100, depth + 1).astype(np.int32)
    admission = Admission(
        slot=0,
        request_id="one",
        stream=0,
        token_ids=prompt,
        num_prompt_tokens=depth + 1,
        stop_ids=(),
        sampling=GREEDY,
    )
    first: dict[str, Any] = {
        "admissions": (admission,),
        "table_slots": np.zeros_like(columns),
        "table_columns": columns,
        "table_blocks": columns,
    }
    for step in range(tokens):
        start = np.array([depth + step], np.int32)
        yield StepPlan(
            step=step,
            **(first if step == 0 else {}),
            slots=np.zeros(1, np.int32),
            starts=start,
            counts=np.ones(1, np.int32),
            store_from=start,
            sample_counts=np.ones(1, np.int32),
        )
