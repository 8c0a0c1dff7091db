"""--quantization from the setting to the answer: cards, fingerprints, errors, both executors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelError, SettingError, WeightsError
from quire.base.sampling_params import SamplingParams
from quire.cli.main import main
from quire.config.groups import ModelConfig
from quire.engine.assembly.precision import weights_if_there
from quire.engine.library.llm import LLM
from quire.quant.scheme import INT_SCHEMES, scheme_names
from tests.fp8_checkpoints import KINDS, write_fp8_of
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)


def answer(path: Path, **settings: Any) -> tuple[tuple[int, ...], str, str]:
    """Return tokens, the card's precision and its fingerprint."""
    with LLM(path, threads=1, **settings) as llm:
        (told,) = llm.generate([[0, 5, 9, 200, 31]], GREEDY)
        return tuple(told.token_ids), llm.card.quantization, llm.card.fingerprint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("precision")
    tied = write_tiny_llama(root / "tied", seed=2, dtype="bf16", tie_word_embeddings=True)
    return {"untied": write_tiny_llama(root / "untied", seed=1), "tied": tied}


@pytest.mark.parametrize("scheme", [*INT_SCHEMES, "int4"])
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_both_executors_give_one_answer_in_every_precision(
    folders: dict[str, Path], name: str, scheme: str
) -> None:
    native = answer(folders[name], quantization=scheme)
    reference = answer(folders[name], quantization=scheme, executor="reference")
    assert native[:2] == reference[:2]


def test_card_and_fingerprint_show_the_precision(folders: dict[str, Path]) -> None:
    made = [
        answer(folders["untied"], **settings)
        for settings in (
            {},
            {"quantization": "int8"},
            {"quantization": "int4"},
            {"quantization": "int4", "head_precision": "none"},
            {"quantization": "int4-g64", "keep": ["layers.0.*=f32", "*.down=int8"]},
        )
    ]
    assert [card for _, card, _ in made] == [
        "none",
        "int8",
        "int4-g32 (head: int8)",
        "int4-g32 (head: none)",
        "int8 (layers.0.qkv and 2 more: none; layers.1.qkv and 2 more: int4-g64)",
    ]
    assert len({fingerprint for _, _, fingerprint in made}) == len(made)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int3"}, "quantization is 'int3'; allowed: auto, none, int8, "),
        (
            {"quantization": "int8", "head_precision": "q8_0"},
            "head_precision: 'q8_0' is not a prec",
        ),
        ({"quantization": "int8", "keep": ["lm_head=none"]}, "'lm_head' matches no product of"),
        (
            {"quantization": "int8", "keep": ["head=bf16"]},
            "'bf16' is not a precision; .* f32 is what",
        ),
    ],
)
def test_errors_are_reported_before_anything_is_loaded(
    folders: dict[str, Path], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        LLM(folders["untied"], **settings)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_fp8_is_rejected_by_the_native_executor_and_runs_in_the_reference(
    folders: dict[str, Path], scheme: str
) -> None:
    with pytest.raises(
        ModelError, match=r"9 of its weights are kept in fp8 .* --quantization none"
    ):
        LLM(folders["untied"], quantization=scheme)
    tokens, told, _ = answer(folders["tied"], quantization=scheme, executor="reference")
    assert len(tokens) == 12
    assert told.startswith(scheme)


def test_a_quantized_file_is_rejected_by_its_kind(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = write_gguf_of(folders["untied"], tmp_path / "tiny.F32.gguf")
    as_checkpoint = answer(folders["untied"], quantization="int8")
    assert answer(plain, quantization="int8")[:2] == as_checkpoint[:2]
    even = write_tiny_llama(tmp_path / "even", hidden_size=64, head_dim=32, intermediate_size=96)
    quantized = write_gguf_of(even, tmp_path / "tiny.Q8_0.gguf", kind="Q8_0")
    for settings in ({"quantization": "int4"}, {"head_precision": "int4"}, {"keep": ["*.o=int4"]}):
        with pytest.raises(SettingError, match=r"quantized already \(Q8_0\); .* quantization, "):
            LLM(quantized, **settings)
    assert answer(quantized)[1] == "int8"
    assert answer(quantized, quantization="none")[1] == "none"
    kept = answer(quantized, keep=["layers.0.*=none"], head_precision="int8")
    assert kept[1] == "int8 (layers.0.qkv and 3 more: none)"


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp8_checkpoint_stays_fp8_or_is_dequantized(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    plain = write_tiny_llama(tmp_path / "plain", seed=1, dtype="bf16", **sizes, **heads)
    folder = write_fp8_of(plain, tmp_path / "fp8", kind=kind)
    scheme = "fp8-block" if kind == "block" else "fp8"
    tokens, told, fingerprint = answer(folder, executor="reference")
    assert (len(tokens), told) == (12, f"{scheme} (head: none)")
    assert answer(folder, executor="reference", quantization=scheme)[2] != fingerprint  # the head
    with pytest.raises(ModelError, match=r"8 of its weights are kept in fp8 .* --quantization no"):
        LLM(folder)
    multiplied_out = answer(folder, quantization="none")
    assert multiplied_out[1] == "none"
    reference = answer(folder, quantization="none", executor="reference")
    assert multiplied_out[:2] == reference[:2]
    for settings in ({"quantization": "int8"}, {"keep": ["layers.0.*=int4"]}):
        with pytest.raises(SettingError, match=rf"quantized already \({scheme}\); "):
            LLM(folder, **settings)


@pytest.fixture(scope="module")
def plain_even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("even") / "plain"
    return write_tiny_llama(folder, seed=1, dtype="bf16", **sizes, **heads)


@pytest.mark.parametrize("style", ["fp8", "compressed"])
def test_static_activation_scales_are_used_unless_fp8_is_requested(
    style: str, plain_even: Path, tmp_path: Path
) -> None:
    folder = write_fp8_of(plain_even, tmp_path / "fp8", kind="tensor", style=style, is_static=True)
    _, told, fingerprint = answer(folder, executor="reference")
    assert told == "fp8-static (head: none)"
    by_token = {"executor": "reference", "quantization": "fp8", "head_precision": "none"}
    _, told, other = answer(folder, **by_token)
    assert (told, other != fingerprint) == ("fp8 (head: none)", True)
    assert answer(folder, quantization="none")[1] == "none"
    with pytest.raises(SettingError, match=r"quantized already \(fp8\); "):
        LLM(folder, quantization="int8")
    with pytest.raises(SettingError, match="'fp8-static' is not a precision; allowed: none, int8"):
        LLM(folder, keep=["*.down=fp8-static"])


def test_a_missing_static_scale_is_reported(plain_even: Path, tmp_path: Path) -> None:
    keys = "model.layers.0.self_attn.k_proj.input_scale"
    folder = write_fp8_of(plain_even, tmp_path / "fp8", kind="tensor", is_static=True, drop=keys)
    with pytest.raises(WeightsError) as told:
        LLM(folder, executor="reference")
    assert f"{keys} is missing; 2 of 3 parts of layers.0.qkv have theirs" in str(told.value)
    assert "give --quantization fp8" in str(told.value)
    asked = answer(folder, executor="reference", quantization="fp8", head_precision="none")
    assert asked[1] == "fp8 (head: none)"
    none = write_fp8_of(plain_even, tmp_path / "none", kind="channel")
    config = json.loads((none / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    (none / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"down_proj.input_scale is missing\n"):
        LLM(none, executor="reference")


def test_counting_uses_fp8_if_weights_are_present(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_fp8_of(folders["untied"], tmp_path / "fp8", kind="channel")
    assert main(["program", str(folder)]) == 0
    assert "layers.0.o [60 x 80] fp8" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    assert main(["program", str(folder)]) == 0
    assert "layers.0.o [60 x 80] f32" in capsys.readouterr().out
    gguf = write_gguf_of(folders["untied"], tmp_path / "tiny.F32.gguf")
    gguf.write_bytes(gguf.read_bytes()[:-40])
    with pytest.raises(WeightsError):
        weights_if_there(gguf)


def test_parts_that_begin_inside_a_block_are_dequantized(tmp_path: Path) -> None:
    sizes = {"hidden_size": 160, "intermediate_size": 256, "head_dim": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    plain = write_tiny_llama(tmp_path / "plain", seed=1, dtype="bf16", **sizes, **heads)
    folder = write_fp8_of(plain, tmp_path / "fp8", kind="block", style="compressed")
    told = answer(folder, executor="reference")[1]
    assert told == "fp8-block (head and 2 more: none)"


def test_the_settings_names_match_the_schemes() -> None:
    for name in ("auto", *scheme_names()):
        assert ModelConfig(quantization=name).quantization == name
    with pytest.raises(SettingError) as told:
        ModelConfig(quantization="int3")
    listed = str(told.value).rpartition("allowed: ")[2].split(", ")
    assert sorted(listed) == sorted(("auto", *scheme_names()))
