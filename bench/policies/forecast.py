"""The forecast behind early refusal, held against what came: in the simulator, nobody refused.

When a request is taken its time to the first token is foretold, as it would be to refuse it; what
comes of it is noted. Told are the error's median, how much is foretold for what comes, and of a
wish for the first token within so many seconds: who would have been refused though it was kept, and
who would have been taken though it was not. Fair share has a light tenant beside a flood, told by
itself: it is the one that others stand back for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bench.policies.scenes import Scene
from quire.obs.trace import Arrival
from quire.scheduler.scheduler import Scheduler
from quire.sim.compare import with_policy
from quire.sim.load import LIGHT, Asks, flooded, jobs_of
from quire.sim.run import simulate


def held(
    trace: Sequence[Arrival],
    scene: Scene,
    policy: str,
    speed: float,
    asks: Asks,
    goal_s: float,
    *,
    light_every: int = 0,
) -> dict[str, Any]:
    """One policy at one speed: plain numbers. light_every: as of `Question`, for fair share."""
    is_flooded = policy == "fair" and light_every > 0
    if is_flooded:
        jobs, _ = flooded(
            trace, every=light_every, light_speed=scene.light_speed, speed=speed, asks=asks
        )
    else:
        jobs, _ = jobs_of(trace, speed=speed, asks=asks)
    config = with_policy(scene.config(), policy)
    config = replace(
        config, scheduler=replace(config.scheduler, max_queued_requests=max(len(jobs), 1))
    )
    foretold_ms: dict[int, float] = {}

    def taken(number: int, scheduler: Scheduler) -> None:
        found_ms = scheduler.predict_ttft_ms(str(number))
        if found_ms is not None:
            foretold_ms[id(jobs[number])] = found_ms

    run = simulate(jobs, asks, scene.machine(), config, on_taken=taken)
    ended = [one for one in run.ended if id(one.job) in foretold_ms]
    predicted = np.array([foretold_ms[id(one.job)] for one in ended]) / 1e3
    actual = np.array([one.first_token_ms - one.job.arrival_ms for one in ended]) / 1e3
    found = {"policy": policy, "speed": speed, **held_against(predicted, actual, goal_s)}
    if is_flooded:
        is_light = np.array([one.job.tenant == LIGHT for one in ended])
        found["light"] = held_against(predicted[is_light], actual[is_light], goal_s)
    return found


def held_against(predicted: Any, actual: Any, goal_s: float) -> dict[str, Any]:
    """Seconds against seconds, one each a request."""
    ratio = predicted / actual
    would_refuse, missed = predicted > goal_s, actual > goal_s
    return {
        "num": len(actual),
        "actual_p50_s": float(np.median(actual)),
        "ratio_p10_p50_p90": [float(one) for one in np.percentile(ratio, [10, 50, 90])],
        "relative_error_p50": float(np.median(np.abs(ratio - 1.0))),
        "error_p50_s": float(np.median(np.abs(predicted - actual))),
        "missed_share": float(np.mean(missed)),
        "refused_share": float(np.mean(would_refuse)),
        "refused_wrongly_share": float(np.mean(would_refuse & ~missed)),
        "taken_wrongly_share": float(np.mean(~would_refuse & missed)),
    }


def held_text(found: dict[str, Any]) -> str:
    """A line, and one for the light tenant."""
    text = f"{found['policy']} at speed {found['speed']:g}: {_text(found)}"
    return text + (f"\n  its light tenant: {_text(found['light'])}" if "light" in found else "")


def _text(found: dict[str, Any]) -> str:
    low, middle, high = found["ratio_p10_p50_p90"]
    percent = {name: 100 * found[name] for name in found if name.endswith("share")}
    return (
        f"first token after {found['actual_p50_s']:.2f} s (p50); foretold is {low:.2f} "
        f"to {high:.2f} of it, {middle:.2f} in the middle; refused "
        f"{percent['refused_share']:.1f} % ({percent['refused_wrongly_share']:.1f} % wrongly), "
        f"taken wrongly {percent['taken_wrongly_share']:.1f} %"
    )
