"""`quire plan`: its tables and JSON, its exit codes, and the input it rejects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire.models.model_folder import draft_box_path
from tests.cases import each_case
from tests.tiny_models import tiny_config, write_tiny_llama
from tests.unit.cli.command import quire_main
from tests.unit.sim.llama_configs import LLAMA_3_70B, config_folder

H100 = ("--device", "h100")


def test_a_model_that_fits_is_shown_by_length() -> None:
    done = quire_main("plan", *H100, "--context", "200", "--concurrency", "5")
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("It fits.", "NVIDIA H100 SXM", "KV cache per token", "2,560 B", "of 16 tokens"):
        assert said in done.stdout
    assert "Change" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("128 ", "200 "))]
    assert [row[:3] for row in rows] == [["128", "8", "5"], ["200", "13", "5"]]


def test_a_draft_model_is_part_of_the_sum() -> None:
    words = (*H100, "--context", "200", "--concurrency", "5", "--speculate", "draft", "--json")
    done = quire_main("plan", *words)
    assert (done.returncode, done.stderr) == (0, "")
    by_name = {line["what"]: -line["bytes"] for line in json.loads(done.stdout)["memory"]}
    assert by_name["draft model: weights"] > 500_000
    assert by_name["draft model: KV cache (65 blocks of 16 tokens)"] == 65 * 16 * 2 * 64 * 2 * 2


@pytest.mark.parametrize("flags", [(), ("--draft-model",)])
def test_weights_that_differ_from_the_configuration_end_a_plan_as_they_end_a_start(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Of the model, and of a draft model. The configuration alone is enough to plan."""
    model = shutil.copytree(draft_box_path(), tmp_path / "m")
    values = json.loads((model / "config.json").read_text())
    values["intermediate_size"] += 32
    (model / "config.json").write_text(json.dumps(values))
    done = quire_main("plan", *H100, *flags, str(model))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"quire plan: {model}: weights and config.json disagree: 6 pro")
    assert "down_proj.weight has shape [128, 384]; config.json asks for [128, 416]" in done.stderr
    (model / "model.safetensors").unlink()
    assert quire_main("plan", *H100, *flags, str(model)).returncode == 0


@pytest.mark.parametrize(("context", "is_short"), [(64, True), (512, False)])
def test_a_draft_model_with_a_shorter_context_is_mentioned(
    tmp_path: Path, context: int, is_short: bool
) -> None:
    draft = shutil.copytree(draft_box_path(), tmp_path / "draft")
    values = json.loads((draft / "config.json").read_text())
    values["max_position_embeddings"] = context
    (draft / "config.json").write_text(json.dumps(values))
    done = quire_main("plan", *H100, "--speculate", "draft", "--draft-model", str(draft))
    assert (done.returncode, done.stderr) == (0, "")
    said = "The draft model's context is 64 tokens: requests have no drafts beyond it."
    assert (said in done.stdout) == is_short


def test_a_model_that_does_not_fit_ends_with_1_and_names_flags(tmp_path: Path) -> None:
    model = config_folder(tmp_path / "m", LLAMA_3_70B)
    done = quire_main("plan", model, *H100)
    assert (done.returncode, done.stderr) == (1, "")
    assert "It does not fit: 135330.0 MiB are needed" in done.stdout
    assert "--quantization int8 --kv-cache-dtype int8   yes" in done.stdout
    assert "tensor parallelism over 2 such devices" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_the_json_object_has_the_numbers_of_the_tables(tmp_path: Path) -> None:
    model = config_folder(tmp_path / "m", LLAMA_3_70B)
    words = (*H100, "--quantization", "int8", "--kv-cache-memory", "8GB", "--json")
    outcome = json.loads(quire_main("plan", model, *words).stdout)
    assert outcome["fits"]
    assert outcome["settings"]["quantization"] == "int8"
    assert (outcome["kv_bytes_per_token"], outcome["num_blocks"]) == (327_680, 1525)
    assert outcome["max_context"] == 24_400
    by_length = {row["tokens"]: row for row in outcome["lengths"]}
    assert (by_length[1024]["requests"], by_length[8192]["requests"]) == (23, 2)
    assert sum(line["bytes"] for line in outcome["memory"][1:-1]) == (
        outcome["memory"][-1]["bytes"] - outcome["memory"][0]["bytes"]
    )


def test_this_machine_is_measured(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    words = ("--memory", "2GiB", "--threads", "1", "--json")
    outcome = json.loads(quire_main("plan", str(tmp_path), *words).stdout)
    device = outcome["device"]
    assert (device["name"], device["rates"]) == ("this", "measured now")
    assert device["gb_per_s"] > 0
    assert device["gflop_per_s"] > 0
    assert outcome["available_bytes"] == 2 * 2**30


@each_case(
    ("words", "said"),
    [
        (("--device", "h10"), "there is no device 'h10' in the table; did you mean h100"),
        (("--memory", "lots", *H100), "'lots' is not a size in bytes; write it like 512MiB"),
        (
            ("--memory", "0", *H100),
            "'0' is 0 bytes, which hold no model; give more, as in 80GiB",
        ),
        (
            ("--memory", "24", *H100),
            "'24' is 24 bytes, which hold no model; write a unit, as in 24G",
        ),
        (("--memory", "-3GB", *H100), "expected one argument"),
        (("--context", "0", *H100), "'0' is not a whole number of at least 1"),
        (("--context", "1", *H100), "--context is 1; at least 2 is needed"),
        (("--context", "513", *H100), "--context is 513; the model allows at most 512"),
        (("--concurrency", "many", *H100), "'many' is not a whole number"),
        (("--device", "epyc-9654"), "96 cores at 2.4 GHz) has no memory size of its own"),
        (("--device", "epyc-9654", "--memory", "1GB", "--quantization", "fp8"), "fp8"),
        (("--quantization", "int3", *H100), "quantization is 'int3'; allowed: auto, none, int8"),
        (("--nnodes", "2", *H100), "ranks on several machines are started by"),
    ],
)
def test_wrong_input_is_rejected_with_what_is_allowed(words: tuple[str, ...], said: str) -> None:
    done = quire_main("plan", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_models_that_cannot_be_read_are_rejected_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("quire.bench.limits.machine_limits", measured)
    config = tiny_config(architectures=["FalconForCausalLM"], model_type="falcon")
    unsupported = config_folder(tmp_path / "m", config)
    other = write_tiny_llama(tmp_path / "other")
    (other / "config.json").write_text(json.dumps(tiny_config(intermediate_size=32)))
    for model, said in (
        (unsupported, "FalconForCausalLM"),
        (str(tmp_path / "none"), "none"),
        (str(other), "weights and config.json disagree"),
    ):
        done = quire_main("plan", model)
        assert done.returncode == 2
        assert said in done.stderr


def test_a_device_without_room_for_anything_is_no_error_of_the_command() -> None:
    done = quire_main("plan", *H100, "--memory", "1GB")
    assert done.returncode == 1
    assert "0.0 KiB are available (--memory, without 1536.0 MiB" in done.stdout
    assert "Not even 32 such devices" in done.stdout


def test_a_layout_is_recommended_with_its_reasons(tmp_path: Path) -> None:
    model = config_folder(tmp_path / "m", LLAMA_3_70B | {"num_hidden_layers": 8})
    few = ("--context", "4096", "--memory", "12GB", "--concurrency", "4")
    words = (*H100, "--devices", "8", "--tensor-parallel-size", "8", *few)
    done = quire_main("plan", model, *words)
    assert (done.returncode, done.stderr) == (0, "")
    for said in ("It fits.", "TP 8", "PP 2", "Recommended: TP ", "Computed, not measured"):
        assert said in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110
    fast = json.loads(quire_main("plan", model, *words, "--tp-mode", "fast", "--json").stdout)
    exact = json.loads(quire_main("plan", model, *words, "--json").stdout)
    received = [found["ranks"]["of_rank"][0]["received_bytes_per_token"] for found in (exact, fast)]
    assert 1.2 < received[0] / received[1] < 1.625  # with the head, which both gather
    assert {row["layout"] for row in exact["layouts"]["layouts"]} >= {"one device", "TP 4 x PP 2"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices-per-node", "4"), "describe where --devices are: give it too"),
        (("--network-gb-per-s", "4"), "describe where --devices are: give it too"),
        (("--link-gb-per-s", "4"), "give --devices or --tensor-parallel-size"),
        (("--devices", "2", "--link-gb-per-s", "0"), "--link-gb-per-s is 0.0; it must be above 0"),
        (("--devices", "5000"), "--devices is 5000; 1 to 1024 are allowed"),
        (("--tensor-parallel-size", "3"), "these degrees work:"),
        (("-tp", "2", "--enable-expert-parallel"), "has no mixture of experts; leave it out"),
        (("--enable-expert-parallel",), "--tensor-parallel-size is 1"),
    ],
)
def test_ranks_and_links_that_contradict_are_refused(words: tuple[str, ...], said: str) -> None:
    done = quire_main("plan", *H100, *words)
    assert done.returncode == 2
    assert said in done.stderr
