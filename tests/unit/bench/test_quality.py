"""The measured cost of precisions, on random models and on trained ones with goals.

One random model has outlier channels; trained models are external data.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.quality import GOALS, Setting, measure, story_ids
from quire.engine.library.llm import LLM
from quire.models.model_folder import box_path
from quire.program.tensors import DType
from tests.data import outside
from tests.tiny_models import tiny_config, tiny_tensors, write_tiny_llama, write_weights

PLAIN = Setting(dtype=DType.F32)
INT8 = Setting(dtype=DType.F32, scheme="int8")
INT4 = Setting(dtype=DType.F32, scheme="int4-g32")
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}


def drawn_texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, 307, 90).tolist() for _ in range(3)]


def by_name(outcome: Any) -> dict[str, dict[str, float]]:
    return {row["setting"]: row for row in outcome["settings"]}


def test_fewer_bits_diverge_more_and_f32_not_at_all(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    rows = by_name(measure(folder, drawn_texts(), [PLAIN, INT8, INT4]))
    assert rows["plain, f32"]["ratio"] == 1
    assert rows["plain, f32"]["kl_nats"] == 0
    assert 0 < rows["int8, f32"]["kl_nats"] < 0.01
    assert rows["int8, f32"]["kl_nats"] < rows["int4-g32, f32"]["kl_nats"] < 1
    assert rows["int8, f32"]["same_likeliest"] > 0.9


def test_outlier_channels_of_a_hundred_times_do_not_break_int8(tmp_path: Path) -> None:
    """Some channels between two products are a hundred times the others, as in trained models. The
    model computes the same function as without them, and int8 must stay close to it.
    """
    config = tiny_config(**WIDE)
    tensors = tiny_tensors(config, seed=1)
    plain = write_tiny_llama(tmp_path / "plain", seed=1, **WIDE)
    before = by_name(measure(plain, drawn_texts(), [PLAIN, INT8]))["int8, f32"]
    channels = [3, 700]
    tensors["model.layers.0.mlp.up_proj.weight"][channels] *= 100
    tensors["model.layers.0.mlp.down_proj.weight"][:, channels] /= 100
    hidden = [9]
    tensors["model.layers.0.input_layernorm.weight"][hidden] *= 100
    for name in ("q", "k", "v"):
        tensors[f"model.layers.0.self_attn.{name}_proj.weight"][:, hidden] /= 100
    folder = write_tiny_llama(tmp_path / "outliers", seed=1, **WIDE)
    write_weights(folder, tensors, dtype="f32")
    after = by_name(measure(folder, drawn_texts(), [PLAIN, INT8]))["int8, f32"]
    assert before["kl_nats"] < after["kl_nats"]  # they do have a cost
    assert after["kl_nats"] < 0.1
    assert after["same_likeliest"] > 0.7


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Return the inverse case: some columns of a product's weight are a hundred times the others,
    which one scale per row cannot represent together.
    """
    tensors = tiny_tensors(tiny_config(**WIDE), seed=1)
    channels = [3, 300, 700]
    tensors["model.layers.0.mlp.up_proj.weight"][channels] /= 100
    tensors["model.layers.0.mlp.down_proj.weight"][:, channels] *= 100
    folder = write_tiny_llama(tmp_path / "broken", seed=1, **WIDE)
    write_weights(folder, tensors, dtype="f32")
    return folder


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_a_weight_unsuitable_for_int8_is_named_with_a_remedy(
    executor: str, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(model: Path, **settings: Any) -> str:
        with LLM(model, quantization="int8", threads=1, executor=executor, **settings):
            return capsys.readouterr().err

    cached = {"pack_cache": tmp_path / "packed"} if executor == "native" else {}
    for _ in range(2):  # packed, then mapped
        told = said(broken, **cached)
        assert "warning engine: 8 bits are too coarse for some weights" in told
        found = re.search(r'weights="layers.0.down \((\d+) of 512 rows\)"', told)
        assert found is not None
        assert int(found[1]) > 400
        assert 'instead="--keep layers.0.down=none"' in told
    assert said(broken, keep=["layers.0.down=none"]) == ""
    assert said(write_tiny_llama(tmp_path / "plain", seed=1, **WIDE)) == said(box_path()) == ""


def test_the_remedy_restores_what_int8_broke(broken: Path) -> None:
    remedy = Setting(dtype=DType.F32, scheme="int8", keep=("layers.0.down=none",))
    rows = measure(broken, drawn_texts(), [PLAIN, INT8, remedy])["settings"]
    _, before, after = (row["kl_nats"] for row in rows)
    assert 10 * after < before


@pytest.mark.parametrize("name", ["stories260K", "box"])
def test_trained_models_reach_the_goals(name: str) -> None:
    stories = json.loads(outside("text/tinystories_1000.json").read_text())
    folder = box_path() if name == "box" else outside(name)
    told = stories[::20] if name == "box" else stories
    rows = by_name(measure(folder, story_ids(folder, told[:15]), [PLAIN, INT8, INT4]))
    assert rows["int8, f32"]["ratio"] < GOALS[(name, "int8")]
    assert rows["int4-g32, f32"]["ratio"] < GOALS[(name, "int4-g32")] + 0.02  # fewer stories
