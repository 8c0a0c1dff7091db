"""Read the policies' goals off a result: the measured value, and whether it suffices.

Means are compared without early rejections (open_ended), goodput with them. Plain arithmetic over
the JSON object of quire/sim/compare.py. A goal that could not be measured is reported as such, not
as reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHORTEST_SHARE = 0.5
LIGHT_TIMES = 1.5
GOODPUT_SHARE = 0.9
REQUESTS_PER_MINUTE = 100_000


def read_goals(outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an entry per goal: what, found, wanted, kept."""
    runs = outcome["runs"]
    return [
        _shortest(outcome["open_ended"]["runs"]),
        _light_tenant(runs),
        *(_goodput(runs, policy) for policy in _policies(runs)),
        _speed(outcome),
    ]


def goals_text(goals: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per goal."""
    return "\n".join(
        f"{'kept' if goal['kept'] else 'not kept'}: {goal['what']}: {goal['found']} "
        f"(wanted {goal['wanted']})"
        for goal in goals
    )


def _policies(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["policy"] for run in runs))


def _of(runs: Sequence[Mapping[str, Any]], policy: str) -> dict[float, Mapping[str, Any]]:
    return {run["speed"]: run for run in runs if run["policy"] == policy}


def _shortest(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    what = "shortest job's mean latency over first-come's, least of all speeds"
    wanted = f"at most {SHORTEST_SHARE}"
    first, shortest = _of(runs, "fcfs"), _of(runs, "sjf")
    shares = {
        speed: shortest[speed]["summary"]["latency_mean_s"] / run["summary"]["latency_mean_s"]
        for speed, run in first.items()
        if speed in shortest
    }
    if not shares:
        return _unseen(what, wanted)
    speed = min(shares, key=lambda at: shares[at])
    found = f"{shares[speed]:.2f} at speed {speed:g}"
    return _goal(what, found, wanted, kept=shares[speed] <= SHORTEST_SHARE)


def _light_tenant(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    what = "fair share: a light tenant's p99 of the first token over that alone, most of all speeds"
    wanted = f"at most {LIGHT_TIMES}"
    times = {
        speed: run["light"]["beside"]["ttft_s"]["p99"] / run["light"]["alone"]["ttft_s"]["p99"]
        for speed, run in _of(runs, "fair").items()
        if run["light"] is not None
    }
    if not times:
        return _unseen(what, wanted)
    speed = max(times, key=lambda at: times[at])
    found = f"{times[speed]:.2f} at speed {speed:g}"
    return _goal(what, found, wanted, kept=times[speed] <= LIGHT_TIMES)


def _goodput(runs: Sequence[Mapping[str, Any]], policy: str) -> dict[str, Any]:
    """Return goodput against its peak, at the slowest speed that offers twice what was
    served in time.
    """
    what = f"{policy}: goodput at twice the load, as a share of its peak"
    wanted = f"at least {GOODPUT_SHARE}"
    own = [run["summary"] for run in _of(runs, policy).values()]
    peak = max(own, key=lambda found: float(found["goodput_per_s"]))
    beyond = [one for one in own if one["offered_per_s"] >= 2 * peak["goodput_per_s"]]
    if not beyond or not peak["goodput_per_s"]:
        return _unseen(what, wanted)
    twice = min(beyond, key=lambda found: float(found["offered_per_s"]))
    share = twice["goodput_per_s"] / peak["goodput_per_s"]
    found = f"{share:.2f} ({twice['goodput_per_s']:.3g} of {peak['goodput_per_s']:.3g}/s)"
    return _goal(what, found, wanted, kept=share >= GOODPUT_SHARE)


def _speed(outcome: Mapping[str, Any]) -> dict[str, Any]:
    per_minute = outcome["requests_per_minute"]
    return _goal(
        "requests simulated a minute of one core",
        f"{per_minute:,.0f}",
        f"at least {REQUESTS_PER_MINUTE:,}",
        kept=per_minute >= REQUESTS_PER_MINUTE,
    )


def _unseen(what: str, wanted: str) -> dict[str, Any]:
    return _goal(what, "not looked at", wanted, kept=False)


def _goal(what: str, found: str, wanted: str, *, kept: bool) -> dict[str, Any]:
    return {"what": what, "found": found, "wanted": wanted, "kept": kept}
