"""Ranks and layouts in plans and simulations: bytes by hand, links, what is recommended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.config.memory import EXCHANGE
from quire.engine.assembly.sizing import step_limits
from quire.execute.gpu.limits import NCCL_BYTES
from quire.execute.native import NativeExecutor
from quire.program.cost import StepShape
from quire.program.expert_parallel import ExpertPlan
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.ranks.executor_class import RankedExecutorClass
from quire.sim.hardware import DEVICES, Device, find_device
from quire.sim.layouts import Layout, LayoutPlanner, layouts_outcome, recommended
from quire.sim.links import Links, links_of
from quire.sim.machine import described_machine
from quire.sim.plan import Planner
from quire.sim.plan_report import plan_outcome, plan_text
from tests.cases import each_case
from tests.models.cases_experts import MIXTRAL
from tests.tiny_models import write_tiny
from tests.unit.sim.llama_configs import LLAMA_3_70B, config_folder
from tests.unit.sim.made import plan_of
from tests.unit.sim.test_plan import HERE

LINKS = Links(
    about="made up",
    per_node=4,
    node_gb_per_s=400.0,
    network_gb_per_s=10.0,
    exchange_us=10.0,
    message_us=20.0,
)


def planner(folder: Path, links: Links = LINKS, **settings: Any) -> Planner:
    """Return a planner for contexts of 16,384 tokens: prompts of 131,072 take 64 steps to count."""
    sizes = {"model": config_folder(folder / "m", LLAMA_3_70B), "max_model_len": 16_384}
    return Planner(sizes | settings, find_device("h100"), links=links)


def layouts(one: Planner, num_devices: int, *, requests: int = 64) -> LayoutPlanner:
    return LayoutPlanner(
        one, one.size(), one.links, num_devices=num_devices, num_tokens=1024, requests=requests
    )


def mixtral(folder: Path) -> Path:
    sizes = {"vocab_size": 300, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny(folder, MIXTRAL | sizes | heads, seed=1)


def test_a_plan_of_ranks_is_that_of_the_largest_rank(tmp_path: Path) -> None:
    one = planner(tmp_path, tensor_parallel_size=4)
    sized, whole = one.size(), one.size(tensor_parallel_size=None)
    shares = [shard(whole.program, degree=4, rank=rank) for rank in range(4)]
    assert sized.needs.weights_bytes == max(share.weight_bytes for share in shares)
    assert sized.needs.token_bytes == whole.needs.token_bytes // 4
    assert not sized.problem
    assert whole.problem
    outcome = plan_outcome(one)
    token = StepShape([1], [1023])
    assert outcome["ranks"]["of_rank"][1] == {
        "weights_bytes": shares[1].weight_bytes,
        "kv_bytes_per_token": sized.needs.token_bytes,
        "received_bytes_per_token": shares[1].step_cost(token).comm_bytes,
        "received_bytes_per_step": shares[1].step_cost(StepShape([2048], [0])).comm_bytes,
    }
    assert outcome["ranks"]["exchanges_per_step"] == 4 * 80 + 2
    assert "Computed: 322 exchanges a step" in plan_text(outcome)
    # A step takes as long as the rank's bytes, those it receives, and its exchanges.
    slower = planner(tmp_path, replace(LINKS, exchange_us=1000.0), tensor_parallel_size=4)
    step = ([1], [1023])
    (slow_s,), (fast_s,) = (
        slower.stage_times_s(slower.size(), *step),
        one.stage_times_s(sized, *step),
    )
    added_s = slow_s - fast_s
    assert added_s == pytest.approx(322 * 990e-6)


def test_a_plan_of_ranks_on_this_machine_is_the_sum_that_an_engine_counts(tmp_path: Path) -> None:
    settings = {
        **{"model": str(mixtral(tmp_path)), "tensor_parallel_size": 2, "max_num_seqs": 4},
        **{"enable_expert_parallel": True, "kv_cache_memory_bytes": 2**20},
    }
    one = Planner(settings, HERE)
    sized = one.size()
    limits = step_limits(sized.config, NativeExecutor)
    counted = RankedExecutorClass(degree=2, experts=ExpertPlan()).memory_for(sized.program, limits)
    needs = sized.needs
    assert (needs.weights_bytes, needs.step_bytes, needs.token_bytes) == (
        counted.weights_bytes,
        counted.step_bytes,
        counted.token_bytes,
    )


def test_layouts_keep_tensor_parallelism_in_a_node(tmp_path: Path) -> None:
    plans = layouts(planner(tmp_path), 16).plans()
    assert max(plan.layout.tensor for plan in plans) == 4
    assert {plan.layout.devices for plan in plans} == {1, 2, 4, 8, 16}
    by_layout = {plan.layout: plan for plan in plans}
    whole = by_layout[Layout(1)]
    assert whole.problem
    assert whole.speedup_of_one == 1
    four = by_layout[Layout(4)]
    assert 2 < four.speedup_of_one < 4
    assert four.received_bytes > 0
    stages = by_layout[Layout(1, 4)]
    assert stages.speedup_of_one < 1  # a token passes all stages
    assert stages.received_bytes == 3 * 4 * 8192  # of the residual stream, in f32
    assert by_layout[Layout(4, 4)].needs.token_bytes == four.needs.token_bytes // 4
    assert 0 < four.efficiency < 1


def test_slow_links_are_left_to_pipeline_stages(tmp_path: Path) -> None:
    fast = layouts(planner(tmp_path), 4)
    chosen = recommended(fast.plans(), 4)
    assert chosen is not None
    assert chosen.layout.tensor > 1
    slow = layouts(planner(tmp_path, replace(LINKS, node_gb_per_s=0.05, exchange_us=500.0)), 4)
    chosen = recommended(slow.plans(), 4)
    assert chosen is not None
    assert (chosen.layout.tensor, chosen.layout.stages) == (1, 2)


def test_a_recommendation_names_its_reasons(tmp_path: Path) -> None:
    outcome = plan_outcome(planner(tmp_path), num_devices=8)
    found = outcome["layouts"]
    assert found["recommended"].startswith("TP 4")
    text = plan_text(outcome)
    for words in ("Computed, not measured", "stays in a node", "40x the rate", "replicas of"):
        assert words in " ".join(text.split()), words
    small = plan_outcome(planner(tmp_path, replace(LINKS, per_node=1)), num_devices=1)
    assert small["layouts"]["recommended"] is None
    assert "No layout of so many devices holds the model." in plan_text(small)


def test_whole_experts_are_a_layout_of_mixtures_only(tmp_path: Path) -> None:
    xeon = find_device("xeon-8480")
    model = {"model": str(mixtral(tmp_path))}
    one = Planner(model, xeon, memory_bytes=10**9, links=LINKS)
    plans = LayoutPlanner(one, one.size(), LINKS, num_devices=4, num_tokens=8, requests=4).plans()
    experts = [plan.layout for plan in plans if plan.layout.experts]
    assert {layout.tensor for layout in experts} == {2, 4}
    assert str(experts[0]) == "TP 2 + EP"
    assert not any(plan.layout.experts for plan in layouts(planner(tmp_path), 2).plans())


def long_plans(folder: Path, kv_heads: int, num_tokens: int, **more: Any) -> LayoutPlanner:
    """Return layouts of requests of one length on four sockets of 400 GB."""
    model = LLAMA_3_70B | {"num_key_value_heads": kv_heads}
    one = Planner(
        {"model": config_folder(folder, model), "max_model_len": num_tokens, **more},
        find_device("xeon-8480"),
        memory_bytes=400 * 10**9,
        links=LINKS,
    )
    return LayoutPlanner(one, one.size(), LINKS, num_devices=4, num_tokens=num_tokens, requests=64)


def test_positions_are_divided_where_heads_would_be_copied(tmp_path: Path) -> None:
    """With one KV head, ranks that divide heads have it all, and hold fewer requests."""
    found = long_plans(tmp_path / "one", 1, 131_072)
    plans = {plan.layout: plan for plan in found.plans()}
    whole, heads, divided = (plans[Layout(1)], plans[Layout(4)], plans[Layout(1, context=4)])
    assert heads.needs.token_bytes == whole.needs.token_bytes
    assert divided.needs.token_bytes == whole.needs.token_bytes // 4
    assert divided.requests > heads.requests
    assert divided.prefill_s < whole.prefill_s / 2
    outcome = layouts_outcome(found)
    assert "CP" in outcome["recommended"]
    (why,) = (reason for reason in outcome["reasons"] if "positions are divided" in reason)
    assert f"{divided.needs.token_bytes:,} B of KV cache" in why
    rows = {row["layout"]: row for row in outcome["layouts"]}
    assert rows["CP 4"]["context_parallel_size"] == 4
    assert rows["CP 4"]["requests_at_once"] == divided.requests


def test_positions_are_not_divided_where_heads_divide_or_requests_are_short(
    tmp_path: Path,
) -> None:
    found = long_plans(tmp_path / "eight", 8, 131_072)
    outcome = layouts_outcome(found)
    assert "CP" not in outcome["recommended"]
    assert any("positions are not divided" in reason for reason in outcome["reasons"])
    short = long_plans(tmp_path / "short", 1, 8_191)
    assert not any(plan.layout.context > 1 for plan in short.plans())
    at_edge = long_plans(tmp_path / "edge", 1, 8_192)
    assert {plan.layout.context for plan in at_edge.plans()} == {1, 2}
    fast = long_plans(tmp_path / "fast", 1, 16_384)
    fast._mode = TpMode.FAST
    assert not any(plan.layout.context > 1 for plan in fast.plans())


def test_the_time_of_a_prompt_is_that_of_its_steps(tmp_path: Path) -> None:
    one = planner(tmp_path)
    sized = one.size(tensor_parallel_size=4)
    found = LayoutPlanner(one, one.size(), one.links, num_devices=4, num_tokens=16_384, requests=1)
    by_layout = {plan.layout: plan for plan in found.plans()}
    # Without the head, and by three of the steps.
    assert by_layout[Layout(4)].prefill_s == pytest.approx(one.prefill_s(sized, 16_384), rel=0.03)


@pytest.mark.parametrize(
    ("degree", "exact", "fast"), [(2, 4_276_224, 2_637_824), (8, 7_483_392, 4_616_192)]
)
def test_the_bytes_of_both_modes_are_those_of_the_page(
    tmp_path: Path, degree: int, exact: int, fast: int
) -> None:
    program = planner(tmp_path).size().program
    token = StepShape([1], [511])
    for mode, received in ((TpMode.EXACT, exact), (TpMode.FAST, fast)):
        own = shard(program, degree=degree, rank=0, mode=mode)
        assert own.segment_cost("trunk", token).comm_bytes == received
        page = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()
        assert f" {round(received / 1e3):,} kB |" in page


def test_gpus_that_gather_columns_keep_memory_for_nccl(tmp_path: Path) -> None:
    # A receiving rank's buffers of LL, LL128 and simple, and a sender's head, in units of 2 MiB.
    received = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
    unit = 2 << 20
    assert 32 * (-(-received // unit) + 1) * unit == NCCL_BYTES
    ranked = planner(tmp_path, tensor_parallel_size=4)
    sized = ranked.size()
    assert sized.needs.exchange_bytes == NCCL_BYTES
    assert sized.plan is not None
    assert f"{EXCHANGE}  " in sized.plan.text()
    assert ranked.size(tensor_parallel_size=None).needs.exchange_bytes == 0
    stages = ranked.size(tensor_parallel_size=None, pipeline_parallel_size=4)
    assert stages.needs.exchange_bytes == 0, "rows go through host memory"
    sockets = Planner(
        {"model": config_folder(tmp_path / "n", LLAMA_3_70B), "tensor_parallel_size": 2},
        find_device("xeon-8480"),
        memory_bytes=10**12,
    )
    assert sockets.size().needs.exchange_bytes == 0
    small = Planner(
        {"model": config_folder(tmp_path / "o", LLAMA_3_70B), "tensor_parallel_size": 8},
        find_device("h100"),
        memory_bytes=20 * 10**9,
    )
    assert f"384.0 MiB {EXCHANGE}, " in small.size().problem


def test_stages_are_recommended_where_nodes_are_too_small(tmp_path: Path) -> None:
    """Nodes of one device each: the model needs two."""
    apart = planner(tmp_path, replace(LINKS, per_node=1))
    assert layouts_outcome(layouts(apart, 2))["recommended"] == "PP 2"


@each_case("device", DEVICES, ids=lambda device: device.name)
def test_every_device_has_links(device: Device) -> None:
    links = links_of(device)
    assert links.per_node >= 2
    assert links.node_gb_per_s > links.network_gb_per_s > 0


def test_wrong_links_and_numbers_of_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--link-gb-per-s is -1\.0; it must be above 0"):
        LINKS.with_rates(node_gb_per_s=-1.0)
    assert LINKS.with_rates() is LINKS
    assert LINKS.with_rates(per_node=2).per_node == 2
    with pytest.raises(SettingError, match="--devices is 2000; 1 to 1024"):
        layouts(planner(tmp_path), 2000)


def test_ranks_share_a_described_machine(tmp_path: Path) -> None:
    model = str(mixtral(tmp_path))
    rates: dict[str, Any] = {"gb_per_s": 10.0, "gflop_per_s": 100.0, "fixed_ms": 0.5}
    links = {"link_gb_per_s": 2.0, "exchange_us": 100.0}
    one = described_machine(engine_config({"model": model}), **rates)
    ranked = {"model": model, "tensor_parallel_size": 2}
    two = described_machine(engine_config(ranked), **rates, **links)
    experts = engine_config(ranked | {"enable_expert_parallel": True})
    distributed = described_machine(experts, **rates, **links)
    plan = plan_of((20, 1), (30, 1), (0, 16))
    waited_ms = 0.1 * (2 * 4 + 1)
    assert one.cost.step_ms(plan) + waited_ms < two.cost.step_ms(plan)
    assert two.cost.step_ms(plan) != distributed.cost.step_ms(plan)
    assert two.token_bytes == one.token_bytes
    assert two.about["ranks"] == 2
    assert two.linear.fixed_ms > one.linear.fixed_ms
    with pytest.raises(SettingError, match="link_gb_per_s is 0; it must be above 0"):
        described_machine(engine_config(ranked), **rates, link_gb_per_s=0)


def test_a_plan_of_stages_passes_them_one_after_the_other(tmp_path: Path) -> None:
    one = planner(tmp_path, pipeline_parallel_size=2, tensor_parallel_size=4)
    sized = one.size()
    assert [len(stage) for stage in sized.stages] == [4, 4]
    assert sized.needs.weights_bytes == max(share.weight_bytes for share in sized.shares)
    early, late = one.stage_times_s(sized, [1], [1023])
    assert one.decode_tokens_per_s(sized, 1024) == pytest.approx(1 / (early + late))
    # Sixteen requests: two steps of eight rows in flight.
    times_s = one.stage_times_s(sized, [1] * 8, [1023] * 8)
    assert one.decode_tokens_per_s(sized, 1024, 16) == pytest.approx(16 / (2 * max(times_s)))
    chunks = [
        one.stage_times_s(sized, [sized.step_tokens], [at * sized.step_tokens]) for at in (0, 1)
    ]
    assert one.prefill_s(sized, 2 * sized.step_tokens) == pytest.approx(
        max(chunks[0]) + sum(chunks[1])
    )
    outcome = plan_outcome(one)
    assert outcome["ranks"]["pipeline_parallel_size"] == 2
    assert len(outcome["ranks"]["of_rank"]) == 8


def test_a_plan_of_positions_divides_the_cache(tmp_path: Path) -> None:
    whole = planner(tmp_path).size()
    one = planner(tmp_path, context_parallel_size=4)
    sized = one.size()
    assert sized.needs.token_bytes == whole.needs.token_bytes // 4
    assert sized.needs.block_size == 4 * 256
    outcome = plan_outcome(one)
    ranks = outcome["ranks"]
    assert (ranks["tensor_parallel_size"], ranks["context_parallel_size"]) == (1, 4)
    step = StepShape([1], [outcome["compared_tokens"] - 1])
    received = [share.step_cost(step).comm_bytes for share in sized.shares]
    assert [of_rank["received_bytes_per_token"] for of_rank in ranks["of_rank"]] == received
