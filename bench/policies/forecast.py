"""The TTFT prediction behind early rejection, compared with actual times in the simulator.

When a request is accepted its time to first token is predicted, as admission control would do; its
actual time is recorded. Reported are the error's median, the ratio of prediction to actual time,
and for a goal of so many seconds the requests that would have been rejected although they met it,
and accepted although they missed it. Fair share has a light tenant beside a flood.
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
from quire.sim.load import LIGHT, RequestDefaults, trace_requests, with_flood
from quire.sim.run import simulate


def held(
    trace: Sequence[Arrival],
    scene: Scene,
    policy: str,
    speed: float,
    defaults: RequestDefaults,
    goal_s: float,
    *,
    light_every: int = 0,
) -> dict[str, Any]:
    """Run one policy at one speed. light_every: as in `Comparison`, for fair share."""
    is_flooded = policy == "fair" and light_every > 0
    if is_flooded:
        requests, _ = with_flood(
            trace, every=light_every, light_speed=scene.light_speed, speed=speed, defaults=defaults
        )
    else:
        requests, _ = trace_requests(trace, speed=speed, defaults=defaults)
    config = with_policy(scene.config(), policy)
    config = replace(
        config, scheduler=replace(config.scheduler, max_queued_requests=max(len(requests), 1))
    )
    predicted_ms: dict[int, float] = {}

    def taken(number: int, scheduler: Scheduler) -> None:
        found_ms = scheduler.predict_ttft_ms(str(number))
        if found_ms is not None:
            predicted_ms[id(requests[number])] = found_ms

    run = simulate(requests, defaults, scene.machine(), config, on_accepted=taken)
    finished = [one for one in run.finished if id(one.request) in predicted_ms]
    predicted = np.array([predicted_ms[id(one.request)] for one in finished]) / 1e3
    actual = np.array([one.first_token_ms - one.request.arrival_ms for one in finished]) / 1e3
    found = {"policy": policy, "speed": speed, **held_against(predicted, actual, goal_s)}
    if is_flooded:
        is_light = np.array([one.request.tenant == LIGHT for one in finished])
        found["light"] = held_against(predicted[is_light], actual[is_light], goal_s)
    return found


def held_against(predicted: Any, actual: Any, goal_s: float) -> dict[str, Any]:
    """Compare predicted with actual seconds, one pair per request."""
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
    """Return a line, and one for the light tenant."""
    text = f"{found['policy']} at speed {found['speed']:g}: {_text(found)}"
    return text + (f"\n  its light tenant: {_text(found['light'])}" if "light" in found else "")


def _text(found: dict[str, Any]) -> str:
    low, middle, high = found["ratio_p10_p50_p90"]
    percent = {name: 100 * found[name] for name in found if name.endswith("share")}
    return (
        f"first token after {found['actual_p50_s']:.2f} s (p50); predicted is {low:.2f} "
        f"to {high:.2f} of it, {middle:.2f} in the middle; refused "
        f"{percent['refused_share']:.1f} % ({percent['refused_wrongly_share']:.1f} % wrongly), "
        f"taken wrongly {percent['taken_wrongly_share']:.1f} %"
    )
