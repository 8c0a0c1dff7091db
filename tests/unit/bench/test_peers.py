"""Peers as child processes: the protocol, their termination, and their settings."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bench.peers import child, convert, install, places
from bench.peers.child import Peer, PeerFailed
from bench.peers.quire_engine import Quire
from bench.peers.settings import (
    FILE,
    GRID,
    candidates,
    settings_for,
    write_choice,
)
from bench.token_check import agreement
from quire.config.flags import engine_config

REQUEST = {"prompt_ids": [1, 2, 3], "output_tokens": 4}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {"quire": ("tests.unit.bench.fake_peer", "")}
    monkeypatch.setattr(child, "SCRIPTS", MappingProxyType({**child.SCRIPTS, **scripts}))


def _loaded(tmp_path: Path, **settings: Any) -> Peer:
    peer = Peer("quire", 2, tmp_path / "log")
    told = peer.load("a model", settings, limit_s=30)
    assert told == {"version": "a model", "kv_dtype": "f32", "threads": 2}
    return peer


@pytest.mark.usefixtures("fake")
def test_a_peer_exchanges_lines(tmp_path: Path) -> None:
    with _loaded(tmp_path, noisy=True) as peer:
        told = peer.ask({"do": "run", "requests": [REQUEST, REQUEST]}, limit_s=30)
        assert [answer["token_ids"] for answer in told["answers"]] == [[6] * 4] * 2
        with pytest.raises(PeerFailed, match="it has none"):
            peer.ask({"do": "own_tool", "workload": {}}, limit_s=30)
        with pytest.raises(PeerFailed, match="not part of the protocol"):
            peer.ask({"do": "dance"}, limit_s=30)
    assert "a library says hello" in (tmp_path / "log").read_text()
    assert "and its C++ too" in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("slow", "did not answer within"),
        ("dies", "ended"),
        ("raises", "ValueError: nothing adds up"),
    ],
)
def test_a_failing_peer_is_reported_and_ended(tmp_path: Path, wrong: str, told: str) -> None:
    peer = _loaded(tmp_path, **{wrong: True})
    with peer, pytest.raises(PeerFailed, match=told):
        peer.ask({"do": "run", "requests": [REQUEST]}, limit_s=1 if wrong == "slow" else 60)
    assert not Path(f"/proc/{peer.pid}/cmdline").exists() or os.name != "posix"


def test_a_missing_peer_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PEERS", str(tmp_path))
    with pytest.raises(PeerFailed, match="bench/peers/setup openvino"):
        Peer("openvino", 1, tmp_path / "log")


def test_threads_are_equal_and_our_own_settings_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    for name in child.SCRIPTS:
        kept = child.engine_environment(name, 3)
        assert kept["OMP_NUM_THREADS"] == "3"
        assert kept["PYTHONPATH"] == str(places.REPOSITORY)
        assert "OPENBLAS_NUM_THREADS" not in kept
    assert child.engine_environment("vllm", 3)["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"


def test_the_committed_settings_name_known_engines_and_workloads() -> None:
    known = json.loads(FILE.read_text())
    assert set(known) <= set(child.SCRIPTS)
    for of_engine in known.values():
        assert set(of_engine) <= {"*", *convert.PRECISIONS}
        for of_precision in of_engine.values():
            assert set(of_precision) <= {"*", "w1", "w2", "w3", "w4", "w5"}


@pytest.mark.parametrize("workload", ["w1", "w2", "w3", "w4", "w5"])
def test_quires_settings_are_settings_of_the_engine(workload: str) -> None:
    for precision in convert.PRECISIONS:
        settings = convert.quire_settings(precision, workload)
        assert engine_config(settings).scheduler.max_num_seqs in (1, 16, 32)


def test_quire_reports_the_scheme_and_cache_it_runs_with() -> None:
    small = {"kv_cache_memory_bytes": 16 << 20}
    quire = Quire()
    told = quire.load("", 1, small)
    assert (told["scheme"], told["kv_dtype"]) == ("bf16", "bf16")
    told = quire.load("", 1, {**small, "dtype": "f32", "kv_cache_dtype": "int8"})
    assert (told["scheme"], told["kv_dtype"]) == ("f32", "int8")
    told = quire.load("", 1, {**small, "quantization": "int4"})
    assert (told["scheme"], told["kv_dtype"]) == ("int4-g32 (embed: int8)", "bf16")
    quire.close()


def test_concurrency_is_limited_to_the_workloads() -> None:
    running = {"llama.cpp": "-np", "openvino": "max_num_seqs", "vllm": "max_num_seqs"}
    for engine, name in running.items():
        for workload, most in (("w1", 1), ("w2", 1), ("w3", 16), ("w4", 16)):
            settings = settings_for(engine, precision="bf16", workload=workload)
            assert settings[name] == most


def test_later_settings_win_and_a_choice_is_stored(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    assert settings_for("x", precision="bf16", workload="w1", file=file) == {}
    file.write_text(json.dumps({"x": {"*": {"*": {"a": 1, "b": 1}, "w1": {"b": 2}}}}))
    assert settings_for("x", precision="bf16", workload="w1", file=file) == {"a": 1, "b": 2}
    write_choice("x", precision="bf16", workload="w1", chosen={"b": 3}, file=file)
    assert settings_for("x", precision="bf16", workload="w1", file=file) == {"a": 1, "b": 3}
    assert settings_for("x", precision="int8", workload="w1", file=file) == {"a": 1, "b": 2}


def test_a_sweep_tries_every_combination_once() -> None:
    for engine in GRID:
        for workload in ("w1", "w3"):
            tried = list(candidates(engine, workload))
            assert len({json.dumps(one, sort_keys=True) for one in tried}) == len(tried) >= 1
    grid = GRID["openvino"]["many"]
    assert len(list(candidates("openvino", "w4"))) == math.prod(map(len, grid.values())) > 4


def test_an_unsupported_scheme_is_reported() -> None:
    with pytest.raises(convert.Unavailable, match="vllm has no scheme for int4"):
        convert.converted("vllm", Path("model"), "int4")
    assert convert.converted("quire", Path("model"), "int4") == Path("model")
    assert convert.converted("vllm", Path("model"), "bf16") == Path("model")


def test_agreement_counts_leading_tokens() -> None:
    assert agreement([[1, 2, 3, 4]], [[1, 2, 3, 4]])["leading_tokens_equal"] == 1
    half = agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 9, 8]])
    assert (half["leading_tokens_equal"], half["ok"]) == (0.5, False)
    assert agreement([[1, 2]], [[9, 2]])["leading_tokens_equal"] == 0


def test_gpu_packages_are_recognized_by_name() -> None:
    strange = ["nvidia-cublas", "cuda-toolkit", "triton", "pytorch-triton"]
    assert all(install.GPU_PACKAGES.match(name) for name in strange)
    assert not any(install.GPU_PACKAGES.match(name) for name in ("torch", "openvino", "nncf"))


def test_an_installation_is_current_only_at_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PEERS", str(tmp_path))
    place = install.Installation("openvino", num_jobs=1)
    assert not place.is_current
    (tmp_path / "openvino").mkdir()
    record = tmp_path / "openvino" / "installed.json"
    record.write_text(json.dumps({"asked": place.asked}))
    assert place.is_current
    assert places.is_installed("openvino")
    record.write_text(json.dumps({"asked": ["openvino-genai==1"]}))
    assert not place.is_current
