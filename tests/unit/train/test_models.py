"""Which models heads can be trained for: few layers, and weights that are quantized already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.models.eagle import TAP_KEY
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny, write_tiny_llama

pytest.importorskip("torch", reason="PyTorch is not installed")

from quire.train import eagle
from tests.unit.train.commands import trained

# The shape of DistilGPT-2, made small.
SIX_LAYERS = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "layer_norm_epsilon": 1e-5,
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 6,
    "n_positions": 128,
    "vocab_size": 307,
}


@pytest.mark.parametrize("num_layers", range(3, 10))
def test_three_different_layers_are_read_of_any_model(num_layers: int, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, num_hidden_layers=num_layers)
    taps = eagle.taps_of(None, folder)
    assert len(set(taps)) == 3
    assert all(0 <= one < num_layers for one in taps)
    assert (taps == eagle.usual_taps(num_layers)) if num_layers > 6 else (0 in taps)


def served(model: Path, head: Path) -> None:
    """Check that an engine takes the head."""
    with LLM(model, threads=1, max_num_seqs=2, speculate="eagle", draft_model=str(head)) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        assert len(llm.generate([[5, 6, 7, 8]], sampling)[0].outputs[0].token_ids) == 8


def test_a_head_of_a_model_with_six_layers(prompts: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", SIX_LAYERS, seed=3)
    assert trained("eagle", model, prompts, tmp_path / "head", 2) == 0
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config[TAP_KEY] == [1, 4, 6]
    served(model, tmp_path / "head")


def test_a_head_of_a_gguf_file(prompts: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "num_hidden_layers": 3}
    plain = write_tiny_llama(tmp_path / "plain", seed=3, **shape)
    model = write_gguf_of(plain, tmp_path / "model.gguf", kind="Q8_0")
    assert trained("eagle", model, prompts, tmp_path / "head", 2) == 0
    served(model, tmp_path / "head")


def test_texts_and_hidden_states_have_the_precision_that_is_asked_for(
    deep_model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = ["--quantization", "int8", "--head-precision", "none", "--kv-cache-dtype", "int8"]
    assert trained("medusa", deep_model, prompts, tmp_path, 2, *served) == 0
    first = json.loads((tmp_path / "texts.jsonl").read_text().splitlines()[0])
    assert [first[name] for name in ("quantization", "head_precision", "kv_cache_dtype")] == [
        "int8",
        "none",
        "int8",
    ]
    for other in ([], served[:2], served[:4], [*served[:2], *served[4:]]):
        assert trained("medusa", deep_model, prompts, tmp_path, 4, *other) == 1
        assert "has texts that were made otherwise" in capsys.readouterr().err
    assert trained("medusa", deep_model, prompts, tmp_path, 4, *served) == 0
    for option in ("--quantization", "--head-precision"):
        assert trained("medusa", deep_model, prompts, tmp_path / "other", 2, option, "int3") == 1
        error = capsys.readouterr().err
        assert f"error: {option[2:].replace('-', '_')}" in error
        assert "'int3'" in error
    assert not (tmp_path / "other" / "texts.jsonl").exists()


def test_a_model_that_was_moved_is_the_same_and_another_in_its_place_is_not(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, moved, out = (tmp_path / name for name in ("model", "moved", "out"))
    write_tiny_llama(model, seed=3, num_hidden_layers=3)
    assert trained("eagle", model, prompts, out, 2) == 0
    model.rename(moved)
    assert trained("eagle", moved, prompts, out, 3, "--tokens", "900") == 0
    write_tiny_llama(model, seed=4, num_hidden_layers=3)
    (out / "training.safetensors").unlink()
    assert trained("eagle", model, prompts, out, 2) == 1
    assert "or by another model" in capsys.readouterr().err
