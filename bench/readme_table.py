"""Write the measured parts of the pages from committed results.

They are the README's chart and summary, docs/measured.md, the tables of docs/simulate.md and of
docs/disaggregation.md, and the charts. `python -m bench.readme_table` rewrites them; `--check`
exits 1 where a page is not current. No page has a number that is not in a file under
bench/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench.measured import peers
from bench.measured.gpu_rows import card_text, gpu_rows, published_table
from bench.measured.pair_table import pair_part
from bench.measured.policy_table import policy_table
from bench.measured.rows import TOPICS, start_text
from quire.base.errors import SettingError
from quire.bench.machine import LOAD_MARK, is_loaded

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
SIMULATE = ROOT / "docs" / "simulate.md"
DISAGGREGATION = ROOT / "docs" / "disaggregation.md"
SCENES = ("policies-accelerator", "policies-cpu")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
CHART = "cpu-speed.png"
CHART_TEXT = "Tokens per second of Quire and other engines on the same CPU"
COLUMNS_OF_PROSE = 100
# Results without times: a loaded machine cannot change them.
TIMELESS = frozenset(
    {"quality", "footprint", "policies-accelerator", "policies-piece", "draft_heads"}
    | {"forecast-accelerator", "forecast-cpu", "simulated-store"}
)
FOOTNOTE = (
    f"{LOAD_MARK} Measured while other work ran on the machine: times are upper bounds; ratios of "
    "adjacent pairs stay comparable."
)
HEAD = ["| what | measured | goal |", "|---|---|---|"]

PAGE_BEGINNING = Path(__file__).with_name("measured") / "page_beginning.md"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def topic_rows() -> dict[str, list[str]]:
    """Return table lines by topic, from the results on file."""
    found: dict[str, list[str]] = {}
    for topic, makers in TOPICS.items():
        results = {name: _load(name) for name in makers}
        lines = [
            _marked(line) if name not in TIMELESS and is_loaded(result["machine"]) else line
            for name, rows_of in makers.items()
            if (result := results[name]) is not None
            for line in rows_of(result)
        ]
        if lines:
            found[topic] = lines
    return found


def _marked(line: str) -> str:
    """Mark the first cell of a line measured on a loaded machine."""
    first, rest = line.removeprefix("| ").split(" |", 1)
    return f"| {first} {LOAD_MARK} |{rest}"


def machine_text() -> str:
    """Return the machine of the start-up measurements, or an empty string."""
    result = _load("startup")
    if result is None:
        return ""
    card = result["machine"]
    return f"Machine: {card['cpu']}, {card['cores']} cores, {card['memory_gb']:.0f} GB."


def table() -> str:
    """Return the Markdown between the README's markers."""
    ratios = peers.all_ratios(RESULTS)
    if not ratios:
        return "Not yet measured."
    start = _load("startup")
    return "\n".join(
        [
            f"![{CHART_TEXT}](bench/results/{CHART})",
            "",
            "Quire's tokens/s over those of the fastest other engine measured (llama.cpp, OpenVINO",
            "GenAI, vLLM), with equal weights, prompts and threads ([tables](docs/measured.md)):",
            "",
            *peers.summary(ratios),
            "",
            *([] if start is None else start_text(start)),
            f"* {machine_text()} Every table, with spreads and missed goals:",
            "  [docs/measured.md](docs/measured.md).",
        ]
    )


def page() -> str:
    """Return the text of docs/measured.md."""
    ratios = peers.all_ratios(RESULTS)
    beginning = PAGE_BEGINNING.read_text().rstrip()
    words = {"machine": machine_text(), "sweeps": peers.sweeps_text(RESULTS)}
    parts = [_wrapped(part.format(**words)) for part in beginning.split("\n\n")]
    parts += peers.workload_tables(ratios)
    for topic, lines in topic_rows().items():
        parts += [f"## {topic}", "\n".join([*HEAD, *lines])]
    parts += _gpu_parts(_load("gpu-check"))
    if any(LOAD_MARK in part for part in parts):
        parts.append(_wrapped(FOOTNOTE))
    return "\n\n".join(parts) + "\n"


def _wrapped(paragraph: str) -> str:
    """Wrap a paragraph to the columns of prose; headings and images stay on their line."""
    if paragraph.startswith(("#", "![")):
        return paragraph
    return textwrap.fill(
        paragraph, COLUMNS_OF_PROSE, break_long_words=False, break_on_hyphens=False
    )


def _gpu_parts(result: dict[str, Any] | None) -> list[str]:
    """Return the GPU's results beside published ones, or that there are none."""
    lines = [] if result is None else gpu_rows(result)
    if result is None or not lines:
        return ["## On a GPU", "Not yet measured."]
    return [
        "## On a GPU",
        _wrapped(card_text(result)),
        "\n".join([*HEAD, *lines]),
        "Published by others, on other machines and by other methods; not a direct comparison.",
        "\n".join(published_table()),
    ]


def readme() -> str:
    """Return the README with its measured part rewritten."""
    return _with_part(README, table())


def simulate() -> str:
    """Return docs/simulate.md with its tables rewritten."""
    results = [result for name in SCENES if (result := _load(name)) is not None]
    return _with_part(SIMULATE, "\n\n".join(map(policy_table, results)) or "Not yet simulated.")


def disaggregation() -> str:
    """Return docs/disaggregation.md with its measured part rewritten."""
    part = pair_part(_load("disaggregation-map"), _load("disaggregation"))
    return _with_part(DISAGGREGATION, part)


def _with_part(page: Path, part: str) -> str:
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{part}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    pages = (
        (README, readme()),
        (PAGE, page()),
        (SIMULATE, simulate()),
        (DISAGGREGATION, disaggregation()),
    )
    for path, wanted in pages:
        if path.exists() and path.read_text() == wanted:
            continue
        if args.check:
            sys.exit(
                f"{path.name} is not what bench/results/ says; run python -m bench.readme_table"
            )
        path.write_text(wanted)
    if not args.check:
        _draw()


def _draw() -> None:
    from bench.measured.picture import draw, draw_speed  # matplotlib is an extra

    ratios = peers.all_ratios(RESULTS)
    try:
        draw(ratios, RESULTS / "cpu-peers.png")
        draw_speed(ratios, RESULTS / CHART, shape="qwen3-0.6b", precision="bf16")
    except SettingError as error:
        print(error)


if __name__ == "__main__":
    main()
