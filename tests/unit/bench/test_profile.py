"""`quire profile`: the program's own counts, times that add up, and advice on settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import _native
from quire.base.errors import SettingError
from quire.bench.floor import program_of
from quire.bench.limits import ARITHMETIC, FORK_JOIN, LOOPS, READ, machine_limits, peak_gflops
from quire.bench.profile import OUTSIDE, measure_profile, profile_text
from quire.bench.reading import ReadProbe
from quire.program.cost import StepShape
from tests.unit.cli.command import quire_main

SETTINGS = {"num_threads": 2, "kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    return measure_profile("", SETTINGS, depth=40, sequences=3, seconds=0.1)


def test_each_step_has_the_programs_own_counts(outcome: dict[str, Any]) -> None:
    program = program_of("")
    num_ops = sum(map(len, program.segments.values()))
    shapes = [
        ("decode", StepShape([1], [40])),
        ("prefill", StepShape([64], [0])),
        ("decode", StepShape([1, 1, 1], [40, 40, 40])),
        ("mixed", StepShape([1, 1, 62], [40, 40, 0])),
    ]
    assert [step["name"] for step in outcome["steps"]] == [name for name, _ in shapes]
    for step, (_, shape) in zip(outcome["steps"], shapes, strict=True):
        cost, kinds = program.step_cost(shape), step["kinds"]
        computed = [one for one in kinds if "operations" in one]
        assert sum(one["num_ops"] for one in computed) == num_ops
        assert sum(one["memory_bytes"] for one in computed) == cost.memory_bytes
        assert sum(one["operations"] for one in computed) == cost.operations
        assert sum(one["share"] for one in kinds) == pytest.approx(1)
        assert sum(one["seconds"] for one in kinds) == pytest.approx(step["step_s"])
        assert all(one["seconds"] > 0 for one in computed)
        assert 0 < step["floor_s"] <= step["step_s"]
        assert OUTSIDE in {one["kind"] for one in kinds}


def test_row_wise_operations_are_reported_together(outcome: dict[str, Any]) -> None:
    kinds = {one["kind"] for one in outcome["steps"][0]["kinds"]}
    assert {"attention", "linear 256 -> 2048 bf16", "rope + store_kv"} <= kinds


def test_the_text_has_limits_steps_and_advice(outcome: dict[str, Any]) -> None:
    text = profile_text(outcome)
    for words in ("the machine allows", "2 threads", "decode: 1 row at depth 40", "of its floor"):
        assert words in text
    assert "decode: 3 rows at depth 40" in text
    assert "mixed: 2 rows at depth 40 + 62 tokens at depth 0" in text


def test_wasteful_settings_are_named(outcome: dict[str, Any]) -> None:
    limits = {"1": {READ: 9.9, FORK_JOIN: 0.0}, "2": {READ: 10.0, FORK_JOIN: 1.0}}
    floors = {"none": 0.01, "int8": 0.005, "int4-g32": 0.003}
    steps = [dict(step, floor_s=step["step_s"] / 2) for step in outcome["steps"]]
    wasteful = {
        **outcome,
        "steps": steps,
        "usable_cores": 4,
        "limits": limits,
        "decode_floors_s": floors,
    }
    text = profile_text(wasteful)
    assert "5.00 ms with --quantization int8" in text
    assert "2 of the 4 cores" in text
    assert "decoding gains little from more than 1 of the threads" in text


def test_no_floor_is_above_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadProbe, "gb_per_s", lambda probe, rounds=5: 1e-3)  # memory of 1 MB/s
    outcome = measure_profile("", SETTINGS, depth=40, sequences=3, seconds=0.01)
    for step in outcome["steps"]:  # type: ignore[attr-defined]
        assert 0 < step["floor_s"] <= step["step_s"]
        assert all(part["floor_s"] <= part["seconds"] for part in step["kinds"])
        assert any(part.get("cached") for part in step["kinds"])
    assert outcome["decode_floors_s"] == {}
    text = profile_text(outcome)
    assert "they lie in the processor's caches" in text
    assert "--quantization" not in text  # fewer bytes would not help


def test_memory_reads_are_not_reported_as_cached(outcome: dict[str, Any]) -> None:
    decode = dict(outcome["steps"][0])
    decode["kinds"] = [
        {**part, "floor_s": part["seconds"] / 2, "cached": 0} for part in decode["kinds"]
    ]
    text = profile_text({**outcome, "steps": [decode]})
    assert "cached" not in text
    assert "50 %" in text


def test_the_reference_has_no_times() -> None:
    with pytest.raises(SettingError, match="native"):
        measure_profile("", {"executor": "reference"})


@pytest.mark.parametrize("given", [{"depth": -1}, {"sequences": 0}])
def test_impossible_steps_are_rejected(given: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="the least"):
        measure_profile("", SETTINGS, **given)


def test_json_is_one_object() -> None:
    words = ["--seconds", "0.05", "--threads", "1", "--kv-cache-memory", "16MiB", "--depth", "9"]
    done = quire_main("profile", "--json", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["bench"] == "profile"
    assert told["limits"]["1"][READ] > 0


@pytest.mark.parametrize("isa", _native.available_isas())
def test_limits_are_those_of_the_instruction_set(isa: str) -> None:
    limits = machine_limits(2, rounds=1, isa=isa)
    assert all(rate > 0 for rate in limits.values())
    assert {READ, FORK_JOIN, "fma_f32"} <= set(limits) <= {READ, FORK_JOIN, *ARITHMETIC}
    assert ("tile_bf16" in limits) == (isa == "amx")
    for precision in ("f32", "bf16"):
        assert peak_gflops(limits, precision) == max(
            limits[name] for name in LOOPS[precision] if name in limits
        )


def test_one_thread_distributes_nothing() -> None:
    assert machine_limits(1, rounds=1)[FORK_JOIN] == 0
