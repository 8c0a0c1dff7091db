"""Profiles of engines: measured once, stored as JSON, read anywhere; and described machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.sim.machine import described_machine
from quire.sim.profile import machine_of, measure_machine, read_machine
from quire.sim.run import simulate
from tests.tiny_models import tiny_config, write_tiny_llama
from tests.unit.sim.made import DEFAULTS, config, drawn_requests, plan_of


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure the profile of a tiny model."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), seed=3)
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 48, "kv_cache_memory": "1MiB"}
    return measure_machine(engine_config({"model": str(folder), "threads": 1, **settings}))


def test_a_profile_holds_the_measurements_and_makes_a_machine(
    profile: dict[str, Any], tmp_path: Path
) -> None:
    assert [tokens for tokens, _ in profile["chunk_ms"]] == [1, 2, 4, 8, 16, 24, 32, 48]
    assert [rows for rows, _ in profile["rows_ms"]] == [1, 2, 4, 8, 12]
    assert [rows for rows, _ in profile["read_ms"]] == [1, 8, 12]
    assert all(ms > 0 for _, ms in (*profile["chunk_ms"], *profile["rows_ms"]))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile))
    machine = read_machine(file)
    assert machine.token_bytes == 2 * 16 * 4 * 2  # keys and values, a head of 16, f32, two layers
    assert machine.step_tokens_of(config(max_num_batched_tokens=None)) == 48
    assert machine.cost.step_ms(plan_of((0, 48))) >= profile["chunk_ms"][-1][1]
    run = simulate(drawn_requests(10, per_s=50, seed=4), DEFAULTS, machine, config())
    assert len(run.finished) == 10


def test_invalid_profiles_are_rejected(profile: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read_machine(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(SettingError, match="cannot be read"):
        read_machine(tmp_path / "text.json")
    with pytest.raises(SettingError, match="has version 0"):
        machine_of({**profile, "profile_version": 0})
    for wrong in ({"chunk_ms": []}, {"rows_ms": [[1]]}, {"linear": None}, {"token_bytes": "x"}):
        with pytest.raises(SettingError, match="is no profile"):
            machine_of({**profile, **wrong})
    with pytest.raises(SettingError, match="is no profile"):
        machine_of({"profile_version": 1})


def test_a_described_machine_needs_a_configuration_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    settings = engine_config({"model": str(tmp_path)})
    machine = described_machine(settings, gb_per_s=1.0, gflop_per_s=10.0, fixed_ms=1.0)
    assert machine.max_model_len == 512
    assert machine.cost.step_ms(plan_of((0, 1))) > 1.0
    assert machine.cost.step_ms(plan_of((0, 9))) > machine.cost.step_ms(plan_of((0, 1)))
    for wrong in ({"gb_per_s": 0.0}, {"gflop_per_s": -1.0}, {"fixed_ms": -1.0}):
        with pytest.raises(SettingError, match="must be"):
            described_machine(
                settings, **{"gb_per_s": 1.0, "gflop_per_s": 1.0, "fixed_ms": 0.0, **wrong}
            )


def test_a_cache_too_small_for_a_block_is_rejected() -> None:
    machine = described_machine(engine_config({}), gb_per_s=1, gflop_per_s=1, fixed_ms=0)
    with pytest.raises(SettingError, match="less than one block"):
        machine.num_blocks(config(kv_cache_memory="1KiB"))
