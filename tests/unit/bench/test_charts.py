"""Charts of measured results: Quire is a bar, loaded machines are marked, axes are titled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.example_trace import example_trace
from bench.measured import picture
from bench.measured.peers import PeerRatio
from quire.bench.machine import LOAD_MARK, is_loaded, machine_text
from quire.obs import pictures
from quire.obs.trace import EXAMPLE_TRACE

CARD = {"cpu": "A Processor", "cores": 2, "memory_gb": 23.6, "load_at_start": 1.9}
LOADED = CARD | {"load_at_start": 4.2}
RATIO = PeerRatio(
    shape="qwen3-0.6b",
    precision="bf16",
    workload="w1",
    peer="openvino",
    kv="bf16",
    peer_scheme="bf16",
    peer_kv="bf16",
    entry={"ratio": {"median": 1.25}, "quire": {"median": 25.0}, "other": {"median": 20.0}},
    machine=CARD,
)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect figures that are drawn, still open."""
    pytest.importorskip("matplotlib")
    plt, found = pictures.pyplot(), list[Any]()
    monkeypatch.setattr(plt, "close", found.append)
    return found


def test_more_running_threads_than_cores_is_a_loaded_machine() -> None:
    assert not is_loaded(CARD)
    assert not is_loaded(CARD | {"load_at_start": 2.5})  # one thread per core, and a little
    assert is_loaded(LOADED)
    assert not is_loaded({})
    assert machine_text(CARD) == "A Processor, 2 cores, 24 GB"
    assert machine_text(LOADED).endswith(f"; {LOAD_MARK} load average 4.2 at the start")
    assert machine_text(LOADED, with_load=False) == machine_text(CARD)


def test_quire_is_a_bar_beside_its_peers(figures: list[Any], tmp_path: Path) -> None:
    picture.draw([RATIO, replace(RATIO, workload="w2", machine=LOADED)], tmp_path / "peers.png")
    [figure] = figures
    [axis] = figure.axes
    assert [bar.get_width() for bar in axis.patches] == [100.0, 80.0, 100.0, 80.0]
    assert axis.patches[0].get_facecolor() != axis.patches[1].get_facecolor()
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["qwen3-0.6b\nW1 decode", f"qwen3-0.6b\nW2 prefill {LOAD_MARK}"]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Quire", "OpenVINO"]
    assert "A Processor, 2 cores, 24 GB" in figure.get_suptitle()
    assert any(text.get_text().startswith(LOAD_MARK) for text in figure.texts)


def test_the_speed_chart_has_a_bar_for_each_engine(figures: list[Any], tmp_path: Path) -> None:
    picture.draw_speed([RATIO], tmp_path / "speed.svg", shape="qwen3-0.6b", precision="bf16")
    [figure] = figures
    [axis] = figure.axes
    assert [bar.get_height() for bar in axis.patches] == [25.0, 20.0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["Quire", "OpenVINO"]
    assert "A Processor" in figure.get_suptitle()


def test_the_example_trace_is_what_its_script_writes() -> None:
    assert EXAMPLE_TRACE.read_text(encoding="utf-8") == example_trace()
