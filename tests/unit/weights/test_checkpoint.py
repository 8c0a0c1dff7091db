"""Directories of weights: shards, rejections, and agreement with a program in both directions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import WeightsError
from quire.base.show import show
from quire.engine.assembly.precision import weights_if_there
from quire.models.registry import build_program, open_model
from quire.program.tensors import DType
from quire.weights import binding
from quire.weights.checkpoint import Checkpoint, lacks_weights, open_checkpoint
from tests.cases import each_case
from tests.safetensors_writer import write_safetensors
from tests.tiny_models import tiny_config, tiny_tensors, write_tiny_llama, write_weights

Tensors = dict[str, Any]
INDEX = "model.safetensors.index.json"


def bind(folder: Path) -> Checkpoint:
    spec = open_model(folder)
    program = build_program(spec, dtype=DType.F32, max_positions=64)
    checkpoint = open_checkpoint(folder)
    binding.bind(program, checkpoint)
    return checkpoint


def with_tensors(folder: Path, change: Callable[[Tensors], Any], **changes: Any) -> Path:
    """Write a tiny model with tensors changed after its config was written."""
    write_tiny_llama(folder, **changes)
    tensors = tiny_tensors(tiny_config(**changes), 0)
    change(tensors)
    write_weights(folder, tensors, dtype="f32")
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        bind(folder)
    return str(caught.value)


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """Write three shards with a changed weight_map; return the error message."""
    write_tiny_llama(folder, shards=3)
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_hold_the_same_tensors_as_one_file(shards: int, tmp_path: Path) -> None:
    one = bind(write_tiny_llama(tmp_path / "one", dtype="bf16"))
    many = bind(write_tiny_llama(tmp_path / "many", dtype="bf16", shards=shards))
    assert set(one.names) == set(many.names)
    for name in one.names:
        assert np.array_equal(one.read_f32(name), many.read_f32(name))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shard model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(tmp_path)


def test_a_corrupt_shard_and_a_missing_one_are_listed_together(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    path = tmp_path / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(WeightsError, match="2 problems") as caught:
        open_checkpoint(tmp_path)
    assert "00002-of-00003.safetensors is missing" in str(caught.value)
    assert "5 bytes after the end of the file" in str(caught.value)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(tmp_path: Path) -> None:
    name = "model.norm.weight"

    def move(weight_map: dict[str, str]) -> None:
        here = weight_map[name]
        weight_map[name] = next(file for file in weight_map.values() if file != here)

    message = change_index(tmp_path, move)
    assert f"{name} should be in" in message
    assert "but it is in model-" in message


def test_tensors_missing_in_the_index_are_named(tmp_path: Path) -> None:
    message = change_index(tmp_path, lambda weight_map: weight_map.pop("model.norm.weight"))
    assert "model.norm.weight is in model-" in message
    assert "not in the index" in message


def test_a_tensor_in_two_shards_is_rejected(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    first, second = (open_checkpoint(file) for file in files)
    both = {name: first.read_f32(name) for name in first.names}
    both[second.names[0]] = second.read_f32(second.names[0])
    write_safetensors(files[0], both)
    with pytest.raises(WeightsError, match=r"is in model-00001.* and in model-00002"):
        open_checkpoint(tmp_path)


@each_case(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "",
        "x.safetensors\0",
        None,
        7,
        ["model.safetensors"],
        "n" * 300 + ".safetensors",
        "ä" * 130 + ".safetensors",
    ],
)
def test_an_index_that_leaves_the_directory_is_rejected(file: Any, tmp_path: Path) -> None:
    message = change_index(tmp_path, lambda weight_map: weight_map.update(odd=file))
    assert f"odd: file is {show(file)}; a plain name" in message


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map"', "\udcff"]
)
def test_an_index_without_a_weight_map_is_rejected(text: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, shards=2)
    (tmp_path / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(WeightsError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_rejected_with_the_reason_and_an_alternative(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path)
    message = str(caught.value)
    assert name in message
    assert "can run any code" in message
    assert "convert them to safetensors" in message


def test_pickles_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    bind(tmp_path)


def test_a_single_gguf_file_in_a_directory_is_opened(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"model-q4\.gguf: the file has 4 bytes"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_lists_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(WeightsError, match=r"neither model\.safetensors .* found notes\.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_missing_unexpected_and_wrongly_shaped_tensors_are_listed_together(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((97, 60), np.float32)
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((60, 60), np.float32)
        tensors["model.norm.weight"] = np.zeros((60, 1), np.float32)

    message = refused(with_tensors(tmp_path, damage))
    assert "4 problems" in message
    assert "model.layers.1.mlp.up_proj.weight is missing (shape [97, 60] is needed)" in message
    assert "model.layers.2.mlp.up_proj.weight (shape [97, 60]) is not part of" in message
    assert "q_proj.weight has shape [60, 60]; config.json asks for [80, 60]" in message
    assert "model.norm.weight has shape [60, 1]; config.json asks for [60]" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"num_key_value_heads": 5},
        {"vocab_size": 308},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_that_contradicts_the_weights_is_rejected(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**changes)))
    assert "weights and config.json disagree" in refused(tmp_path)


def test_a_missing_head_suggests_the_config_key(tmp_path: Path) -> None:
    message = refused(with_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight")))
    assert "lm_head.weight is missing" in message
    assert "tie_word_embeddings true" in message


def test_a_copy_of_the_embedding_as_tied_head_is_accepted(tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    bind(with_tensors(tmp_path, copy, tie_word_embeddings=True))


def test_a_tied_head_different_from_the_embedding_is_rejected(tmp_path: Path) -> None:
    def differ(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    message = refused(with_tensors(tmp_path, differ, tie_word_embeddings=True))
    assert "lm_head.weight differs from model.embed_tokens.weight" in message
    assert "tie_word_embeddings" in message


def test_rotary_buffers_of_old_checkpoints_are_accepted(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    bind(with_tensors(tmp_path, add))


def test_an_unknown_name_is_rejected_by_name(tmp_path: Path) -> None:
    checkpoint = bind(write_tiny_llama(tmp_path))
    with pytest.raises(WeightsError, match="no tensor named 'x'"):
        checkpoint.tensor("x")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_irregular_files_are_rejected_before_they_are_opened(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)  # opening a pipe would block
    with pytest.raises(WeightsError, match="not a regular file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("shards", "change", "lacks"),
    [
        (1, None, False),
        (1, "remove", True),
        (1, "pointer", True),
        (1, "cut", False),
        (3, None, False),
        (3, "remove", True),
        (3, "pointer", True),
        (3, "cut", False),
    ],
)
def test_weights_that_are_absent_are_told_from_damaged_ones(
    tmp_path: Path, shards: int, change: str | None, lacks: bool
) -> None:
    write_tiny_llama(tmp_path, shards=shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = file.read_bytes()
    file.unlink()
    if change != "remove":
        pointer = b"version https://git-lfs.github.com/spec/v1\n"
        file.write_bytes({None: content, "pointer": pointer, "cut": content[:-40]}[change])
    assert lacks_weights(tmp_path) == lacks
    if change is None:
        assert weights_if_there(tmp_path) is not None
    elif lacks:
        assert weights_if_there(tmp_path) is None
    else:
        with pytest.raises(WeightsError, match="cut short"):
            weights_if_there(tmp_path)
