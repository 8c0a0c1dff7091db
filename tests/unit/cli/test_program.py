"""`quire program`: the table of the built-in model or of a directory, and its rejections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_models import tiny_config
from tests.unit.cli.command import quire_main


def test_a_dtype_has_its_usual_names() -> None:
    shown = {name: quire_main("program", "--dtype", name) for name in ("f32", "float32")}
    assert shown["f32"].stdout == shown["float32"].stdout != ""
    told = quire_main("program", "--dtype", "f16").stderr
    assert "choose from auto, f32, bf16, float32, bfloat16" in told


def test_the_program_of_the_built_in_model_is_printed() -> None:
    done = quire_main("program")
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("segment trunk", "segment head", "attention", "weights:", "cache:", "operations"):
        assert said in done.stdout


def test_tapped_layers_are_printed() -> None:
    done = quire_main("program", "--taps", "0", "2", "4", "--all-layers")
    assert done.returncode == 0
    assert done.stdout.count("[T x 256] f32") > 3
    assert "taps.44[512:768]" in done.stdout


def test_only_the_configuration_is_required(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    words = ("--tokens", "3", "--depth", "9", "--sequences", "2", "--dtype", "bf16")
    done = quire_main("program", str(tmp_path), *words)
    assert done.returncode == 0
    assert "T = 6 tokens of Q = 2 sequences at depth 9" in done.stdout
    assert "layers.0.qkv [112 x 60] bf16" in done.stdout
    assert "in turn" in done.stdout
    whole = quire_main("program", str(tmp_path), "--all-layers")
    assert "layers.1.down [60 x 97]" in whole.stdout
    assert "in turn" not in whole.stdout


def test_the_first_layers_are_printed() -> None:
    done = quire_main("program", "--self-draft-layers", "2", "--all-layers")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("LlamaForCausalLM, first 2 of 5 layers, up to 512 positions")
    assert "layers.1.down" in done.stdout
    assert "layers.2." not in done.stdout
    assert "cache:   paged, 2 layers of 2 x 64 bf16" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--self-draft-layers", "6"), "--self-draft-layers is 6; 1 to 5 is allowed"),
        (("--tokens", "0"), "--tokens is 0; 1 to 512 is allowed"),
        (("--tokens", "513"), "--tokens is 513; 1 to 512 is allowed"),
        (("--depth", "512"), "--depth is 512; 0 to 511 is allowed"),
        (
            ("--taps", "0", "5"),
            "layers [0, 5] cannot be tapped; LlamaForCausalLM has the layers 0 to 4",
        ),
        (("--sequences", "-1"), "--sequences is -1; 1 to"),
    ],
)
def test_impossible_steps_are_rejected_with_the_limits(words: tuple[str, ...], said: str) -> None:
    done = quire_main("program", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_directory_without_a_model_is_rejected(tmp_path: Path) -> None:
    done = quire_main("program", str(tmp_path))
    assert done.returncode == 2
    assert "config.json" in done.stderr


def test_a_ranks_share_is_printed_in_both_modes() -> None:
    words = ("program", "--tensor-parallel-size", "2", "--all-layers")
    exact, fast = quire_main(*words), quire_main(*words, "--tp-mode", "fast")
    assert "all_reduce" not in exact.stdout
    assert "sum of 2 ranks, in their order" in fast.stdout
    for wrong, said in (
        (("program", "--tp-mode", "fast"), "give at least 2"),
        (("program", "--enable-expert-parallel"), "give at least 2"),
        ((*words, "--enable-expert-parallel"), "has no mixture of experts"),
    ):
        done = quire_main(*wrong)
        assert done.returncode == 2
        assert said in done.stderr


def test_stages_are_printed_one_after_the_other_or_alone() -> None:
    done = quire_main("program", "--pipeline-parallel-size", "2")
    assert done.returncode == 0
    assert done.stdout.count("stage 0 of 2, up to") == done.stdout.count("stage 1 of 2, up to") == 1
    assert "to stage 1" in done.stdout
    words = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", "--stage", "1")
    alone = quire_main("program", *words, "--rank", "1")
    assert "stage 0 of 2" not in alone.stdout
    assert "from stage 0" in alone.stdout
    assert "from rank 1 of 2" in alone.stdout


def test_the_first_layers_are_printed_in_the_stages_of_the_whole_model() -> None:
    words = ("--self-draft-layers", "1", "--pipeline-parallel-size", "2")
    done = quire_main("program", *words)
    assert done.returncode == 0, done.stderr
    assert "first 1 of 5 layers, stage 0 of 2" in done.stdout
    assert "first 1 of 5 layers, stage 1 of 2" in done.stdout
    refused = quire_main("program", *words, "--taps", "1")
    assert refused.returncode == 2
    assert "leave one of them out" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pipeline-parallel-size", "6"), "has 5 layers, of which each stage needs one: 1 to 5"),
        (("--pipeline-parallel-size", "0"), "pipeline-parallel-size is 0"),
        (("--pipeline-parallel-size", "2", "--stage", "2"), "--stage is 2; 0 to 1 is allowed"),
    ],
)
def test_stages_that_do_not_exist_are_refused(words: tuple[str, ...], said: str) -> None:
    done = quire_main("program", *words)
    assert done.returncode == 2
    assert said in done.stderr
