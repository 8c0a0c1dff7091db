"""Table lines of docs/measured.md, from the results under bench/results/.

Reads the results and knows no page. Always holds: the numbers of a line come from one result file,
and a result without a file has no line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench.measured.fleet_rows import (
    batch_rows,
    disaggregation_rows,
    disk_rows,
    fleet_rows,
    ranks_rows,
    ray_rows,
    router_rows,
    shared_store_rows,
    simulated_store_rows,
)
from bench.measured.service_rows import (
    forecast_rows,
    piece_rows,
    policy_rows,
    soak_rows,
    structured_rows,
)
from bench.measured.speculation_rows import draft_head_rows, speculation_rows
from quire.bench.machine import is_loaded


def start_text(result: dict[str, Any]) -> list[str]:
    """Return the README's lines on start-up time and installed size."""
    starts = {start["model"]: start["first_token_s"] for start in result["starts"]}
    loaded = "; upper bounds" if is_loaded(result["machine"]) else ""
    lines = [
        "* Process start to first streamed token: "
        f"{starts['box']:.2f} s (built-in model), {starts['qwen3-0.6b']:.2f} s (0.6B bf16){loaded}"
    ]
    if "installed_mb" in result:
        lines.append(f"* Installed with all dependencies: {result['installed_mb']:.0f} MB")
    return lines


def _startup_rows(result: dict[str, Any]) -> list[str]:
    starts = {start["model"]: start for start in result["starts"]}
    cases = {
        "built-in model": ("box",),
        "0.6B bf16, random weights, page cache; with `--pack-cache`": (
            "qwen3-0.6b",
            "qwen3-0.6b, packed before",
        ),
    }

    def seconds(names: Sequence[str], key: str, digits: int) -> str:
        return "; ".join(f"{starts[name][key]:.{digits}f} s" for name in names)

    rows = [
        f"| process start to first streamed token, {what} | "
        f"{seconds(names, 'first_token_s', 2)} | {seconds(names, 'goal_first_token_s', 1)} |"
        for what, names in cases.items()
    ]
    if "installed_mb" in result:
        rows.append(
            f"| installed, with all dependencies and bytecode | {result['installed_mb']:.0f} MB | "
            f"{result['goal_installed_mb']} MB |"
        )
    if wake := result.get("wake"):
        rows.append(
            "| first token of a sleeping 0.6B model, mapped from its pack cache | "
            f"{wake['first_token_s']:.2f} s | {wake['goal_first_token_s']:.1f} s |"
        )
        if soon_s := wake.get("after_short_sleep_s"):
            rows.append(
                "| the same right after it fell asleep, without a process that waits | "
                f"{soon_s:.2f} s | {wake['goal_first_token_s']:.1f} s |"
            )
    return rows


def _scheduler_rows(result: dict[str, Any]) -> list[str]:
    goals = {256: "50 us", 1024: "100 us"}
    return [
        f"| schedule + update, {case['running']} running, p50 | {case['p50_us']:.0f} us | "
        f"{goals[case['running']]} |"
        for case in result["steady"]
        if case["running"] in goals
    ]


def _frontend_rows(result: dict[str, Any]) -> list[str]:
    """Return the CPU time of server and engine, beside an empty app on the same HTTP server."""
    flat, paced, asked = (result[part] for part in ("flat_out", "paced", "requests"))
    return [
        f"| front end, {result['streams']} streams, a model that takes no time: CPU time per "
        f"streamed token at full speed, at {1000 / paced['step_ms']:.0f} steps/s; per request | "
        f"{flat['quire']['us_per_token']:.0f} us, {paced['quire']['us_per_token']:.0f} us, "
        f"{asked['quire']['us_per_request']:.0f} us (empty app: "
        f"{flat['floor']['us_per_token']:.0f}, {paced['floor']['us_per_token']:.0f}, "
        f"{asked['floor']['us_per_request']:.0f}){_beside(result)} | "
        f"{result['goal_token_us']:.0f} us, {result['goal_request_us']:.0f} us |"
    ]


def _beside(result: dict[str, Any]) -> str:
    """Return CPU time per streamed token and per request of servers with a real model."""
    shown = [
        f"{name} {found['streamed']['us_per_token']:.0f}, "
        f"{found['requests']['us_per_request']:.0f} us"
        for name, found in result.get("with_a_model", {}).items()
        if isinstance(found, dict) and "streamed" in found
    ]
    return f"; with the built-in model, compute included: {'; '.join(shown)}" if shown else ""


def _memory_rows(result: dict[str, Any]) -> list[str]:
    cost = max(case["paged_cost_percent"] for case in result["paged_attention"])
    return [
        f"| share of allocated KV that holds tokens, mixed lengths | "
        f"{result['kv_share_percent']:.1f} % (reserving the maximum: "
        f"{result['kv_share_reserved_percent']:.0f} %) | 96 % |",
        f"| paged against contiguous attention, worst of block sizes 16, 32, 64 | "
        f"{cost:+.1f} % | 2 % |",
    ]


def _footprint_rows(result: dict[str, Any]) -> list[str]:
    """Return the memory of an engine process over its weights and KV cache."""
    return [
        f"| memory of the engine's process, {one['shape']} in {one['precision']}, KV for "
        f"{one['kv_tokens']:,} tokens, all used, over weights + KV "
        f"({one['planned_bytes'] / 1e6:,.0f} MB); mapped files not counted "
        f"| {one['ratio']:.2f}x; with the API's {one['server_ratio']:.2f}x | {one['goal']}x |"
        for one in result["footprints"]
    ]


def _sharing_rows(result: dict[str, Any]) -> list[str]:
    """Return what shared prefixes save and what looking them up costs."""
    most = max(case["ratio"] for case in result["sharing"])
    cost = max(result["microseconds"]["digests_and_match_us"].values())
    return [
        f"| 16 requests with 1,024 tokens in common: prompt tokens computed | "
        f"{100 * most:.1f} % of those without sharing | 12.5 % |",
        f"| hashing and matching a block of 16 tokens | {cost:.2f} us | 2 us |",
        *(
            f"| time with a prefix cache over without, where nothing is shared "
            f"({name.removesuffix('-bf16-seed0')}) | {one['on_over_off']:.3f}x | 1.01x |"
            for name, one in result["no_reuse"].items()
        ),
        *(_belady_row(replay) for replay in result["replay"]),
    ]


def _percent(size: dict[str, Any]) -> str:
    return f"{100 * size['share_of_footprint']:.0f}"


def _belady_row(replay: dict[str, Any]) -> str:
    """Return prefix hits beside those of the optimal policy (Belady) and of LRU."""
    sizes = replay["sizes"]
    shares = [size["of_belady"]["quire"] for size in sizes]
    below = [size for size in sizes if size["hits"]["quire"] < size["hits"]["lru"]]
    worst = ", ".join(
        f"{size['hits']['quire']:,} of {size['hits']['lru']:,} at {size['blocks']:,} blocks"
        for size in below
    )
    return (
        f"| prefix hits ({replay['trace']}, pools of {_percent(sizes[0])} to {_percent(sizes[-1])} "
        f"% of the distinct blocks): share of Belady's, "
        f"pool sizes with fewer hits than LRU | {min(shares):.2f} to {max(shares):.2f}; "
        f"{f'{len(below)} of {len(sizes)} ({worst})' if below else 'none'} | 0.95; none |"
    )


def _preemption_rows(result: dict[str, Any]) -> list[str]:
    kept, sooner = result["summary"]["w3"], result["summary"]["long"]
    return [
        f"| 16 requests at once, KV for 4 of them: throughput, all finished and exact | "
        f"{100 * kept['cut_of_uncut']:.0f} % of that with KV for all | 60 % |",
        f"| long conversations in turn, KV for 2.5 of 6: a disk tier over recomputation | "
        f"{sooner['tier_of_cut']:.2f}x | 1.2x |",
    ]


def _tier_rows(result: dict[str, Any]) -> list[str]:
    summary = result["summary"]
    return [
        f"| first token of a 4,096-token prefix after a restart, from the disk tier, {name} | "
        f"{summary[key]['times_sooner']:.1f}x faster than computing it | 5x |"
        for key, name in (("warm", "page cache warm"), ("dropped", "page cache dropped"))
    ]


def _interference_rows(result: dict[str, Any]) -> list[str]:
    """Return the effect of a long prompt on running answers, by shape and length."""
    return [
        f"| a prompt of {int(prompt):,} beside {beside} decoding ({shape}): p99 between their "
        f"tokens; time to its first token | {entry['p99_over_median_before']:.1f}x their median "
        f"before; {entry['ttft_over_alone']:.1f}x that alone | 2x, 3x |"
        for name, entry in result["summaries"].items()
        for shape, _, rest in (name.partition(", "),)
        for prompt, _, beside in (rest.partition(" beside "),)
    ]


def _scaling_rows(result: dict[str, Any]) -> list[str]:
    """Return the gain of a second thread and of continuous batching, and Python's share."""
    median = result["batching"]["median"]
    rates = {mode: float(median[mode]["total_tokens_per_s"]) for mode in median}
    return [
        "| a prompt of 2,048 (0.6B bf16): two threads over one "
        f"| {result['threads']['ratio']:.2f}x | 1.9x |",
        "| 32 requests, 16 at once: continuous over static batching; Python's share of the time "
        f"| {rates['continuous'] / rates['static']:.2f}x; "
        f"{100 * float(median['continuous']['python_share']):.1f} % | 5 % |",
    ]


def _serving_rows(result: dict[str, Any]) -> list[str]:
    """Return goodput at each server's knee, and Quire's over the best peer's.

    If no peer met the objective at any rate, return the peers' times at their lowest rate.
    """
    engines = result["engines"]
    knees = {name: entry["knee"] for name, entry in engines.items() if entry["knee"] is not None}
    if "quire" not in knees or len(engines) < 2:
        return []
    ours = float(knees["quire"]["goodput_per_s"])
    peers = {name: float(knee["goodput_per_s"]) for name, knee in knees.items() if name != "quire"}
    if peers:
        best = max(peers, key=lambda name: peers[name])
        beside = f"{best} {peers[best]:.2f}: {ours / peers[best]:.2f}x"
    else:
        beside = "no peer met the objective at any rate: " + ", ".join(
            f"{name} {_pace(entry['rates'][0])}"
            for name, entry in engines.items()
            if name != "quire" and entry["rates"]
        )
    return [
        "| 0.6B bf16 over HTTP, rising rates: highest goodput (requests/s) with 90 % of first "
        f"tokens within 2 s and of token gaps within 100 ms | {ours:.2f}; {beside} | 1.5x |"
    ]


def _pace(rate: dict[str, Any]) -> str:
    """Return the median times at a rate."""
    return (
        f"{rate['ttft_s']['p50']:.1f} s and {1000 * rate['tpot_s']['p50']:.0f} ms at "
        f"{rate['offered_per_s']:.2f}/s"
    )


def _quality_rows(result: dict[str, Any]) -> list[str]:
    """Return perplexity and divergence of the settings with a goal, and of fp8, which has none."""
    rows = []
    for model in ("stories260K", "box"):
        for entry in result[model]["settings"]:
            name, _, dtype = str(entry["setting"]).partition(", ")
            if dtype != "f32" or not ("goal_ratio" in entry or name.startswith("fp8")):
                continue
            goal = f"{100 * (entry['goal_ratio'] - 1):+.0f} %" if "goal_ratio" in entry else ""
            rows.append(
                f"| {name} against f32, {model}: perplexity, divergence "
                f"| {100 * (entry['ratio'] - 1):+.1f} %, {entry['kl_nats']:.4f} nats | {goal} |"
            )
    return rows


# Result files by topic, each with the function that turns it into lines.
TOPICS: Mapping[str, Mapping[str, Callable[[dict[str, Any]], list[str]]]] = MappingProxyType(
    {
        "Start and size": {"startup": _startup_rows},
        "Serving": {
            "serving-qwen3-0.6b-bf16": _serving_rows,
            "scheduler": _scheduler_rows,
            "frontend": _frontend_rows,
            "scaling": _scaling_rows,
            "interference": _interference_rows,
            "soak": soak_rows,
        },
        "Scheduling policies and predictions": {
            "policies-accelerator": policy_rows,
            "policies-piece": piece_rows,
            "forecast-accelerator": forecast_rows,
            "forecast-cpu": forecast_rows,
        },
        "Structured output": {"structured": structured_rows},
        "Speculative decoding": {
            "speculation": speculation_rows,
            "draft_heads": draft_head_rows,
        },
        "KV memory": {
            "preemption": _preemption_rows,
            "tier-warm": _tier_rows,
            "prefix": _sharing_rows,
            "memory": _memory_rows,
            "footprint": _footprint_rows,
        },
        "Several replicas and devices": {
            "router": router_rows,
            "fleet": fleet_rows,
            "ray-serve": ray_rows,
            "shared-store": shared_store_rows,
            "simulated-store": simulated_store_rows,
            "disaggregation": disaggregation_rows,
            "parallel": ranks_rows,
            "context": ranks_rows,
            "disk_offload": disk_rows,
            "batches-qwen3-0.1b-bf16": batch_rows,
        },
        "Quality of quantized weights": {"quality": _quality_rows},
    }
)
