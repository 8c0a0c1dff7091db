"""Plans of published models on devices: sizes are exact, speeds are those of the roofline."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import _native
from quire.base.clock import Clock
from quire.base.errors import ModelError, SettingError
from quire.config.flags import engine_config
from quire.config.machine import MachineMemory
from quire.config.memory import num_blocks_of
from quire.engine.assembly.assemble import assemble
from quire.sim.cost import RooflineCost
from quire.sim.hardware import DEVICES, THIS, Device, find_device
from quire.sim.plan import Planner, sharded_needs
from quire.sim.plan_report import plan_outcome, plan_text
from tests.cases import each_case
from tests.gguf_convert import write_gguf_of
from tests.tiny_models import write_tiny_llama
from tests.unit.sim.llama_configs import LLAMA_2_7B, LLAMA_3_70B, LLAMA_3_405B, config_folder
from tests.unit.sim.made import plan_of

GIB = 2**30
HERE = Device(
    name=THIS,
    about="this machine",
    memory_bytes=None,
    gb_per_s=20.0,
    peak_gflops={"f32": 100.0},
    is_gpu=False,
    isa=_native.isa(),
)


def _planner(
    folder: Path, config: dict[str, Any], device: str = "h100", **settings: Any
) -> Planner:
    return Planner({"model": config_folder(folder / "m", config), **settings}, find_device(device))


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(50, 4), (100, 7), (500, 32), (0, 0), (16, 1), (17, 2)]
)
def test_a_request_takes_whole_blocks(tokens: int, blocks: int) -> None:
    assert num_blocks_of(tokens, 16) == blocks


def test_a_growing_request_takes_a_block_every_16_tokens() -> None:
    taken = [num_blocks_of(tokens, 16) for tokens in range(50, 50 + 535 + 1)]
    assert (taken[0], taken[-1]) == (4, 37)
    assert sorted(set(taken)) == list(range(4, 38))


@pytest.mark.parametrize(
    ("config", "settings", "token_bytes"),
    [
        (LLAMA_2_7B, {"dtype": "bf16"}, 524_288),
        (LLAMA_2_7B, {}, 2 * 524_288),  # float16 is computed in float32
        (LLAMA_3_70B, {}, 327_680),
        (LLAMA_3_405B, {}, 516_096),
        (LLAMA_3_70B, {"kv_cache_dtype": "int8"}, 2 * 80 * 8 * (128 + 4)),
    ],
)
def test_bytes_of_a_token(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], token_bytes: int
) -> None:
    assert _planner(tmp_path, config, **settings).size().needs.token_bytes == token_bytes


@pytest.mark.parametrize(
    ("memory", "blocks", "of_1k", "of_8k"), [("8GB", 1525, 23, 2), ("8GiB", 1638, 25, 3)]
)
def test_eight_gigabytes_of_keys_and_values_of_a_70b(
    tmp_path: Path, memory: str, blocks: int, of_1k: int, of_8k: int
) -> None:
    planner = _planner(tmp_path, LLAMA_3_70B, quantization="int8", kv_cache_memory_bytes=memory)
    sized = planner.size()
    assert sized.plan is not None
    assert sized.plan.num_blocks == blocks
    assert sized.max_context == 16 * blocks  # 24,400 and 26,208: about 25,000 tokens
    assert sized.requests_at_once(1024) == of_1k
    assert sized.requests_at_once(8192) == of_8k


def test_three_requests_of_8000_tokens_fit_in_8_gb(tmp_path: Path) -> None:
    settings = {"quantization": "int8", "kv_cache_memory_bytes": "8GB"}
    assert _planner(tmp_path, LLAMA_3_70B, **settings).size().requests_at_once(8000) == 3


def test_128k_tokens_of_a_70b_take_40_gib(tmp_path: Path) -> None:
    asked = {"quantization": "int4", "max_model_len": 131072, "kv_cache_memory_bytes": 40 * GIB}
    sized = _planner(tmp_path, LLAMA_3_70B, "h200", **asked).size()
    assert sized.plan is not None
    assert (sized.plan.kv_bytes, sized.plan.num_blocks) == (40 * GIB, 8192)
    assert sized.requests_at_once(131072) == 1


def test_a_70b_needs_int8_or_less_on_one_80_gb_card(tmp_path: Path) -> None:
    for device in ("h100", "a100-80gb"):
        outcome = plan_outcome(_planner(tmp_path, LLAMA_3_70B, device))
        assert not outcome["fits"]
        fits = {change["flags"]: change["fits"] for change in outcome["changes"]}
        assert fits == {
            "--kv-cache-dtype int8": False,
            "--quantization int8": True,
            "--quantization int8 --kv-cache-dtype int8": True,
            "--quantization int4": True,
            "--quantization int4 --kv-cache-dtype int8": True,
        }
        assert outcome["tensor_parallel"]["degree"] == 2
        assert "(--executor torch --tensor-parallel-size" in plan_text(outcome)
    assert plan_outcome(_planner(tmp_path, LLAMA_3_70B, quantization="int8"))["fits"]


def test_a_70b_in_int8_decodes_about_48_tokens_a_second_on_an_h100(tmp_path: Path) -> None:
    planner = _planner(tmp_path, LLAMA_3_70B, quantization="int8")
    sized = planner.size()
    assert round(planner.decode_tokens_per_s(sized, 128)) == 48
    assert round(planner.decode_tokens_per_s(sized, 1024)) == 48
    # Half as many bits are twice as fast, as far as weights are all that is read.
    int4 = planner.size(quantization="int4")
    assert (
        1.7 < planner.decode_tokens_per_s(int4, 128) / planner.decode_tokens_per_s(sized, 128) < 2
    )


def test_a_70b_runs_with_weights_on_disk_from_a_batch_on(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", LLAMA_3_70B)
    outcome = plan_outcome(Planner({"model": folder}, HERE, memory_bytes=64 * GIB))
    offload = outcome["disk_offload"]
    kept_bytes = outcome["weights_bytes"] - offload["streamed_bytes"] + offload["window_bytes"]
    assert outcome["weights_bytes"] > 64 * GIB > kept_bytes > 30 * GIB
    assert offload["gib"] * GIB >= offload["streamed_bytes"]
    slow, *_, fast = offload["rates"]
    assert slow["batch"] > fast["batch"]
    assert slow["tokens_per_s"] < fast["tokens_per_s"]
    for rate in offload["rates"]:
        disk_s = offload["streamed_bytes"] / rate["disk_gb_per_s"] / 1e9
        assert rate["tokens_per_s"] <= 1 / disk_s
        assert rate["batch_tokens_per_s"] <= rate["batch"] / disk_s
    assert f"--disk-offload-gb {offload['gib']:g}" in plan_text(outcome)
    # Not where even the embedding and the head are too large, nor on GPUs.
    assert plan_outcome(Planner({"model": folder}, HERE, memory_bytes=GIB))["disk_offload"] is None
    assert plan_outcome(_planner(tmp_path, LLAMA_3_70B))["disk_offload"] is None


def test_ranks_of_a_machine_read_their_shares_from_its_disk(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "m", LLAMA_3_70B)
    one = plan_outcome(Planner({"model": folder}, HERE, memory_bytes=64 * GIB))["disk_offload"]
    assert one["streamed_bytes_of_rank"] is None
    for layout in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        outcome = plan_outcome(Planner({"model": folder, layout: 2}, HERE, memory_bytes=64 * GIB))
        offload = outcome["disk_offload"]
        kept_bytes = outcome["weights_bytes"] - offload["streamed_bytes"] + offload["window_bytes"]
        assert 30 * GIB < kept_bytes < 64 * GIB
        assert sum(offload["streamed_bytes_of_rank"]) == offload["streamed_bytes"]
        assert abs(offload["streamed_bytes"] / one["streamed_bytes"] - 1) < 0.02, "no weight twice"
        first, second = offload["streamed_bytes_of_rank"]
        assert abs(first / second - 1) < 0.1
        # Each micro-batch of stages reads all weights.
        groups = 2 if layout == "pipeline_parallel_size" else 1
        for rate in offload["rates"]:
            disk_s = offload["streamed_bytes"] / rate["disk_gb_per_s"] / 1e9
            assert rate["tokens_per_s"] <= 1 / disk_s
            assert rate["batch_tokens_per_s"] <= rate["batch"] / (groups * disk_s)
        text = plan_text(outcome)
        assert f"--disk-offload-gb {offload['gib']:g}" in text
        assert f"Rank by rank: {first / 1e9:.3g} GB, {second / 1e9:.3g} GB." in text


def test_ranks_with_a_machine_each_read_from_a_disk_each(tmp_path: Path) -> None:
    folder, device = config_folder(tmp_path / "m", LLAMA_3_70B), find_device("epyc-9654")
    for layout in ("tensor_parallel_size", "pipeline_parallel_size"):
        outcome = plan_outcome(Planner({"model": folder, layout: 2}, device, memory_bytes=48 * GIB))
        offload = outcome["disk_offload"]
        first, second = offload["streamed_bytes_of_rank"]
        assert outcome["weights_bytes"] > 48 * GIB > outcome["weights_bytes"] - max(first, second)
        for rate in offload["rates"]:
            disk_s = max(first, second) / rate["disk_gb_per_s"] / 1e9
            assert rate["batch_tokens_per_s"] <= rate["batch"] / disk_s
            assert rate["batch_tokens_per_s"] > rate["tokens_per_s"]


def test_a_70b_runs_on_a_gpu_with_weights_in_host_memory(tmp_path: Path) -> None:
    planner = _planner(tmp_path, LLAMA_3_70B)
    outcome = plan_outcome(planner)
    offload = outcome["cpu_offload"]
    assert outcome["weights_bytes"] > outcome["available_bytes"]
    assert outcome["weights_bytes"] - offload["saved_bytes"] < outcome["available_bytes"]
    assert offload["host_bytes"] > offload["saved_bytes"] >= offload["gib"] * GIB - 1
    slow, *_, fast = offload["rates"]
    assert slow["batch"] > fast["batch"]
    for rate in offload["rates"]:
        copied_s = offload["host_bytes"] / rate["bus_gb_per_s"] / 1e9
        assert rate["tokens_per_s"] <= 1 / copied_s
        assert rate["batch_tokens_per_s"] <= rate["batch"] / copied_s
    text = plan_text(outcome)
    assert f"--cpu-offload-gb {offload['gib']:g}: " in text
    assert (slow["batch"], "over 4,096" in text) == (4096, True)
    # Of more ranks each lacks less.
    few = plan_outcome(_planner(tmp_path, LLAMA_3_405B, tensor_parallel_size=4))["cpu_offload"]
    many = plan_outcome(_planner(tmp_path, LLAMA_3_405B, tensor_parallel_size=8))["cpu_offload"]
    assert few["gib"] > many["gib"] > 0
    assert few["host_bytes"] > many["host_bytes"]
    # Stages copy at once, each over the bus of its GPU, for each of as many groups of requests.
    stages = plan_outcome(_planner(tmp_path, LLAMA_3_405B, pipeline_parallel_size=8))["cpu_offload"]
    assert stages["gib"] > 0
    for rate in stages["rates"]:
        copied_s = stages["host_bytes"] / rate["bus_gb_per_s"] / 1e9
        assert 1 / (8 * copied_s) <= rate["tokens_per_s"] <= 1 / (7 * copied_s)
        assert rate["batch_tokens_per_s"] <= rate["batch"] / (8 * copied_s)
    _planner(tmp_path, LLAMA_3_70B)
    # A draft model is beside it, on the GPU.
    size = {"vocab_size": LLAMA_3_70B["vocab_size"], "num_hidden_layers": 1}
    draft = str(write_tiny_llama(tmp_path / "draft", seed=1, **size))
    drafted = _planner(tmp_path, LLAMA_3_70B, speculate="draft", draft_model=draft)
    assert plan_outcome(drafted)["cpu_offload"]["gib"] > offload["gib"]
    # Not where even all layers save too little, where the first layers draft, nor on CPUs.
    tiny = Planner({"model": tmp_path / "m"}, planner.device, memory_bytes=5 * GIB)
    assert plan_outcome(tiny)["cpu_offload"] is None
    drafting = plan_outcome(_planner(tmp_path, LLAMA_3_70B, speculate="self"))
    assert drafting["cpu_offload"] is None
    assert drafting["problem"]
    on_cpu = Planner({"model": tmp_path / "m"}, HERE, memory_bytes=64 * GIB)
    assert plan_outcome(on_cpu)["cpu_offload"] is None


def test_a_405b_needs_more_devices_the_more_bits_it_has(tmp_path: Path) -> None:
    degrees = {
        quantization: plan_outcome(_planner(tmp_path, LLAMA_3_405B, quantization=quantization))[
            "tensor_parallel"
        ]["degree"]
        for quantization in ("none", "int8", "int4")
    }
    assert degrees == {"none": 16, "int8": 8, "int4": 4}


def test_a_device_of_several_holds_its_share_of_weights_and_heads(tmp_path: Path) -> None:
    sized = _planner(tmp_path, LLAMA_3_70B).size()
    halves = sharded_needs(sized, 2)
    whole = sized.needs.weights_bytes
    assert halves.token_bytes == 163_840
    vectors = whole - 2 * (whole - halves.weights_bytes)
    assert 0 < vectors < 2**24  # only norms stay whole
    # Fewer heads than devices: each device holds one whole head.
    assert sharded_needs(sized, 16).token_bytes == sharded_needs(sized, 8).token_bytes == 40_960


def test_changes_make_what_was_asked_for_fit(tmp_path: Path) -> None:
    asked = {"quantization": "int8", "max_model_len": 8192, "max_num_seqs": 8}
    planner = _planner(tmp_path, LLAMA_3_70B, **asked)
    outcome = plan_outcome(planner)
    assert "8 requests of 8192 tokens need 4096 KV blocks (20480.0 MiB)" in outcome["problem"]
    changes = {next(iter(change["settings"])): change for change in outcome["changes"]}
    assert changes["max_num_seqs"]["settings"] == {"max_num_seqs": 4}
    shorter = changes["max_model_len"]["settings"]["max_model_len"]
    assert 4096 < shorter < 8192
    assert all(change["fits"] for change in outcome["changes"])
    # No larger value fits.
    assert planner.size(max_num_seqs=5).problem
    assert planner.size(max_model_len=shorter + 16).problem


def test_a_plan_is_that_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MachineMemory(available_bytes=700 * 2**20, limit="free memory")
    monkeypatch.setattr("quire.execute.native_limits.machine_memory", lambda: memory)
    monkeypatch.setattr("quire.sim.plan.machine_memory", lambda: memory)
    tiny = str(write_tiny_llama(tmp_path / "tiny", seed=1))
    cases: list[dict[str, Any]] = [
        {"model": ""},
        {"model": "", "max_num_seqs": 3, "kv_cache_dtype": "int8", "quantization": "int8"},
        {"model": tiny},
        {
            "model": tiny,
            "max_model_len": 100,
            "max_num_batched_tokens": 40,
            "max_num_seqs": 9,
            "block_size": 8,
        },
    ]
    for settings in cases:
        engine = assemble(engine_config({**settings, "threads": 1}), clock=Clock(), report=_never)
        with closing(engine.core.runner):
            sized = Planner(settings, HERE).size()
            assert sized.plan is not None
            assert "\n".join(engine.notes) == sized.plan.text()
            assert engine.step_tokens == sized.step_tokens
            assert engine.card.num_blocks == sized.plan.num_blocks
            assert engine.card.max_model_len == sized.max_context


def test_speeds_are_those_of_the_simulators_roofline() -> None:
    planner = Planner({"model": ""}, replace(HERE, peak_gflops={"bf16": 300.0}))
    sized = planner.size()
    cost = RooflineCost(sized.program, gb_per_s=20.0, gflop_per_s=300.0, fixed_ms=0.0)
    for rows in (((99, 1),), ((30, 1), (30, 1)), ((0, 64),), ((64, 32), (5, 1))):
        starts, counts = [start for start, _ in rows], [count for _, count in rows]
        expected_s = cost.step_ms(plan_of(*rows)) / 1e3
        assert planner.step_s(sized.program, counts, starts) == pytest.approx(expected_s)
    chunks_s = [
        planner.step_s(sized.program, [n], [at]) for n, at in ((128, 0), (128, 128), (44, 256))
    ]
    assert planner.prefill_s(sized, 300) == pytest.approx(sum(chunks_s))


def test_every_device_of_the_table_plans_a_small_model(tmp_path: Path) -> None:
    for device in DEVICES:
        outcome = plan_outcome(Planner({"model": ""}, device, memory_bytes=8 * 10**9))
        assert outcome["fits"]
        at = outcome["lengths"][-1]
        assert (at["tokens"], at["blocks"], at["requests"]) == (512, 32, 64)
        assert at["total_decode_tokens_per_s"] > at["decode_tokens_per_s"] > 0


def test_a_gguf_file_is_planned_from_its_header(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "ck")
    path = write_gguf_of(folder, tmp_path / "m.gguf")
    needs = [Planner({"model": str(one)}, HERE).size().needs for one in (folder, path)]
    assert needs[0] == needs[1]


def test_products_of_a_cpu_are_counted_in_their_own_precision() -> None:
    xeon = find_device("xeon-8480")
    assert xeon.about == "Intel Xeon Platinum 8480+, one socket, 56 cores at 2 GHz"
    assert xeon.gflop_per_s("int8") == 2 * xeon.gflop_per_s("bf16") == 56 * 2.0 * 2048
    milan = find_device("epyc-7763")
    assert milan.gflop_per_s("int4") == milan.gflop_per_s("int8") == 2 * milan.gflop_per_s("f32")


def test_float16_is_said_to_be_computed_in_float32(tmp_path: Path) -> None:
    notes = plan_outcome(_planner(tmp_path, LLAMA_2_7B))["notes"]
    assert any("--dtype bfloat16 halves" in note for note in notes)
    bf16 = plan_outcome(_planner(tmp_path, LLAMA_2_7B, dtype="bf16"))["notes"]
    assert not any("--dtype" in note for note in bf16)


def test_what_a_device_cannot_compute_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="A100 SXM, 80 GB cannot compute with"):
        _planner(tmp_path, LLAMA_3_70B, "a100-80gb", quantization="fp8").size()
    assert _planner(tmp_path, LLAMA_3_70B, "h100", quantization="fp8").size().plan is not None
    tied = LLAMA_3_70B | {"tie_word_embeddings": True}
    with pytest.raises(ModelError, match="not gathered from on a GPU"):
        _planner(tmp_path, tied, "h100", quantization="int4", head_precision="int4").size()
    with pytest.raises(SettingError, match=r"xeon-8480 .* give --memory"):
        _planner(tmp_path, LLAMA_3_70B, "xeon-8480")


@each_case(
    ("name", "found"),
    [
        *((device.name, device.name) for device in DEVICES),
        ("H100", "h100"),
        ("RTX 4090", "rtx-4090"),
        ("nvidia GeForce RTX-3090", "rtx-3090"),
        ("4090", "rtx-4090"),
        ("A100 80GB", "a100-80gb"),
        ("a100 40 GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("h100-sxm", "h100"),
        ("H100 80GB", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100_sxm5", "h100"),
        ("NVIDIA H200", "h200"),
        ("rtx4090", "rtx-4090"),
        ("RTX 4090 24GB", "rtx-4090"),
        ("L40S-48GB", "l40s"),
        ("NVIDIA L4 Tensor Core GPU", "l4"),
        ("Xeon Platinum 8480+", "xeon-8480"),
        ("AMD EPYC 9654", "epyc-9654"),
        ("epyc7763", "epyc-7763"),
    ],
)
def test_devices_are_found_by_their_usual_names(name: str, found: str) -> None:
    assert find_device(name).name == found


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h10", "h100"),
        ("a100", "a100-40gb or a100-80gb"),
        ("A100 PCIe", "a100-40gb or a100-80gb"),
        ("h100 96GB", "h100"),
        ("H100 PCIe", "h100"),
        ("rtx-4080", "rtx-4090"),
        ("rtx 4090 laptop", "rtx-4090"),
    ],
)
def test_unknown_devices_name_the_nearest_and_all(name: str, near: str) -> None:
    with pytest.raises(SettingError, match=f"did you mean [^?]*{near}[^?]*\\?.*epyc-7763"):
        find_device(name)
    with pytest.raises(SettingError, match="table; known: this "):
        find_device("???")


def _never(what: str, **fields: Any) -> None:
    raise AssertionError(f"{what}: {fields}")
