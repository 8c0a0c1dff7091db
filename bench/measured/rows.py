"""Lines of the table of measured things, from the results under bench/results/.

Knows the shape of each result and nothing of pages. Always holds: a line's figures are all of one
result file, and what has no file has no line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench.measured.service_rows import (
    forecast_rows,
    piece_rows,
    policy_rows,
    soak_rows,
    structured_rows,
)


def _startup_rows(result: dict[str, Any]) -> list[str]:
    starts = {start["model"]: start for start in result["starts"]}
    told = {
        "model in the box": ("box",),
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
        for what, names in told.items()
    ]
    if "installed_mb" in result:
        rows.append(
            f"| installed, with all dependencies and bytecode | {result['installed_mb']:.0f} MB | "
            f"{result['goal_installed_mb']} MB |"
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
    """Of the server and engine processes together, beside an empty app on the same server."""
    flat, paced, asked = (result[part] for part in ("flat_out", "paced", "requests"))
    return [
        f"| front end, {result['streams']} streams, a model that takes no time: CPU a streamed "
        f"token flat out, at {1000 / paced['step_ms']:.0f} steps/s, and a request | "
        f"{flat['quire']['us_per_token']:.0f} us, {paced['quire']['us_per_token']:.0f} us, "
        f"{asked['quire']['us_per_request']:.0f} us (empty app: "
        f"{flat['floor']['us_per_token']:.0f}, {paced['floor']['us_per_token']:.0f}, "
        f"{asked['floor']['us_per_request']:.0f}){_beside(result)} | "
        f"{result['goal_token_us']:.0f} us, {result['goal_request_us']:.0f} us |"
    ]


def _beside(result: dict[str, Any]) -> str:
    """The servers with a model that computes: a streamed token and a request of each."""
    told = [
        f"{name} {found['streamed']['us_per_token']:.0f}, "
        f"{found['requests']['us_per_request']:.0f} us"
        for name, found in result.get("with_a_model", {}).items()
        if isinstance(found, dict) and "streamed" in found
    ]
    return f"; with the model in the box, its compute included: {'; '.join(told)}" if told else ""


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
    """Memory of a serving engine over what it has to hold."""
    return [
        f"| memory of the engine's process, {one['shape']} in {one['precision']}, KV for "
        f"{one['kv_tokens']:,} tokens, all used: over weights + KV "
        f"({one['planned_bytes'] / 1e6:,.0f} MB), files that are only mapped apart "
        f"| {one['ratio']:.2f}x; with the API's {one['server_ratio']:.2f}x | {one['goal']}x |"
        for one in result["footprints"]
    ]


def _sharing_rows(result: dict[str, Any]) -> list[str]:
    """Prompts that begin alike, and what finding their blocks costs."""
    most = max(case["ratio"] for case in result["sharing"])
    cost = max(result["microseconds"]["digests_and_match_us"].values())
    return [
        f"| 16 requests with 1,024 tokens in common: prompt tokens computed | "
        f"{100 * most:.1f} % of those apart | 12.5 % |",
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
    """Hits of the prefix cache beside the best that any rule could find, and beside LRU."""
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
        f"sizes below plain LRU | {min(shares):.2f} to {max(shares):.2f}; "
        f"{f'{len(below)} of {len(sizes)} ({worst})' if below else 'none'} | 0.95; none |"
    )


def _preemption_rows(result: dict[str, Any]) -> list[str]:
    kept, sooner = result["summary"]["w3"], result["summary"]["long"]
    return [
        f"| 16 requests at once, KV for 4 of them: throughput, all finished and exact | "
        f"{100 * kept['cut_of_uncut']:.0f} % of that with room for all | 60 % |",
        f"| long conversations in turn, KV for 2.5 of 6: a disk tier against computing again | "
        f"{sooner['tier_of_cut']:.2f}x | 1.2x |",
    ]


def _tier_rows(result: dict[str, Any]) -> list[str]:
    summary = result["summary"]
    return [
        f"| first token of a 4,096-token prefix after a restart, from the disk tier, {name} | "
        f"{summary[key]['times_sooner']:.1f}x sooner than computed | 5x |"
        for key, name in (("warm", "page cache warm"), ("dropped", "page cache dropped"))
    ]


def _interference_rows(result: dict[str, Any]) -> list[str]:
    """Of each shape and length of prompt that was run."""
    return [
        f"| a prompt of {int(prompt):,} beside {beside} decoding ({shape}): their p99 between "
        f"tokens, its first token | {entry['p99_over_median_before']:.1f}x their median before, "
        f"{entry['ttft_over_alone']:.1f}x alone | 2x, 3x |"
        for name, entry in result["summaries"].items()
        for shape, _, rest in (name.partition(", "),)
        for prompt, _, beside in (rest.partition(" beside "),)
    ]


def _scaling_rows(result: dict[str, Any]) -> list[str]:
    """What a second thread and continuous batching bring, and Python's share."""
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
    """Goodput at each server's knee, Quire's over the best peer's; where no peer served nine in
    ten in time at any rate, what the lowest rate was and how long they took."""
    engines = result["engines"]
    knees = {name: entry["knee"] for name, entry in engines.items() if entry["knee"] is not None}
    if "quire" not in knees or len(engines) < 2:
        return []
    ours = float(knees["quire"]["goodput_per_s"])
    peers = {name: float(knee["goodput_per_s"]) for name, knee in knees.items() if name != "quire"}
    if peers:
        best = max(peers, key=lambda name: peers[name])
        told = f"{best} {peers[best]:.2f}: {ours / peers[best]:.2f}x"
    else:
        told = "of no other server any rate: " + ", ".join(
            f"{name} {_pace(entry['rates'][0])}"
            for name, entry in engines.items()
            if name != "quire" and entry["rates"]
        )
    return [
        "| 0.6B bf16 over HTTP, rising rates: good requests a second where nine in ten have their "
        f"first token within 2 s, others within 100 ms | {ours:.2f}; {told} | 1.5x |"
    ]


def _pace(rate: dict[str, Any]) -> str:
    """Of half of the requests at a rate."""
    return (
        f"{rate['ttft_s']['p50']:.1f} s and {1000 * rate['tpot_s']['p50']:.0f} ms at "
        f"{rate['offered_per_s']:.2f}/s"
    )


def _quality_rows(result: dict[str, Any]) -> list[str]:
    """Perplexity and divergence of the settings that have a goal, and of fp8, which has none."""
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


# Result files, by the topic their lines stand under, each with what makes lines of it.
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
        "Policies and forecasts": {
            "policies-accelerator": policy_rows,
            "policies-piece": piece_rows,
            "forecast-accelerator": forecast_rows,
            "forecast-cpu": forecast_rows,
        },
        "Structured output": {"structured": structured_rows},
        "KV memory": {
            "preemption": _preemption_rows,
            "tier-warm": _tier_rows,
            "prefix": _sharing_rows,
            "memory": _memory_rows,
            "footprint": _footprint_rows,
        },
        "Quality of weights in few bits": {"quality": _quality_rows},
    }
)

# What the README tells of all this: lines that begin so.
HEADLINES = (
    "| process start to first streamed token",
    "| installed, with",
    "| 0.6B bf16 over HTTP",
    "| schedule + update, 256",
    "| front end",
    "| 16 requests at once, KV for 4",
    "| first token of a 4,096-token prefix after a restart, from the disk tier, page cache warm",
    "| 32 requests, 16 at once: continuous",
    "| int8 against f32, box",
    "| int4-g32 against f32, box",
)
