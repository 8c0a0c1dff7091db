"""Directories without a usable model are reported with what they are, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.models.registry import open_model
from tests.tiny_models import tiny_config


def put(folder: Path, name: str, content: str = "{}") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_model(folder)
    return str(caught.value)


def test_an_adapter_is_rejected_with_its_base_model_and_how_to_merge_it(
    tmp_path: Path,
) -> None:
    put(tmp_path, "adapter_config.json", json.dumps({"base_model_name_or_path": "some/Llama"}))
    put(tmp_path, "adapter_model.safetensors")
    message = refused(tmp_path)
    assert 'no config.json; this is an adapter of "some/Llama"' in message
    assert "merge_and_unload().save_pretrained(FOLDER)" in message


@pytest.mark.parametrize("content", ["{}", "[", '{"base_model_name_or_path": null}'])
def test_an_adapter_without_a_named_base_model_is_recognized(content: str, tmp_path: Path) -> None:
    put(tmp_path, "adapter_config.json", content)
    assert "this is an adapter (adapter_config.json), not a model" in refused(tmp_path)


def test_a_merged_model_beside_its_adapter_opens(tmp_path: Path) -> None:
    put(tmp_path, "adapter_config.json")
    put(tmp_path, "config.json", json.dumps(tiny_config()))
    assert open_model(tmp_path).architecture == "LlamaForCausalLM"


def test_an_image_pipeline_is_rejected(tmp_path: Path) -> None:
    put(tmp_path, "model_index.json", '{"_class_name": "StableDiffusionPipeline"}')
    put(tmp_path, "unet/config.json")
    assert "a pipeline that makes images (model_index.json)" in refused(tmp_path)


def test_a_vendors_own_format_is_rejected(tmp_path: Path) -> None:
    put(tmp_path, "params.json")
    put(tmp_path, "consolidated.00.pth")
    message = refused(tmp_path)
    assert "a vendor's own format (params.json)" in message
    assert "with config.json and model*.safetensors" in message


def test_a_hub_cache_and_a_directory_of_models_list_the_usable_paths(tmp_path: Path) -> None:
    put(tmp_path, "cached/refs/main", "abc")
    put(tmp_path, "cached/snapshots/abc/config.json")
    assert f"give the folder that has one: {tmp_path / 'cached/snapshots/abc'}" in refused(
        tmp_path / "cached"
    )
    for name in "abcd":
        put(tmp_path, f"many/{name}/config.json")
    message = refused(tmp_path / "many")
    assert message.endswith(", ...")
    assert str(tmp_path / "many" / "c") in message


def test_an_empty_directory_is_reported(tmp_path: Path) -> None:
    assert refused(tmp_path) == (
        f"{tmp_path}: there is no config.json; it is empty; give the directory of a model, with "
        "config.json and model*.safetensors"
    )


def test_a_git_lfs_pointer_is_reported(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    put(tmp_path, "config.json", pointer)
    assert "config.json: a pointer of Git LFS, not the file itself" in refused(tmp_path)
