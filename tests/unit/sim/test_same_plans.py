"""A simulation makes the plans of the engine: the content of answers does not matter.

An engine computes a tiny model, samples, and stops at sampled stop ids; its clock shows the times
of the simulated machine. A simulation that only knows the lengths of the answers must produce the
same plans, to the last block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.clock import Clock
from quire.base.records import Request, StepPlan, StepResult
from quire.base.sampling_params import SamplingParams
from quire.config.groups import EngineConfig
from quire.engine.assembly.assemble import assemble
from quire.engine.assembly.scheduler_factory import make_scheduler, scheduler_limits
from quire.engine.core import EngineCore, Runner
from quire.runner.handle import Handle
from quire.scheduler import step_budget
from quire.scheduler.prefill import layered
from quire.sim.clock import VirtualClock
from quire.sim.load import RequestDefaults, RequestFactory, TraceRequest
from quire.sim.machine import Machine
from quire.sim.run import Run, TraceReplay, simulate
from quire.sim.runner import PendingStep
from tests.tiny_models import write_tiny_llama
from tests.unit.sim.made import config, drawn_requests, machine

DEFAULTS = RequestDefaults(max_tokens=40, max_model_len=256)
STOP_IDS = tuple(range(12))  # of 307: answers of about 25 tokens


class _Timed:
    """Compute with the engine's own runner in virtual time."""

    def __init__(self, runner: Runner, clock: VirtualClock, machine: Machine) -> None:
        self.runner = runner
        self.clock = clock
        self.cost = machine.cost
        self.until_ms = 0.0
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        begin_ms = max(self.clock.now_ms(), self.until_ms)
        self.until_ms = begin_ms + self.cost.step_ms(plan)
        return PendingStep(self.runner.collect(self.runner.submit(plan)), self.until_ms)

    def collect(self, handle: Handle) -> StepResult:
        assert isinstance(handle, PendingStep)
        self.clock.wait_until(handle.until_ms)
        return handle.result

    def close(self) -> None:
        self.runner.close()


class _Asking(RequestFactory):
    """A RequestFactory of requests that are sampled and end by the model's output."""

    def make(self, number: int, request: TraceRequest) -> Request:
        return replace(
            super().make(number, request),
            sampling=SamplingParams(seed=number, temperature=1.0, max_tokens=40),
            stop_ids=STOP_IDS,
        )


def _engine_run(settings: EngineConfig, requests: list[TraceRequest]) -> tuple[Run, list[StepPlan]]:
    """Run the engine of `settings`, with as many blocks as the simulation."""
    engine = assemble(settings, clock=Clock(), report=_nothing)
    with closing(engine.core.runner):
        made = machine()
        num_blocks = made.num_blocks(settings)
        assert num_blocks <= engine.card.num_blocks
        limits = scheduler_limits(
            settings.scheduler,
            num_blocks=num_blocks,
            max_model_len=256,
            step_tokens=32,
            num_layers=engine.num_layers,
        )
        scheduler = make_scheduler(
            settings, limits, num_blocks=num_blocks, fingerprint="tiny", hash_key=bytes(16)
        )
        clock = VirtualClock()
        timed = _Timed(engine.core.runner, clock, made)
        core = EngineCore(scheduler, timed, plans_in_flight=limits.plans_in_flight, report=_nothing)
        factory = _Asking(requests, DEFAULTS, vocab_size=engine.card.vocab_size)
        lengths: dict[str, int] = {}
        _count_tokens(core, lengths)
        run = TraceReplay(core, clock, requests, factory).run()
    for number, request in enumerate(requests):
        requests[number] = replace(request, output_tokens=lengths[str(number)])
    return run, timed.plans


def _count_tokens(core: EngineCore, lengths: dict[str, int]) -> None:
    """Record how many tokens each request gets."""
    step: Callable[..., Any] = core.step

    def counted(now_ms: Callable[[], float]) -> Any:
        outputs = step(now_ms)
        for output in outputs or ():
            name = output.request_id
            lengths[name] = lengths.get(name, 0) + len(output.token_ids)
        return outputs

    core.step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"plans_in_flight": 2},
        {"scheduling_policy": "sjf", "enable_prefix_caching": False},
        {"scheduling_policy": "fair", "max_num_seqs": 6},
        {"long_prompt_tokens": 48, "max_num_seqs": 6},
    ],
    ids=lambda more: "-".join(map(str, more.values())) or "plain",
)
def test_a_simulation_makes_the_plans_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(layered, "TILE_TOKENS", 1)  # makes layers worthwhile for short prompts
    monkeypatch.setattr(layered, "WORTH", 0.0)
    monkeypatch.setattr(step_budget, "MIN_PROMPT_TOKENS", 2)
    folder = write_tiny_llama(tmp_path, seed=5, max_position_embeddings=256)
    base = {"model": str(folder), "executor": "reference", "max_model_len": 256, "threads": 1}
    # The simulated machine has a kilobyte per token, the model less: blocks are the former's.
    settings = config(**{**base, "kv_cache_memory": "300KiB", **more})
    requests = drawn_requests(24, per_s=6, seed=5, shared=True)
    real, real_plans = _engine_run(settings, requests)
    plans: list[StepPlan] = []
    run = simulate(requests, DEFAULTS, machine(), settings, on_plan=plans.append)
    by_layers = sum(plan.layers is not None for plan in plans)
    assert (by_layers > 0) == ("long_prompt_tokens" in more)
    assert len({request.output_tokens for request in requests}) > 8, (
        "answers need many different lengths"
    )
    assert run.stats == real.stats
    assert run.stats.preemptions_total > 0
    assert run.stats.prefix_hit_tokens_total > 0 or not settings.cache.enable_prefix_caching
    assert [_numbers(one) for one in run.finished] == [_numbers(one) for one in real.finished]
    assert len(plans) == len(real_plans)
    for plan, real_plan in zip(plans, real_plans, strict=True):
        assert _comparable(plan) == _comparable(real_plan)


def _numbers(one: Any) -> tuple[float, ...]:
    return (
        one.request.arrival_ms,
        one.first_scheduled_ms,
        one.first_token_ms,
        one.last_token_ms,
        one.num_preemptions,
        one.cached_tokens,
    )


def _comparable(plan: StepPlan) -> list[list[int]]:
    """Return everything of a plan except token ids."""
    arrays = (
        *(plan.retired, plan.table_slots, plan.table_columns, plan.table_blocks),
        *(plan.copy_from, plan.copy_to, plan.slots, plan.starts, plan.counts, plan.store_from),
        plan.samples,
    )
    admitted = [(one.slot, int(one.request_id), len(one.token_ids)) for one in plan.admissions]
    layers = [] if plan.layers is None else list(astuple(plan.layers))
    return [*(np.asarray(array).tolist() for array in arrays), *map(list, admitted), layers]


def _nothing(what: str, **fields: Any) -> None:
    raise AssertionError(f"{what}: {fields}")
