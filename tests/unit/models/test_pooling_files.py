"""What the sentence-transformers files of a folder say is honoured, or refused with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ConfigError, SettingError
from quire.config.groups import ModelConfig
from quire.engine.assembly.pooling import model_pooling
from quire.models.pooling_files import PoolingSpec, read_pooling
from quire.models.registry import open_model
from tests.cases import each_case
from tests.tiny_models import tiny_config

SIZE = 60
KINDS = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{KINDS}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{KINDS}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{KINDS}Normalize"},
]
LAST = {
    "word_embedding_dimension": SIZE,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}
PROMPTS = {
    "prompts": {"query": "Instruct: find\nQuery:", "document": ""},
    "default_prompt_name": None,
    "similarity_fn_name": "cosine",
    "__version__": {"sentence_transformers": "3.4.1"},
}


def write(folder: Path, files: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    files = {"config.json": tiny_config(**config), **files}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def files(**changes: Any) -> dict[str, Any]:
    """Return the files of a model like Qwen3-Embedding. changes: modules, pooling, prompts."""
    return {
        "modules.json": changes.get("modules", MODULES),
        "1_Pooling/config.json": {**LAST, **changes.get("pooling", {})},
        "config_sentence_transformers.json": {**PROMPTS, **changes.get("prompts", {})},
    }


def test_a_folder_like_qwen3_embedding_is_read(tmp_path: Path) -> None:
    spec = read_pooling(write(tmp_path, files(), is_matryoshka=True), SIZE)
    assert spec == PoolingSpec(
        pooling="last",
        normalizes=True,
        size=SIZE,
        any_dimensions=True,
        prompts=PROMPTS["prompts"],
    )


def test_a_mean_without_normalization_and_without_prompts(tmp_path: Path) -> None:
    pooling = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    found = files(modules=MODULES[:2], pooling=pooling)
    del found["config_sentence_transformers.json"]
    spec = read_pooling(write(tmp_path, found, matryoshka_dimensions=[32, 16, 32]), SIZE)
    assert spec == PoolingSpec(pooling="mean", normalizes=False, size=SIZE, dimensions=(16, 32))


def test_the_newer_names_of_the_pooling_file(tmp_path: Path) -> None:
    found = files()
    found["1_Pooling/config.json"] = {"embedding_dimension": SIZE, "pooling_mode": "mean"}
    spec = read_pooling(write(tmp_path, found), SIZE)
    assert spec is not None
    assert spec.pooling == "mean"


def test_a_folder_without_these_files_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, {}), SIZE) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a dense layer": (
        files(
            modules=[
                *MODULES[:2],
                {"path": "2_Dense", "type": f"{KINDS}Dense"},
            ]
        ),
        "Transformer and Pooling",
    ),
    "code of the model": (files(modules=[{"path": "", "type": "custom.Model"}]), "never run"),
    "a path that climbs": (
        files(modules=[MODULES[0], {**MODULES[1], "path": "../other"}]),
        "name of a directory",
    ),
    "an absolute path": (files(modules=[MODULES[0], {**MODULES[1], "path": "/etc"}]), "directory"),
    "weights elsewhere": (files(modules=[{**MODULES[0], "path": "0_T"}, *MODULES[1:]]), '("")'),
    "no list": (files(modules={}), "a list of modules"),
    "no JSON": (files() | {"modules.json": "[{"}, "not JSON"),
    "a second object smuggled in": (files() | {"modules.json": '[], "x": 1'}, "a list of modules"),
    "cls": (files(pooling={"pooling_mode_cls_token": True}), "pooling_mode_cls_token is true"),
    "weighted": (files(pooling={"pooling_mode_weightedmean_tokens": True}), "weightedmean"),
    "two modes": (files(pooling={"pooling_mode_mean_tokens": True}), "2 pooling modes"),
    "no mode": (files(pooling={"pooling_mode_lasttoken": False}), "0 pooling modes"),
    "a mode that is none": (files(pooling={"pooling_mode": "cls"}), "lasttoken and mean"),
    "another width": (files(pooling={"word_embedding_dimension": 61}), "60 columns"),
    "an unknown key": (files(pooling={"pooling_mode_magic": True}), "pooling_mode_magic"),
    "a mean without the prompt": (
        files(
            pooling={
                "pooling_mode_lasttoken": False,
                "pooling_mode_mean_tokens": True,
                "include_prompt": False,
            }
        ),
        "include_prompt",
    ),
    "a flag that is text": (files(pooling={"pooling_mode_lasttoken": "yes"}), "true or false"),
    "prompts that are a list": (files(prompts={"prompts": ["a"]}), "prompts"),
    "a prompt that is a number": (files(prompts={"prompts": {"a": 1}}), "a text is allowed"),
    "a default that is not there": (
        files(prompts={"default_prompt_name": "x"}),
        "one of the prompts",
    ),
    "another distance": (files(prompts={"similarity_fn_name": "euclidean"}), "cosine, dot"),
    "a cross encoder": (files(prompts={"model_type": "CrossEncoder"}), "SentenceTransformer"),
    "lower case": (files() | {"sentence_bert_config.json": {"do_lower_case": True}}, "lower case"),
}


@each_case("case", WRONG)
def test_what_is_not_computed_is_refused(tmp_path: Path, case: str) -> None:
    found, said = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        read_pooling(write(tmp_path, found), SIZE)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"is_matryoshka": "yes"}, "true or false"),
        ({"matryoshka_dimensions": [0]}, "1 to 60"),
        ({"matryoshka_dimensions": []}, "1 to 60"),
        ({"auto_map": {"AutoModel": "modeling_llama.LlamaModel"}}, "never run"),
        ({"classifier_from_token": ["no"]}, "two texts"),
        ({"classifier_from_token": ["no", "yes"]}, "model_type qwen3"),
    ],
)
def test_keys_of_config_json_are_checked(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_pooling(write(tmp_path, files(), **config), SIZE)


def test_a_model_that_judges_makes_no_embeddings_unless_it_is_told_to(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "classifier_from_token": ["no", "yes"]}
    folder = write(tmp_path, {}, **config)
    spec = open_model(write(tmp_path / "llama", {}))
    judging = model_pooling(ModelConfig(), folder, spec)
    assert judging is not None
    assert (judging.judges, judging.embeds) == (("no", "yes"), False)
    both = model_pooling(ModelConfig(convert="embed"), folder, spec)
    assert both is not None
    assert both.embeds


def test_the_setting_adds_to_what_the_folder_says(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {})
    spec = open_model(plain)
    assert model_pooling(ModelConfig(), plain, spec) is None
    found = model_pooling(ModelConfig(convert="embed", matryoshka_dimensions="8,16"), plain, spec)
    assert found == PoolingSpec(pooling="last", normalizes=True, size=SIZE, dimensions=(8, 16))
    own = write(tmp_path / "own", files(), is_matryoshka=True)
    assert model_pooling(ModelConfig(convert="none"), own, spec) is None
    found = model_pooling(ModelConfig(matryoshka_dimensions="16"), own, spec)
    assert found is not None
    assert (found.any_dimensions, found.dimensions) == (False, (16,))
    for config, said in (
        (ModelConfig(matryoshka_dimensions="any"), "--convert embed"),
        (ModelConfig(convert="none", matryoshka_dimensions="any"), "leave one of them out"),
        (ModelConfig(convert="embed", matryoshka_dimensions="61"), "60 dimensions"),
    ):
        with pytest.raises(SettingError, match=said):
            model_pooling(config, plain, spec)
    for wrong in ("", "0", "8,", "all", "-4"):
        with pytest.raises(SettingError, match="matryoshka_dimensions"):
            ModelConfig(matryoshka_dimensions=wrong)


def test_a_mean_of_too_many_tokens_is_refused(tmp_path: Path) -> None:
    mean = {"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}
    folder = write(tmp_path, files(pooling=mean), max_position_embeddings=1 << 22)
    spec = open_model(folder)
    with pytest.raises(SettingError, match="at most 2097152"):
        model_pooling(ModelConfig(), folder, spec)
    assert model_pooling(ModelConfig(max_model_len=1 << 21), folder, spec) is not None


def test_a_decoder_without_a_head_makes_embeddings_only(tmp_path: Path) -> None:
    folder = write(tmp_path, {}, architectures=["LlamaModel"])
    spec = open_model(folder)
    assert (spec.architecture, spec.has_head) == ("LlamaForCausalLM", False)
    found = model_pooling(ModelConfig(), folder, spec)
    assert found is not None
    assert (found.pooling, found.normalizes) == ("last", True)
    with pytest.raises(SettingError, match="nothing but embeddings"):
        model_pooling(ModelConfig(convert="none"), folder, spec)
