"""bench.policies: goals read off a comparison of policies, and whether they are reached."""

from __future__ import annotations

from typing import Any

from bench.policies.goals import goals_text, read_goals
from bench.policies.piece import agreement, piece_text
from bench.policies.scenes import SCENES


def _run(policy: str, speed: float, *, mean: float, goodput: float, light: float) -> dict[str, Any]:
    def tenant(p99: float) -> dict[str, Any]:
        return {"ttft_s": {"p99": p99}}

    return {
        "policy": policy,
        "speed": speed,
        "summary": {
            "latency_mean_s": mean,
            "goodput_per_s": goodput,
            "offered_per_s": 10 * speed,
        },
        "light": {"beside": tenant(light), "alone": tenant(2.0)},
    }


def _outcome(**more: Any) -> dict[str, Any]:
    runs = [
        _run("fcfs", 1, mean=4, goodput=9, light=2),
        _run("fcfs", 2, mean=50, goodput=2, light=90),
        _run("sjf", 1, mean=4, goodput=9, light=2),
        _run("sjf", 2, mean=20, goodput=8.5, light=90),
        _run("fair", 1, mean=4, goodput=9, light=2.2),
        _run("fair", 2, mean=50, goodput=9.5, light=2.8),
    ]
    return {
        "runs": runs,
        "open_ended": {"runs": runs},
        "requests_per_minute": 120_000.0,
        **more,
    }


def test_goals_are_read_off_the_runs() -> None:
    goals = {goal["what"].split(":")[0].split("'")[0]: goal for goal in read_goals(_outcome())}
    assert goals["shortest job"]["found"] == "0.40 at speed 2"
    assert goals["shortest job"]["kept"]
    assert goals["fair share"]["found"] == "1.40 at speed 2"
    assert goals["fair share"]["kept"]
    assert goals["requests simulated a minute of one core"]["kept"]
    by_policy = [goal for goal in read_goals(_outcome()) if "goodput" in goal["what"]]
    assert [goal["found"][:4] for goal in by_policy] == ["0.22", "0.94", "1.00"]
    assert [goal["kept"] for goal in by_policy] == [False, True, True]


def test_a_goal_that_was_not_measured_is_not_kept() -> None:
    runs = [run for run in _outcome()["runs"] if run["policy"] == "edf"]
    goals = read_goals({"runs": runs, "open_ended": {"runs": runs}, "requests_per_minute": 10.0})
    assert [goal["kept"] for goal in goals] == [False] * 3
    assert [goal["found"] for goal in goals[:2]] == ["not looked at"] * 2
    assert "not kept" in goals_text(goals)


def test_a_piece_agrees_if_ranks_and_means_do() -> None:
    def run(real: float, simulated: float) -> dict[str, Any]:
        return {
            kind: {"latency_mean_s": mean, "ttft_mean_s": mean}
            for kind, mean in (("real", real), ("simulated", simulated))
        }

    good = {"fcfs": run(10, 11), "sjf": run(5, 4.6)}
    told = agreement(good)
    assert (told["same_ranks"], told["agrees"], round(told["most_off"], 3)) == (True, True, 0.1)
    bad = {"fcfs": run(10, 4), "sjf": run(5, 6)}
    assert not agreement(bad)["same_ranks"]
    assert not agreement(bad)["agrees"]
    settings = {"num_requests": 3, "speed": 1.0, "shape": "a"}
    assert "ranked the same: no" in piece_text({"settings": settings, "runs": bad})


def test_scenes_are_machines_and_settings_that_fit() -> None:
    for scene in SCENES.values():
        machine, config = scene.machine(), scene.config()
        assert machine.num_blocks(config) * config.cache.block_size > 16_384
        assert list(scene.speeds) == sorted(scene.speeds)
        assert scene.light_speed <= scene.speeds[0]
