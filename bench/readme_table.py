"""Writes what was measured, from committed results: the README's part, docs/measured.md, the tables
of docs/simulate.md, a picture.

`python -m bench.readme_table` rewrites them; `--check` exits 1 where a page is not current. No page
has a figure that is not in a file under bench/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.measured import peers
from bench.measured.gpu_rows import card_text, gpu_rows, published_table
from bench.measured.policy_table import policy_table
from bench.measured.rows import HEADLINES, TOPICS
from quire.base.errors import SettingError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
SIMULATE = ROOT / "docs" / "simulate.md"
SCENES = ("policies-accelerator", "policies-cpu")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = ["| what | measured | goal |", "|---|---|---|"]

PAGE_BEGINNING = Path(__file__).with_name("measured") / "page_beginning.md"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def topic_rows() -> dict[str, list[str]]:
    """Lines by topic, of the results there are."""
    found: dict[str, list[str]] = {}
    for topic, makers in TOPICS.items():
        results = {name: _load(name) for name in makers}
        lines = [
            line
            for name, rows_of in makers.items()
            if (result := results[name]) is not None
            for line in rows_of(result)
        ]
        if lines:
            found[topic] = lines
    return found


def machine_text() -> str:
    """The machine of the start-up figures, or none."""
    result = _load("startup")
    if result is None:
        return ""
    card = result["machine"]
    return f"Machine: {card['cpu']}, {card['cores']} cores, {card['memory_gb']:.0f} GB."


def table() -> str:
    """The Markdown between the README's markers."""
    told = peers.all_told(RESULTS)
    lines = [line for found in topic_rows().values() for line in found]
    short = [line for line in lines if line.startswith(HEADLINES)]
    parts = [peers.short_table(told)] if told else []
    parts += [[*HEAD, *short]] if short else []
    if not parts:
        return "Not yet measured."
    whole = "All of it, with spreads and schemes: [docs/measured.md](docs/measured.md)."
    return "\n\n".join("\n".join(part) for part in [*parts, [f"{machine_text()} {whole}".strip()]])


def page() -> str:
    """docs/measured.md, whole."""
    told = peers.all_told(RESULTS)
    parts = [
        PAGE_BEGINNING.read_text()
        .rstrip()
        .format(machine=machine_text(), sweeps=peers.sweeps_text(RESULTS))
    ]
    if told:
        parts.append("\n".join(peers.long_table(told)))
    for topic, lines in topic_rows().items():
        parts += [f"## {topic}", "\n".join([*HEAD, *lines])]
    parts += _gpu_parts(_load("gpu-check"))
    return "\n\n".join(parts) + "\n"


def _gpu_parts(result: dict[str, Any] | None) -> list[str]:
    """What a card did, beside what others have published; without a result of one, that."""
    lines = [] if result is None else gpu_rows(result)
    if result is None or not lines:
        return ["## On a GPU", "Not yet measured."]
    return [
        "## On a GPU",
        card_text(result),
        "\n".join([*HEAD, *lines]),
        "Published by others, on other machines and by other means: where ours lies, not a race.",
        "\n".join(published_table()),
    ]


def readme() -> str:
    """The README with its part made anew."""
    return _with_part(README, table())


def simulate() -> str:
    """docs/simulate.md with its tables made anew."""
    results = [result for name in SCENES if (result := _load(name)) is not None]
    return _with_part(SIMULATE, "\n\n".join(map(policy_table, results)) or "Not yet simulated.")


def _with_part(page: Path, part: str) -> str:
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{part}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for path, wanted in ((README, readme()), (PAGE, page()), (SIMULATE, simulate())):
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

    told = peers.all_told(RESULTS)
    try:
        draw(told, RESULTS / "cpu-peers.png")
        draw_speed(told, RESULTS / "cpu-speed.png", shape="qwen3-0.6b", precision="bf16")
    except SettingError as error:
        print(error)


if __name__ == "__main__":
    main()
