"""Policies side by side: the same trace at several speeds under each, and a light tenant's lot.

Each run is a simulation of its own (quire/sim/run.py); this says which are made and what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.config.groups import EngineConfig
from quire.obs.report import Progress
from quire.obs.timing import Goals
from quire.obs.trace import Arrival
from quire.sim.load import LIGHT, Asks, flooded, jobs_of
from quire.sim.machine import Machine
from quire.sim.run import simulate
from quire.sim.summary import summary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be compared. light_every: one in so many requests is a light tenant's, whose
    pace stays at `light_speed` while the others flood; 0: nobody is."""

    trace_name: str
    trace: Sequence[Arrival]
    policies: tuple[str, ...]
    speeds: tuple[float, ...]
    asks: Asks
    goals: Goals
    light_every: int = 0
    light_speed: float = 1.0


def compare(
    question: Question,
    machine: Machine,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    known: Sequence[Mapping[str, Any]] = (),
    on_run: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The result object, ready for JSON. Raises what `simulate` raises.

    known: runs of the same question that were made before, as on_run was told them.
    """
    progress = progress or Progress()
    made = {(run["policy"], run["speed"]): run for run in known}
    asks = question.asks
    left_out = jobs_of(question.trace, speed=1.0, asks=asks)[1]
    runs = []
    for policy in question.policies:
        settings = with_policy(config, policy)
        for speed in question.speeds:
            run = made.get((policy, speed))
            if run is None:
                run = _one(question, machine, settings, policy, speed, progress)
                if on_run is not None:
                    on_run(run)
            runs.append(run)
    progress.clear()
    return {
        "bench": "simulate",
        "settings": {
            "machine": machine.name,
            **{f"machine_{name}": value for name, value in machine.about.items()},
            "trace": question.trace_name,
            "num_requests": len(question.trace) - left_out,
            "left_out": left_out,
            "max_tokens": asks.max_tokens,
            "max_model_len": asks.max_model_len,
            "goals": asdict(question.goals),
            "goals_are_told": asks.ttft_slo_ms is not None,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "num_blocks": machine.num_blocks(config),
            "step_tokens": machine.step_tokens_of(config),
        },
        "runs": runs,
    }


def with_policy(config: EngineConfig, policy: str) -> EngineConfig:
    """The same config under another policy. Raises SettingError for one that is not known."""
    named: Any = policy  # the group checks that it is one of those there are
    return replace(config, scheduler=replace(config.scheduler, scheduling_policy=named))


def _one(
    question: Question,
    machine: Machine,
    config: EngineConfig,
    policy: str,
    speed: float,
    progress: Progress,
) -> dict[str, Any]:
    asks, goals = question.asks, question.goals
    jobs, _ = jobs_of(question.trace, speed=speed, asks=asks)

    def told(taken: int) -> None:
        if taken % 64 == 0:
            progress.say(f"{policy} at speed {speed:g}: {taken} of {len(jobs)} requests")

    run = simulate(jobs, asks, machine, config, on_progress=told)
    return {
        "policy": policy,
        "speed": speed,
        "summary": summary_of(run, jobs, goals),
        "light": _light(question, machine, config, speed) if question.light_every else None,
    }


def _light(
    question: Question, machine: Machine, config: EngineConfig, speed: float
) -> Mapping[str, Any]:
    """The light tenant beside the flood, and alone with the same requests."""
    asks, goals = question.asks, question.goals
    jobs, calm = flooded(
        question.trace,
        every=question.light_every,
        light_speed=question.light_speed,
        speed=speed,
        asks=asks,
    )
    beside = summary_of(simulate(jobs, asks, machine, config), jobs, goals)
    alone = summary_of(simulate(calm, asks, machine, config), calm, goals)
    return {"beside": beside["tenants"][LIGHT], "alone": alone["tenants"][LIGHT]}
