"""Table lines on grammars, policies, predictions and the soak test, from bench/results/.

Reads the results and knows no page. Always holds: a missed goal is shown like any other.
"""

from __future__ import annotations

from typing import Any

_VOCABULARIES = {"box": "built-in model", "llama3": "Llama 3", "qwen": "Qwen"}
FORECAST_GOAL = "0.75 to 1.25"


def structured_rows(result: dict[str, Any]) -> list[str]:
    """Return compile and mask times by vocabulary, valid answers, and the gain of forced tokens."""
    goals, answers = result["goals"], result["answers"]
    named = [
        (f"{_VOCABULARIES.get(name, name)}, {one['tokens']:,} tokens", one)
        for name, one in result["vocabularies"].items()
    ]
    rows = []
    for name, one in named:
        compiled, masks = one["compile_ms"], one["mask_us"]
        rows += [
            f"| JSON schemas that compile ({name}, {one['schemas']:,} schemas); p50, p99 "
            f"| {100 * one['compiled']:.1f} %; {compiled['p50']:.2f} ms, {compiled['p99']:.2f} ms "
            f"| {100 * goals['compiled']:.0f} %; {goals['compile_p50_ms']:.0f} ms |",
            f"| token mask of a row ({name}): p50, p99 | {masks['p50']:.0f} us, "
            f"{masks['p99']:,.0f} us | {goals['mask_p50_us']:.0f} us, "
            f"{goals['mask_p99_us']:,.0f} us |",
        ]
    jumps = result["jump_ahead"]
    rows += [
        f"| valid answers under random schemas | {answers['valid']:,} of "
        f"{answers['answers']:,} | all |",
        f"| forced tokens in one step, over step by step | {jumps['gain']:.2f}x, "
        f"{jumps['jumping']['steps']} steps for {jumps['jumping']['tokens']:,} tokens | 1x |",
    ]
    return rows


def policy_rows(result: dict[str, Any]) -> list[str]:
    """Return the simulator's goals with what was found."""
    scene = result["scene"].split(";")[0]
    return [
        f"| simulated ({scene}): {goal['what']} | {goal['found']} | {goal['wanted']} |"
        for goal in result["goals"]
    ]


def piece_rows(result: dict[str, Any]) -> list[str]:
    """Return how far the simulator agrees with the real engine."""
    settings, agreement = result["settings"], result["agreement"]
    ranks = "equal" if agreement["same_ranks"] else "different"
    shorter = settings["shorter"]
    lengths = "" if shorter == 1 else f" lengths over {shorter:.0f},"
    return [
        f"| {settings['num_requests']} requests of {settings['seconds']:.0f} s of a trace at "
        f"{settings['speed']:g} of its pace,{lengths} on the real engine and simulated "
        f"({', '.join(result['runs'])}): order of the policies; largest difference in mean latency "
        f"| {ranks}; {100 * agreement['most_off']:.0f} % | equal; 15 % |"
    ]


def forecast_rows(result: dict[str, Any]) -> list[str]:
    """Return predicted over actual time to first token, by policy: medians of all speeds."""
    scene = result["scene"].split(";")[0]
    rows = []
    for policy in dict.fromkeys(run["policy"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["policy"] == policy]
        medians = [run["ratio_p10_p50_p90"][1] for run in runs]
        lowest = min(run["ratio_p10_p50_p90"][0] for run in runs)
        highest = max(run["ratio_p10_p50_p90"][2] for run in runs)
        wrongly = max(run["refused_wrongly_share"] for run in runs)
        rows.append(
            f"| predicted over actual time to first token ({scene}; {policy}, {len(runs)} speeds): "
            f"medians, 10th to 90th percentile; wrongly rejected at most | {min(medians):.2f} to "
            f"{max(medians):.2f}, {lowest:.2f} to {highest:.2f}; {100 * wrongly:.1f} % "
            f"| {FORECAST_GOAL} |"
        )
    return rows


def soak_rows(result: dict[str, Any]) -> list[str]:
    """Return wrong answers of the soak test and the resources held after it."""
    before, rounds, done = result["before"], result["after_rounds"], result["done"]
    held = ("open_requests", "engine_requests", "blocks", "tasks", "descriptors")
    kept = sum(abs(rounds[-1][name] - before[name]) for name in held)
    memory = ", ".join(
        f"{name} {rounds[0][key] / 1e6:.0f} and {rounds[-1][key] / 1e6:.0f} MB"
        for name, key in (("API", "memory_bytes"), ("engine", "engine_memory_bytes"))
    )
    others = sum(count for name, count in done.items() if name not in ("good", "whole"))
    return [
        f"| {result['streams']:,} clients at once for {result['minutes']:.0f} minutes: wrong among "
        f"{done['good'] + done['whole']:,} answers, beside {others:,} that disconnect, stall or "
        f"are malformed | {len(result['wrong'])} | 0 |",
        f"| requests, blocks, tasks and descriptors in use afterwards; memory after the first "
        f"and the last of {len(rounds)} rounds | {kept} more than before; {memory} | 0 more |",
    ]
