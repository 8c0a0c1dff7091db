"""A server under rising load: every rate is reported, the knee is found, failures end the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError, WorkerError
from quire.bench.http_load import ServedModel, Target
from quire.bench.plots import plot_serving
from quire.bench.serve import Load, measure_serving, resolve_model, serving_text
from quire.bench.workloads import Lengths
from quire.cli.main import main
from quire.obs import pictures
from quire.obs.timing import Goals
from quire.obs.trace import Arrival
from tests.unit.bench.served import SmallServer, plain_answer

LOAD = Load(
    rates=(20.0, 10.0), seconds=0.5, lengths=(Lengths(prompt=3, output=2),), vocab_size=1000
)
RELAXED = Goals(ttft_s=60, tpot_s=60)


def test_rates_rise_and_the_knee_is_the_last_one_served_well() -> None:
    with SmallServer() as server:
        outcome: dict[str, Any] = measure_serving(Target(url=server.url, model=""), LOAD, RELAXED)
    assert [one["rate"] for one in outcome["rates"]] == [10.0, 20.0]
    assert all(one["good_share"] == 1 and one["num_errors"] == 0 for one in outcome["rates"])
    best = max(outcome["rates"], key=lambda one: one["offered_per_s"])
    assert outcome["knee"] == best
    assert outcome["settings"]["model"] == "small"
    assert outcome["machine"]["cpu"]
    assert not outcome["knee_reached"]
    assert "knee not reached" in serving_text(outcome)


def test_beyond_the_knee_no_more_rates_are_tried() -> None:
    with SmallServer() as server:
        outcome: dict[str, Any] = measure_serving(
            Target(url=server.url, model="small"), LOAD, Goals(ttft_s=0, tpot_s=0)
        )
    assert len(outcome["rates"]) == 1
    assert outcome["knee"] is None
    assert "no rate" in serving_text(outcome)


def test_the_knee_is_reached_if_a_higher_rate_was_served_badly() -> None:
    with SmallServer() as server:
        outcome: dict[str, Any] = measure_serving(Target(url=server.url, model=""), LOAD, RELAXED)
    outcome["rates"][1]["good_share"] = 0.5
    reached = {**outcome, "knee": outcome["rates"][0], "knee_reached": True}
    assert "\nknee: 10.00 requests/s offered" in serving_text(reached)


def test_requests_fit_the_servers_stated_limits() -> None:
    says = {"max_model_len": 40, "vocab_size": 700}
    with SmallServer(says=says) as server:
        assert main(["bench", "serve", server.url, "--rates", "9", "--seconds", "1"]) == 0
    for _, body in server.asked:
        assert len(body["prompt"]) + body["max_tokens"] <= 40
        assert max(body["prompt"]) < 700
    assert len(server.asked) > 9
    with SmallServer(says=says) as server:
        words = ["--rates", "9", "--seconds", "1", "--prompts", "30", "--outputs", "11"]
        assert main(["bench", "serve", server.url, *words]) != 0
    assert not server.asked


def test_a_server_without_limits_gets_the_usual_lengths() -> None:
    with SmallServer() as server:
        assert main(["bench", "serve", server.url, "--rates", "9", "--seconds", "1"]) == 0
    assert any(len(body["prompt"]) > 128 for _, body in server.asked)


@pytest.mark.parametrize("said", [{"max_model_len": "long"}, {"vocab_size": -1}])
def test_a_servers_model_list_may_contain_anything(said: dict[str, Any]) -> None:
    with SmallServer(says=said) as server:
        found = resolve_model(Target(url=server.url, model=""))
    assert found == ServedModel(name="small")


def test_a_named_model_needs_no_list() -> None:
    nowhere = Target(url="http://127.0.0.1:9", model="mine")
    assert resolve_model(nowhere) == ServedModel(name="mine")


def test_a_server_that_only_fails_ends_the_run_with_its_error() -> None:
    with (
        SmallServer(lambda _: (500, ["broken"])) as server,
        pytest.raises(WorkerError, match="500"),
    ):
        measure_serving(Target(url=server.url, model="small"), LOAD, RELAXED)


def test_failures_after_the_warm_up_are_counted_and_reported() -> None:
    seen: list[int] = []

    def answer(body: dict[str, Any]) -> tuple[int, list[str]]:
        seen.append(1)
        return plain_answer(body) if len(seen) % 2 else (503, ["busy"])

    with SmallServer(answer) as server:
        outcome: dict[str, Any] = measure_serving(
            Target(url=server.url, model="small"), replace(LOAD, rates=(20.0,)), RELAXED
        )
    [one] = outcome["rates"]
    assert 0 < one["num_errors"] < one["num_requests"]
    assert one["errors"] == ["HTTP 503: busy"]


def test_a_trace_is_replayed_with_its_own_lengths() -> None:
    trace = tuple(
        Arrival(arrival_s=0.1 * n, prompt_tokens=2 + n, output_tokens=1 + n) for n in range(3)
    )
    with SmallServer() as server:
        outcome: dict[str, Any] = measure_serving(
            Target(url=server.url, model="small"), replace(LOAD, rates=(1.0,), trace=trace), RELAXED
        )
    assert outcome["rates"][0]["num_requests"] == 3
    assert outcome["settings"]["requests_of"] == "trace"
    asked = sorted(len(body["prompt"]) for _, body in server.asked)
    assert asked == [2, 2, 3, 3, 4]  # two were sent ahead to warm up


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with SmallServer() as server:
        outcome: dict[str, Any] = measure_serving(Target(url=server.url, model=""), LOAD, RELAXED)
    plot_serving({"one": outcome, "other": outcome}, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_a_picture_is_rejected_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(pictures, "import_module", absent)
    with pytest.raises(SettingError, match=r"pip install .quire-llm\[bench\]"):
        pictures.check_plots()
