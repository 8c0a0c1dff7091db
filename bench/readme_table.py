"""Writes the README's measured numbers from committed results, between two markers.

`python -m bench.readme_table` rewrites the README; `--check` exits 1 where it is not current. The
README never has a figure that is not in a file under bench/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.record import kv_dtype_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


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
        f"{asked['floor']['us_per_request']:.0f}) | {result['goal_token_us']:.0f} us, "
        f"{result['goal_request_us']:.0f} us |"
    ]


def _memory_rows(result: dict[str, Any]) -> list[str]:
    cost = max(case["paged_cost_percent"] for case in result["paged_attention"])
    return [
        f"| share of allocated KV that holds tokens, mixed lengths | "
        f"{result['kv_share_percent']:.1f} % (reserving the maximum: "
        f"{result['kv_share_reserved_percent']:.0f} %) | 96 % |",
        f"| paged against contiguous attention, worst of block sizes 16, 32, 64 | "
        f"{cost:+.1f} % | 2 % |",
    ]


def _sharing_rows(result: dict[str, Any]) -> list[str]:
    """Prompts that begin alike, and what finding their blocks costs."""
    most = max(case["ratio"] for case in result["sharing"])
    cost = max(result["microseconds"]["digests_and_match_us"].values())
    return [
        f"| 16 requests with 1,024 tokens in common: prompt tokens computed | "
        f"{100 * most:.1f} % of those apart | 12.5 % |",
        f"| hashing and matching a block of 16 tokens | {cost:.2f} us | 2 us |",
    ]


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
    """Of the longest prompt that was run with the 0.6B shape."""
    prompt = max(run["prompt"] for run in result["runs"] if run["shape"] == "qwen3-0.6b")
    entry = result["summaries"][f"qwen3-0.6b, {prompt} beside 16"]
    return [
        f"| a prompt of {prompt:,} beside 16 decoding (0.6B): their p99 between tokens, its first "
        f"token | {entry['p99_over_median_before']:.1f}x their median before, "
        f"{entry['ttft_over_alone']:.1f}x alone | 2x, 3x |"
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
    """Goodput at each server's knee, Quire's over the best peer's."""
    knees = {
        name: float(entry["knee"]["goodput_per_s"])
        for name, entry in result["engines"].items()
        if entry["knee"] is not None
    }
    peers = {name: rate for name, rate in knees.items() if name != "quire"}
    if "quire" not in knees or not peers:
        return []
    best = max(peers, key=lambda name: peers[name])
    return [
        "| 0.6B bf16 over HTTP, rising rates: good requests a second where nine in ten have their "
        f"first token within 2 s, others within 100 ms | {knees['quire']:.2f}, {best} "
        f"{peers[best]:.2f}: {knees['quire'] / peers[best]:.2f}x | 1.5x |"
    ]


def _quality_rows(result: dict[str, Any]) -> list[str]:
    """Perplexity and divergence of the settings that have a goal."""
    rows = []
    for model in ("stories260K", "box"):
        for entry in result[model]["settings"]:
            name = str(entry["setting"]).removesuffix(", f32")
            if "goal_ratio" in entry and name != entry["setting"]:
                rows.append(
                    f"| {name} against f32, {model}: perplexity, divergence "
                    f"| {100 * (entry['ratio'] - 1):+.1f} %, {entry['kl_nats']:.4f} nats "
                    f"| {100 * (entry['goal_ratio'] - 1):+.0f} % |"
                )
    return rows


WORKLOAD_NAMES = {
    "w1": "one request, 128 in, 128 out: decode",
    "w2": "prompt of 2,048: prefill",
    "w3": "32 requests, 16 at once: prompt + output",
    "w4": "16 requests, 1,024 shared: prompt + output",
}


_COLUMNS = ("bf16", "int8", "int4", "int4-g128")


def _comparison() -> list[str]:
    """Quire against the strongest peer of each workload whose ratio may be told: a line a shape and
    workload, a column a precision, and then what the peers' schemes are."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    schemes: dict[str, None] = {}
    for path in sorted(RESULTS.glob("cpu-*.json")):
        record = json.loads(path.read_text())
        subject, engines = record["subject"], record["engines"]
        for workload in WORKLOAD_NAMES:
            told = {
                peer: entry
                for peer, entry in record["summary"].get(workload, {}).items()
                if "ratio" in entry
            }
            if not told:
                continue
            peer = min(told, key=lambda one: float(told[one]["ratio"]["median"]))
            row = cells.setdefault((subject["shape"], workload), {})
            row.setdefault(subject["precision"], []).append(
                _cell(told[peer], peer, _plain(kv_dtype_of(engines["quire"], workload)))
            )
            kv = _plain(kv_dtype_of(engines[peer], workload))
            schemes[f"{peer} {subject['precision']}: {engines[peer]['scheme']}, KV {kv}"] = None
    if not cells:
        return []
    columns = [one for one in _COLUMNS if any(one in row for row in cells.values())]
    lines = [
        f"| {' | '.join(('in pairs of one run', *columns))} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    order = [*WORKLOAD_NAMES]
    for shape, workload in sorted(
        cells, key=lambda key: (key[0] != "qwen3-0.6b", key[0], order.index(key[1]))
    ):
        row = cells[shape, workload]
        told_cells = ["<br>".join(row.get(column, [])) for column in columns]
        lines.append(f"| {' | '.join((f'{shape}, {WORKLOAD_NAMES[workload]}', *told_cells))} |")
    return ["", *lines, "", f"The strongest peers' schemes: {'; '.join(schemes)}."]


def _cell(entry: dict[str, Any], peer: str, kv: str) -> str:
    """The rate, the keys' and values' dtype, the ratio with its spread, the share of the floor."""
    ratio, share = entry["ratio"], entry.get("quire_floor_share")
    return (
        f"{entry['quire']['median']:.0f} tokens/s (KV {kv}): **{ratio['median']:.2f}x** {peer} "
        f"({ratio['least']:.2f} to {ratio['most']:.2f})"
        + ("" if share is None else f", {100 * share:.0f} % of the floor")
    )


def _plain(dtype: str) -> str:
    """A dtype's name without an engine's wrapping: "<Type: 'uint8_t'>" is uint8_t."""
    return dtype.replace("<Type: '", "").replace("'>", "")


def table() -> str:
    """The Markdown between the markers."""
    rows: list[str] = []
    machine = None
    for name, rows_of in (
        ("startup", _startup_rows),
        ("scheduler", _scheduler_rows),
        ("frontend", _frontend_rows),
        ("memory", _memory_rows),
        ("prefix", _sharing_rows),
        ("preemption", _preemption_rows),
        ("tier-warm", _tier_rows),
        ("interference", _interference_rows),
        ("serving-qwen3-0.6b-bf16", _serving_rows),
        ("scaling", _scaling_rows),
        ("quality", _quality_rows),
    ):
        result = _load(name)
        if result is None:
            continue
        machine = machine or result["machine"]
        rows += rows_of(result)
    comparison = _comparison()
    if machine is None:
        return "\n".join(comparison[1:]) if comparison else "Not yet measured."
    head = ["| what | measured | goal |", "|---|---|---|"]
    card = f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB."
    told = f"{card} From `bench/results/`, medians."
    return "\n".join([*comparison[1:], "", *head, *rows, "", told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    text = path.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if wanted == text:
        return
    if args.check:
        sys.exit("README.md is not what bench/results/ says; run python -m bench.readme_table")
    path.write_text(wanted)


if __name__ == "__main__":
    main()
