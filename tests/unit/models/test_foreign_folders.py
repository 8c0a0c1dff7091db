"""Folders that hold no model for this engine say what they are, and what to do."""

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


def test_an_adapter_is_refused_with_the_model_it_belongs_to_and_how_to_merge_it(
    tmp_path: Path,
) -> None:
    put(tmp_path, "adapter_config.json", json.dumps({"base_model_name_or_path": "some/Llama"}))
    put(tmp_path, "adapter_model.safetensors")
    message = refused(tmp_path)
    assert 'no config.json; this is an adapter of "some/Llama"' in message
    assert "merge_and_unload().save_pretrained(FOLDER)" in message


@pytest.mark.parametrize("content", ["{}", "[", '{"base_model_name_or_path": null}'])
def test_an_adapter_that_does_not_say_whose_it_is_is_an_adapter_too(
    content: str, tmp_path: Path
) -> None:
    put(tmp_path, "adapter_config.json", content)
    assert "this is an adapter (adapter_config.json), not a model" in refused(tmp_path)


def test_a_merged_model_beside_its_adapter_opens(tmp_path: Path) -> None:
    put(tmp_path, "adapter_config.json")
    put(tmp_path, "config.json", json.dumps(tiny_config()))
    assert open_model(tmp_path).architecture == "LlamaForCausalLM"


def test_a_pipeline_of_pictures_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "model_index.json", '{"_class_name": "StableDiffusionPipeline"}')
    put(tmp_path, "unet/config.json")
    assert "a pipeline that makes pictures (model_index.json)" in refused(tmp_path)


def test_a_vendors_own_format_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "params.json")
    put(tmp_path, "consolidated.00.pth")
    message = refused(tmp_path)
    assert "a vendor's own format (params.json)" in message
    assert "with config.json and model*.safetensors" in message


def test_a_hubs_cache_and_a_folder_of_models_name_the_folders_to_give(tmp_path: Path) -> None:
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


def test_an_empty_folder_is_told_plainly(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path}: there is no config.json; give the folder of a model"


def test_a_pointer_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    put(tmp_path, "config.json", pointer)
    assert "config.json: a pointer of Git LFS, not the file itself" in refused(tmp_path)
