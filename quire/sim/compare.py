"""Compare scheduling policies on one trace at several speeds, optionally with a light tenant.

Each run is an independent simulation (quire/sim/run.py). A comparison that is stopped returns the
runs so far, the last of them partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.config.groups import EngineConfig
from quire.obs.report import Progress
from quire.obs.timing import Goals
from quire.obs.trace import Arrival
from quire.sim.drafts import DraftAcceptance
from quire.sim.load import LIGHT, RequestDefaults, trace_requests, with_flood
from quire.sim.machine import Machine
from quire.sim.run import simulate
from quire.sim.summary import summary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What to compare. light_every: one request in so many is a light tenant's.

    The light tenant's requests keep arriving at light_speed while the others flood; 0: no light
    tenant. acceptance: of draft tokens; None: there are none.
    """

    trace_name: str
    trace: Sequence[Arrival]
    policies: tuple[str, ...]
    speeds: tuple[float, ...]
    defaults: RequestDefaults
    goals: Goals
    light_every: int = 0
    light_speed: float = 1.0
    acceptance: DraftAcceptance | None = None


def compare(
    comparison: Comparison,
    machine: Machine,
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    known: Sequence[Mapping[str, Any]] = (),
    on_run: Callable[[Mapping[str, Any]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Return the result object, ready for JSON. Raises what `simulate` raises.

    known: runs of the same comparison from an earlier call, as on_run received them. on_run
    receives complete runs only. should_stop: see `simulate`; "complete" in the result is False if
    it returned True before all runs were complete.
    """
    progress = progress or Progress()
    made = {(run["policy"], run["speed"]): run for run in known}
    defaults = comparison.defaults
    left_out = trace_requests(comparison.trace, speed=1.0, defaults=defaults)[1]
    wanted = [(policy, speed) for policy in comparison.policies for speed in comparison.speeds]
    runs: list[Mapping[str, Any]] = []
    for number, (policy, speed) in enumerate(wanted, start=1):
        run = made.get((policy, speed))
        if run is None:
            label = f"run {number} of {len(wanted)}: {policy} at speed {speed:g}"
            settings = with_policy(config, policy)
            run = _one(comparison, machine, settings, policy, speed, progress, label, should_stop)
            if run is not None and run["complete"] and on_run is not None:
                on_run(run)
        if run is not None:
            runs.append(run)
        if run is None or not run["complete"]:
            break
    progress.clear()
    return {
        "bench": "simulate",
        "settings": {
            "machine": machine.name,
            **{f"machine_{name}": value for name, value in machine.about.items()},
            "trace": comparison.trace_name,
            "num_requests": len(comparison.trace) - left_out,
            "left_out": left_out,
            "max_tokens": defaults.max_tokens,
            "max_model_len": defaults.max_model_len,
            "goals": asdict(comparison.goals),
            "goals_are_told": defaults.ttft_slo_ms is not None,
            **_drafts_of(comparison.acceptance),
            "max_num_seqs": config.scheduler.max_num_seqs,
            "num_blocks": machine.num_blocks(config),
            "step_tokens": machine.step_tokens_of(config),
        },
        "complete": len(runs) == len(wanted) and all(run.get("complete", True) for run in runs),
        "num_runs": len(wanted),
        "runs": runs,
    }


def _drafts_of(acceptance: DraftAcceptance | None) -> dict[str, Any]:
    """Return the settings of drafts, where there are some."""
    if acceptance is None:
        return {}
    return {
        "draft_acceptance": list(acceptance.rates),
        "max_draft_tokens": acceptance.max_drafts,
    }


def with_policy(config: EngineConfig, policy: str) -> EngineConfig:
    """Return the config with another policy. Raises SettingError for an unknown one."""
    named: Any = policy  # checked by the config group
    return replace(config, scheduler=replace(config.scheduler, scheduling_policy=named))


def _one(
    comparison: Comparison,
    machine: Machine,
    config: EngineConfig,
    policy: str,
    speed: float,
    progress: Progress,
    label: str,
    should_stop: Callable[[], bool] | None,
) -> dict[str, Any] | None:
    """Simulate one policy at one speed; None where it was stopped before any request ended."""
    defaults, goals = comparison.defaults, comparison.goals
    requests, _ = trace_requests(comparison.trace, speed=speed, defaults=defaults)
    run = simulate(
        requests,
        defaults,
        machine,
        config,
        on_progress=_RunProgress(progress, label, len(requests)),
        should_stop=should_stop,
        acceptance=comparison.acceptance,
    )
    if not run.complete and not run.finished and not run.refused:
        return None
    light, complete = None, run.complete
    if complete and comparison.light_every:
        progress.say(f"{label}: the light tenant")
        light = _light_tenant(comparison, machine, config, speed, should_stop)
        complete = light is not None
    return {
        "policy": policy,
        "speed": speed,
        "complete": complete,
        "summary": summary_of(run, requests, goals),
        "light": light,
    }


class _RunProgress:
    """Shows the progress of one run each time another 64 requests arrived or ended."""

    def __init__(self, progress: Progress, label: str, num_requests: int) -> None:
        self._progress, self._label, self._num_requests = progress, label, num_requests
        self._next = 0

    def __call__(self, *, num_arrived: int, num_ended: int, now_ms: float) -> None:
        if num_arrived + num_ended < self._next:
            return
        self._next = num_arrived + num_ended + 64
        self._progress.say(
            f"{self._label}: {num_ended:,} of {self._num_requests:,} requests ended, "
            f"{num_arrived:,} arrived, {now_ms / 1e3:,.0f} s simulated"
        )


def _light_tenant(
    comparison: Comparison,
    machine: Machine,
    config: EngineConfig,
    speed: float,
    should_stop: Callable[[], bool] | None,
) -> Mapping[str, Any] | None:
    """Simulate the light tenant beside the flood and alone; None where it was stopped."""
    defaults, goals = comparison.defaults, comparison.goals
    requests, calm = with_flood(
        comparison.trace,
        every=comparison.light_every,
        light_speed=comparison.light_speed,
        speed=speed,
        defaults=defaults,
    )
    found = {}
    for name, tenant_requests in (("beside", requests), ("alone", calm)):
        run = simulate(
            tenant_requests,
            defaults,
            machine,
            config,
            should_stop=should_stop,
            acceptance=comparison.acceptance,
        )
        if not run.complete:
            return None
        found[name] = summary_of(run, tenant_requests, goals)["tenants"][LIGHT]
    return found
