"""Checkpoints in fp8: values element by element; rejections; digests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import WeightsError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.content import WeightsDigest
from tests.fp8_checkpoints import KINDS, VALUES, quantized, write_fp8_of
from tests.safetensors_writer import write_raw
from tests.tiny_models import write_tiny_llama

DOWN = "model.layers.0.mlp.down_proj.weight"
SIZES = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 64, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return write_tiny_llama(folder, seed=3, dtype="bf16", num_hidden_layers=1, **SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_codes_times_their_scales(kind: str, plain: Path, tmp_path: Path) -> None:
    found = open_checkpoint(write_fp8_of(plain, tmp_path / "fp8", kind=kind))
    whole = open_checkpoint(plain)
    assert sorted(found.names) == sorted(whole.names)
    for name in found.names:
        if "_proj" not in name:
            assert found.block_type(name) == ""
            np.testing.assert_array_equal(found.read_f32(name), whole.read_f32(name))
            continue
        _, _, right = quantized(whole.read_f32(name), kind)
        assert found.block_type(name) == ("fp8-block" if kind == "block" else "fp8")
        assert found.describe(name) == ("f32", right.shape)
        np.testing.assert_array_equal(found.read_f32(name), right)
        np.testing.assert_array_equal(found.read_f32(name, slice(5, 140)), right[5:140])
        np.testing.assert_array_equal(found.tensor(name).array, right)
        rows = found.quantized_rows(name, transposed=False)
        assert rows is not None
        np.testing.assert_array_equal(rows.to_f32(slice(130, 133)), right[130:133])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_matrix_keep_their_scales(kind: str, plain: Path, tmp_path: Path) -> None:
    found = open_checkpoint(write_fp8_of(plain, tmp_path / "fp8", kind=kind))
    right = found.read_f32(DOWN)
    stored = found.fp8(DOWN)
    assert stored is not None
    part = stored.rows(128, 20).rows(0, 10)
    np.testing.assert_array_equal(part.to_f32(), right[128:138])
    scales = part.scales_as_kept()
    assert scales.shape == ((1, 2) if kind == "block" else (10, 1))
    times = np.repeat(scales, 128, axis=1)[:, :200] if kind == "block" else scales
    np.testing.assert_array_equal(VALUES[part.codes] * times, right[128:138])


def test_static_activation_scales_belong_to_their_matrix(plain: Path, tmp_path: Path) -> None:
    found = open_checkpoint(write_fp8_of(plain, tmp_path / "fp8", kind="tensor"))
    keys = found.fp8("model.layers.0.self_attn.k_proj.weight")
    assert keys is not None
    assert keys.rows(1, 2).input_scale == np.float32(0.03)
    without = open_checkpoint(write_fp8_of(plain, tmp_path / "without", kind="channel")).fp8(DOWN)
    assert without is not None
    assert without.input_scale is None


def _refused(folder: Path) -> str:
    with pytest.raises(WeightsError) as told:
        open_checkpoint(folder)
    return str(told.value)


def test_a_tensor_without_its_scales_is_rejected(plain: Path, tmp_path: Path) -> None:
    drop = DOWN.replace("weight", "weight_scale_inv")
    said = _refused(write_fp8_of(plain, tmp_path / "fp8", kind="block", drop=drop))
    assert f"{DOWN} needs {DOWN}_scale or {DOWN}_scale_inv; it has neither" in said


def test_scales_of_another_shape_are_rejected_with_the_supported_ones(tmp_path: Path) -> None:
    def write(*shape: int, name: str = "a.weight") -> Path:
        count = int(np.prod(shape))
        spans = [[0, 6], [6, 6 + 4 * count]]
        header = {
            name: {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": spans[0]},
            "a.weight_scale": {"dtype": "F32", "shape": list(shape), "data_offsets": spans[1]},
        }
        file = tmp_path / "model.safetensors"
        return write_raw(file, json.dumps(header).encode(), b"8" * spans[1][1])

    for shape in ((), (1,), (2,), (2, 1), (1, 1)):
        assert open_checkpoint(write(*shape)).names == ("a.weight",)
    said = _refused(write(3, 2))
    assert "a.weight_scale is f32 [3, 2]; for a.weight [2, 3] one number, [2, 1] by" in said
    assert "only matrices X.weight with scales are supported" in _refused(write(1, name="a.bias"))


@pytest.mark.parametrize(
    ("numbers", "shape", "said"),
    [
        ([1.0, 2.0], [2], "a.input_scale is f32 [2]; one number for all activations"),
        ([0.0], [1], "a.input_scale is 0; a scale of activations is finite and above 0"),
        ([np.inf], [], "a.input_scale is inf; a scale of activations is finite and above 0"),
    ],
)
def test_an_invalid_static_scale_is_rejected(
    numbers: list[float], shape: list[int], said: str, tmp_path: Path
) -> None:
    fixed = np.array(numbers, np.float32).tobytes()
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]},
        "a.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [6, 10]},
        "a.input_scale": {"dtype": "F32", "shape": shape, "data_offsets": [10, 10 + len(fixed)]},
    }
    write_raw(tmp_path / "model.safetensors", json.dumps(header).encode(), b"8" * 10 + fixed)
    assert said in _refused(tmp_path)


@pytest.mark.parametrize("shape", [[0, 3], [3, 0]])
def test_an_empty_matrix_is_rejected(shape: list[int], tmp_path: Path) -> None:
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [0, 0]},
        "a.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    write_raw(tmp_path / "model.safetensors", json.dumps(header).encode(), b"1234")
    assert f"a.weight_scale is f32 []; for a.weight {shape}" in _refused(tmp_path)


def test_the_digest_covers_scales(plain: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> str:
        checkpoint, found = open_checkpoint(folder), WeightsDigest()
        for name in checkpoint.names:
            found.add(checkpoint.content(name))
        return found.hexdigest()

    folder = write_fp8_of(plain, tmp_path / "fp8", kind="tensor")
    before = digest(folder)
    assert digest(write_fp8_of(plain, tmp_path / "again", kind="tensor")) == before
    file = folder / "model.safetensors"
    untouched = file.read_bytes()
    header_bytes = int.from_bytes(untouched[:8], "little")
    header = json.loads(untouched[8 : 8 + header_bytes])
    for name in (f"{DOWN}_scale", DOWN.replace("weight", "input_scale")):
        raw = bytearray(untouched)
        raw[8 + header_bytes + header[name]["data_offsets"][0]] ^= 1
        file.write_bytes(raw)
        assert digest(folder) != before, name
