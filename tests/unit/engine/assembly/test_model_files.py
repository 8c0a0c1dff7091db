"""A model's path and name; a GGUF file, its directory and its checkpoint give one answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelError
from quire.base.sampling_params import SamplingParams
from quire.config.groups import ModelConfig
from quire.engine.assembly.model_files import model_folder, model_name
from quire.engine.library.llm import LLM
from quire.models.registry import open_model
from quire.runner.fingerprint import FILES, files_digest
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from tests.cases import each_case
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama
from tests.unit.text.made_files import write_vocabulary

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "the and of 🦙"}]


def answer(path: Path, **settings: Any) -> tuple[Any, ...]:
    """Return a model's output with everything that must agree between both kinds of files."""
    with LLM(str(path), **settings) as llm:
        [said] = llm.generate("the cat", GREEDY)
        [chatted] = llm.chat(MESSAGES, GREEDY)
        return (
            said.prompt_ids,
            said.outputs[0].token_ids,
            said.outputs[0].text,
            chatted.prompt_ids,
            chatted.outputs[0].text,
        )


def test_a_gguf_file_and_its_folder_answer_as_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_tiny_llama(tmp_path / "checkpoint")
    path = write_gguf_of(checkpoint, tmp_path / "gguf" / "tiny.F32.gguf")
    right = answer(checkpoint)
    assert answer(path) == right
    assert answer(path.parent) == right


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_quantized_file_answers(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    checkpoint = write_tiny_llama(tmp_path / "ck", num_attention_heads=8, **sizes)
    path = write_gguf_of(checkpoint, tmp_path / f"tiny.{kind}.gguf", kind=kind)
    in_f32 = answer(path, dtype="f32")
    assert in_f32[0] == answer(checkpoint)[0]
    assert len(in_f32[1]) == 12
    assert answer(path, dtype="f32", executor="reference")[1] == in_f32[1]


def test_a_model_is_named_as_configured_or_by_its_directory_or_file(tmp_path: Path) -> None:
    for name, called in (
        ("Some-Model.Q4_K_M.gguf", "Some-Model.Q4_K_M"),
        ("big-00001-of-00002.gguf", "big"),
    ):
        (tmp_path / name).write_bytes(b"")
        config = ModelConfig(model=str(tmp_path / name))
        assert model_name(config) == called
        assert model_folder(config) == tmp_path / name
    assert model_name(ModelConfig(model=str(tmp_path))) == tmp_path.name
    assert model_name(ModelConfig()) == "box"
    assert model_name(ModelConfig(served_model_name="mine")) == "mine"
    assert model_name(ModelConfig(served_model_name=("mine", "other"))) == "mine"


def test_a_corrupt_file_fails_startup_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError, match=r"m\.gguf: this GGUF file is version 0"):
        LLM(str(tmp_path / "m.gguf"))


def put(path: Path, kind: str) -> None:
    """Put something that is no regular file in place of a model's file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@each_case("kind", ["FIFO", "directory", "device"])
@each_case("name", [pattern.replace("*", "file") for pattern in FILES] + ["model.safetensors"])
def test_irregular_files_are_named_and_not_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    put(folder / name, kind)
    with pytest.raises(ModelError, match=rf"{name}.*(regular|plain) file"):
        open_all(folder)


@pytest.mark.parametrize("name", ["tokenizer.model", "file.tiktoken", "merges.txt"])
def test_older_tokenizer_formats_are_not_waited_for_either(tmp_path: Path, name: str) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    if name == "merges.txt":
        write_vocabulary(folder)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    put(folder / name, "FIFO")
    with pytest.raises(ModelError, match=rf"{name}: .*regular file"):
        Tokenizer.load(folder)


def test_the_index_and_its_shards_must_be_regular_files(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    index, shard = folder / "model.safetensors.index.json", folder / "a.safetensors"
    index.write_text('{"weight_map": {"x": "a.safetensors"}}')
    put(shard, "FIFO")
    with pytest.raises(ModelError, match=r"a\.safetensors: .*it is a FIFO; a regular file"):
        open_checkpoint(folder)
    put(index, "FIFO")
    with pytest.raises(ModelError, match=r"index\.json is not a regular file"):
        open_checkpoint(folder)


def test_a_gguf_file_must_be_a_regular_file(tmp_path: Path) -> None:
    put(tmp_path / "model.gguf", "FIFO")
    with pytest.raises(ModelError, match=r"model\.gguf: .*it is a FIFO; a regular file"):
        open_model(tmp_path)


def test_startup_fails_with_the_reason(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    put(folder / "generation_config.json", "FIFO")
    with pytest.raises(ModelError, match=r"generation_config\.json: .*it is a FIFO"):
        LLM(str(folder))


def open_all(folder: Path) -> None:
    """Read every file of a model that startup reads."""
    open_model(folder)
    ChatTemplate.load(folder, Tokenizer.load(folder), chosen=None)
    open_checkpoint(folder)
    files_digest(folder)
