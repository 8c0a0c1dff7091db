"""A piece of recorded traffic on the real engine and in the simulator, side by side.

The model's steps are measured first, then each policy serves the same requests in real time, and in
virtual time. Reported are, for each, the mean and p50 latency and the mean time to first token, the
error of the simulation, and whether both rank the policies the same. The model has random weights:
its answers end where the trace says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from bench.checkpoints import random_checkpoint
from quire.base.clock import Clock
from quire.base.report import Field
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.engine.assembly.assemble import assemble
from quire.engine.assembly.scheduler_factory import make_scheduler, scheduler_limits
from quire.obs.report import Progress, table
from quire.obs.timing import Goals
from quire.obs.trace import Arrival
from quire.sim.compare import with_policy
from quire.sim.load import RequestDefaults, TraceRequest, trace_requests
from quire.sim.machine import Machine
from quire.sim.profile import machine_of, measure_machine
from quire.sim.real import run_real
from quire.sim.run import simulate
from quire.sim.summary import summary_of

AGREES_WITHIN = 0.15
NUMBERS = ("latency_mean_s", "ttft_mean_s")


def measure_piece(
    trace: Sequence[Arrival],
    *,
    shape: str,
    settings: Mapping[str, Any],
    policies: Sequence[str],
    speed: float,
    defaults: RequestDefaults,
    goals: Goals,
    profile: Mapping[str, Any] | None,
    progress: Progress,
    on_policy: Callable[[dict[str, Any]], None],
) -> None:
    """Run each policy; on_policy receives the result object so far after each.

    profile: of this model on this machine; measured if None.
    """
    config = engine_config({**settings, "model": str(random_checkpoint(shape))})
    profile = profile or measure_machine(config, progress=progress)
    machine = machine_of(profile)
    requests, left_out = trace_requests(trace, speed=speed, defaults=defaults)
    progress.say("packing the weights")
    engine = assemble(config, clock=Clock(), report=_print_report)
    runs: dict[str, Any] = {}
    outcome = {
        "settings": {
            "shape": shape,
            "speed": speed,
            "num_requests": len(requests),
            "left_out": left_out,
            **dict(settings),
        },
        "profile": dict(profile),
        "runs": runs,
    }
    with closing(engine.core.runner):
        while engine.core.touch():  # as a server does before the first request
            pass
        for policy in policies:
            progress.say(
                f"{policy}: {len(requests)} requests in {requests[-1].arrival_ms / 1e3:.0f} s"
            )
            own = with_policy(config, policy)
            num_blocks = machine.num_blocks(own)
            if num_blocks > engine.card.num_blocks:
                raise SystemExit(
                    f"the simulation has {num_blocks} KV blocks and the engine "
                    f"{engine.card.num_blocks}; give --kv-cache-memory what the engine can have"
                )
            limits = scheduler_limits(
                own.scheduler,
                num_blocks=num_blocks,
                max_model_len=engine.card.max_model_len,
                step_tokens=engine.step_tokens,
                num_layers=engine.num_layers,
            )
            scheduler = make_scheduler(
                own,
                limits,
                num_blocks=num_blocks,
                fingerprint=machine.name,
                hash_key=bytes(16),
                cost=machine.linear if limits.step_budget_ms else None,
            )
            show = partial(_show_progress, progress, policy, len(requests))
            run = run_real(engine, requests, defaults, scheduler=scheduler, on_progress=show)
            runs[policy] = {
                "real": summary_of(run, requests, goals),
                "simulated": _simulated(requests, defaults, machine, own, goals),
            }
            on_policy(outcome)
    progress.clear()


def _show_progress(
    progress: Progress,
    policy: str,
    num_requests: int,
    *,
    num_arrived: int,
    num_ended: int,
    now_ms: float,
) -> None:
    progress.say(f"{policy}: {num_arrived} of {num_requests} requests arrived, {num_ended} ended")


def _simulated(
    requests: Sequence[TraceRequest],
    defaults: RequestDefaults,
    machine: Machine,
    config: EngineConfig,
    goals: Goals,
) -> dict[str, Any]:
    return summary_of(simulate(requests, defaults, machine, config), requests, goals)


def piece_text(outcome: Mapping[str, Any]) -> str:
    """Return a line per policy, and whether simulation and engine agree."""
    runs = outcome["runs"]
    rows = []
    for policy, run in runs.items():
        cells = [policy]
        for name in NUMBERS:
            real, simulated = run["real"][name], run["simulated"][name]
            cells += [
                f"{real:.2f} s",
                f"{simulated:.2f} s",
                f"{100 * (simulated / real - 1):+.0f} %",
            ]
        rows.append(cells)
    lines = [
        f"{outcome['settings']['num_requests']} requests at speed "
        f"{outcome['settings']['speed']:g} on {outcome['settings']['shape']}",
        table(
            ("policy", "mean latency", "simulated", "off", "TTFT mean", "simulated", "off"), rows
        ),
    ]
    agreed = agreement(runs)
    lines.append(
        f"ranked the same: {'yes' if agreed['same_ranks'] else 'no'}; "
        f"mean latency off by at most {100 * agreed['most_off']:.0f} %"
    )
    return "\n".join(lines)


def agreement(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return whether both rank policies the same by mean latency, and their largest deviation."""
    name = NUMBERS[0]
    ranked = {
        kind: sorted(runs, key=lambda policy: runs[policy][kind][name])
        for kind in ("real", "simulated")
    }
    off = [abs(run["simulated"][name] / run["real"][name] - 1) for run in runs.values()]
    return {
        "same_ranks": ranked["real"] == ranked["simulated"],
        "most_off": max(off),
        "agrees": max(off) <= AGREES_WITHIN,
    }


def _print_report(what: str, **fields: Field) -> None:
    raise SystemExit(f"{what}: {fields}")
