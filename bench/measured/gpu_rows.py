"""Table lines on one GPU, from the result of bench/gpu_check.sh, and published results of others.

Reads that result and knows no page. Always holds: without a result of a real card there is no line;
a section that did not run, or failed, has none; published numbers are quoted from their address,
with the differences from ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).with_name("published_gpu.json")
OF_A_CARD = "quire on a GPU"  # what a dry run is not called
DECODED = {
    "Llama-3.1-8B none": "8B bf16",
    "Llama-3.1-8B fp8": "8B fp8",
    "Llama-3.1-8B int8": "8B int8",
    "Llama-3.1-8B int4-g128": "8B int4",
    "Qwen3-8B none": "Qwen3-8B bf16",
    "Qwen3-0.6B none": "0.6B bf16",
}


def gpu_rows(result: dict[str, Any]) -> list[str]:
    """Return the results of the check, each beside its goal."""
    if result["what"] != OF_A_CARD:
        return []
    makers = {
        "decode_one": _decode,
        "attention_decode": _attention_decode,
        "attention_prefill": _attention_prefill,
        "prefill": _prefill,
        "requests": _requests,
        "peer": _peer,
        "exact_price": _price,
        "ready": _ready,
    }
    sections = result["sections"]
    return [
        f"| {what} | {found} | {goal} |"
        for name, make in makers.items()
        if sections.get(name, {}).get("status") == "ok"
        for what, found, goal in make(sections[name].get("found", {}))
    ]


def card_text(result: dict[str, Any]) -> str:
    """Return card, driver and packages."""
    card = result["machine"]
    gpus = card["gpus"] if isinstance(card["gpus"], list) else [card["gpus"]]
    packages = ", ".join(f"{name} {card['packages'][name]}" for name in ("torch", "triton"))
    return f"Card: {'; '.join(gpus)}; {packages}."


def published_table() -> list[str]:
    """Return what others have published for similar settings."""
    return [
        "| engine | what | reported | model, precision | card | date | differs from ours |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| [{one['of']}]({one['address']}) | {one['what']} | {one['figures']} | "
            f"{one['model']}, {one['precision']} | {one['card']} | {one['date']} | "
            f"{one['differs']} |"
            for one in json.loads(PUBLISHED.read_text(encoding="utf-8"))
        ),
    ]


Lines = Iterator[tuple[str, str, str]]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _decode(found: dict[str, Any]) -> Lines:
    for key, name in DECODED.items():
        modes = {
            mode: found[f"{key} {mode}"] for mode in ("fast", "exact") if _has(found, key, mode)
        }
        text = "; ".join(
            f"{mode} {one['tokens_per_s']:.0f} tokens/s, {_percent(one['share_of_floor'])} of the "
            f"floor, device {1e3 * one['seconds_on_device']:.2f} of "
            f"{1e3 * one['seconds_with_host']:.2f} ms"
            for mode, one in modes.items()
        )
        if text:
            yield f"one request, {name}: decode", text, "85 %" if name == "8B bf16" else ""


def _has(found: dict[str, Any], key: str, mode: str) -> bool:
    return f"{key} {mode}" in found


def _attention_decode(found: dict[str, Any]) -> Lines:
    text = "; ".join(f"{name} {_percent(one['share_of_copy'])}" for name, one in found.items())
    yield "decode attention, 64 requests of 4,096: share of the copy's bandwidth", text, "85 %"


def _attention_prefill(found: dict[str, Any]) -> Lines:
    text = "; ".join(
        f"{name} {_percent(one['share_of_peak'])}" if "share_of_peak" in one else f"{name} not run"
        for name, one in found.items()
    )
    yield "prefill attention, 8,192 tokens: share of the matrix peak", text, "55 %"


def _prefill(found: dict[str, Any]) -> Lines:
    text = "; ".join(
        f"{mode} {one['tokens_per_s']:,.0f} tokens/s, {_percent(one['share_of_peak'])}"
        for mode, one in found.items()
    )
    yield "8B bf16, prompt of 8,192: prefill, share of the matrix peak", text, "65 %"


def _requests(found: dict[str, Any]) -> Lines:
    for mode, one in found.items():
        if not one["is_whole"]:
            continue
        busy = 1 - one["idle_between_steps_s"] / one["seconds"]
        asked = mode if "requests" in mode else f"{mode}, 512 requests, 256 at once"
        yield (
            f"8B bf16, 1,024 in, 512 out, {asked}: output tokens/s, share of the floor, GPU busy",
            f"{one['answered_tokens_per_s']:,.0f}, {_percent(one['share_of_floor'])}, "
            f"{100 * busy:.1f} %",
            "97 % busy",
        )


def _peer(found: dict[str, Any]) -> Lines:
    for name, one in found.items():
        if isinstance(one, dict) and "answered_tokens_per_s" in one:
            yield (
                f"requests of that size by {name}: output tokens/s",
                f"{one['answered_tokens_per_s']:,.0f}",
                "",
            )


def _price(found: dict[str, Any]) -> Lines:
    for what, one in found.items():
        goal = "20 %" if what.startswith("prefill") else "10 %"
        yield f"8B bf16, price of exact mode, {what}", f"{100 * one['price']:.1f} %", goal


def _ready(found: dict[str, Any]) -> Lines:
    names = {"none": "bf16", "fp8": "bf16 files as fp8"}
    for key, name in names.items():
        one = found.get(key)
        if one is not None:
            yield (
                f"8B {name}, local files in the page cache: loaded, first step, all graphs",
                f"{one['to_load']:.1f}, {one['to_first_step']:.1f}, {one['to_all_graphs']:.1f} s",
                "",
            )
