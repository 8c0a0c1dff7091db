"""Quire against other engines: lines for a short table and for the long one.

Knows the files of `bench.compare`. Always holds: a ratio is told only where its file may tell it
(bench.record), beside the keys' and values' dtypes and the share of the floor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import kv_dtype_of

WORKLOAD_NAMES = {
    "w1": "one request, 128 in, 128 out: decode",
    "w2": "prompt of 2,048: prefill",
    "w3": "32 requests, 16 at once: prompt + output",
    "w4": "16 requests, 1,024 shared: prompt + output",
}
PEER_NAMES = {"openvino": "OpenVINO", "vllm": "vLLM"}
COLUMNS = ("bf16", "int8", "int4", "int4-g128")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a file says of one workload and one peer."""

    shape: str
    precision: str
    workload: str
    peer: str
    kv: str  # what Quire keeps keys and values in
    peer_scheme: str
    peer_kv: str
    entry: dict[str, Any]  # of the record's summary
    machine: dict[str, Any]  # the machine card

    @property
    def ratio(self) -> float:
        """Of the medians of pairs."""
        return float(self.entry["ratio"]["median"])

    @property
    def peer_name(self) -> str:
        """As its authors write it."""
        engine = self.peer.split(" ")[0]
        return self.peer.replace(engine, PEER_NAMES.get(engine, engine))

    @property
    def place(self) -> tuple[bool, str, int, int]:
        """Where it stands in a table: the first shape is the one of the goals."""
        return (
            self.shape != "qwen3-0.6b",
            self.shape,
            [*WORKLOAD_NAMES].index(self.workload),
            COLUMNS.index(self.precision),
        )


def all_told(results: Path) -> list[Told]:
    """Every ratio that may be told, in the order of tables."""
    found = (told for path in sorted(results.glob("cpu-*.json")) for told in _of_file(path))
    return sorted(found, key=lambda told: (*told.place, told.kv, told.ratio))


def sweeps_text(results: Path) -> str:
    """Which peers' settings come of a sweep whose file is there, and that others' do not."""
    swept: dict[tuple[str, str], list[str]] = {}
    for path in sorted(results.glob("sweep-*.json")):
        for entry in json.loads(path.read_text())["tried"]:
            if entry["engine"] != "quire" and entry["rates"]:
                key = PEER_NAMES.get(entry["engine"], entry["engine"]), entry["workload"].upper()
                swept.setdefault(key, [])
                if (precision := path.stem.rsplit("-", 1)[1]) not in swept[key]:
                    swept[key].append(precision)
    if not swept:
        return "They were chosen by hand; none was swept."
    told = ", ".join(
        f"{engine} in {workload} ({', '.join(precisions)})"
        for (engine, workload), precisions in swept.items()
    )
    return (
        f"Those of {told} are the best of a sweep, or within a fiftieth of it (all tries: "
        "`bench/results/sweep-*.json`); all others were chosen by hand, and were not swept."
    )


def strongest(told: list[Told]) -> list[Told]:
    """Of each shape, workload, precision and dtype of Quire's KV the peer nearest to Quire."""
    best: dict[tuple[object, ...], Told] = {}
    for one in told:
        best.setdefault((*one.place, one.kv), one)
    return [*best.values()]


def short_table(told: list[Told]) -> list[str]:
    """A line a shape and workload, a column a precision, the strongest peer in each cell."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in strongest(told):
        row = cells.setdefault((one.shape, one.workload), {})
        row.setdefault(one.precision, []).append(_short_cell(one))
    columns = [name for name in COLUMNS if any(name in row for row in cells.values())]
    return [
        f"| {' | '.join(('shape, workload', *columns))} |",
        "|---" * (1 + len(columns)) + "|",
        *(
            f"| {shape}, {WORKLOAD_NAMES[workload]} | "
            + " | ".join("<br>".join(row.get(column, [])) for column in columns)
            + " |"
            for (shape, workload), row in cells.items()
        ),
    ]


def long_table(told: list[Told]) -> list[str]:
    """A line a ratio, with all that belongs to it."""
    headings = (
        "shape, workload",
        "precision",
        "Quire, tokens/s (KV)",
        "share of floor",
        "peer, tokens/s (weights, KV)",
        "ratio (least to most)",
        "pairs",
        "memory read, GB/s",
    )
    return [
        f"| {' | '.join(headings)} |",
        "|---" * len(headings) + "|",
        *(f"| {' | '.join(_long_cells(one))} |" for one in told),
    ]


def _short_cell(told: Told) -> str:
    share = told.entry.get("quire_floor_share")
    kv = "" if told.kv == "bf16" else f", KV {told.kv}"
    rate = _rate(told.entry["quire"]["median"])
    return f"**{told.ratio:.2f}x** {told.peer_name}; {rate} tokens/s{kv}" + (
        "" if share is None else f", {100 * share:.0f} % of the floor"
    )


def _long_cells(told: Told) -> tuple[str, ...]:
    entry, share = told.entry, told.entry.get("quire_floor_share")
    ours, theirs = (entry[side]["median"] for side in ("quire", "other"))
    ratio = entry["ratio"]
    return (
        f"{told.shape}, {WORKLOAD_NAMES[told.workload]}",
        told.precision,
        f"{_rate(ours)} ({told.kv})",
        "" if share is None else f"{100 * share:.0f} %",
        f"{told.peer_name} {_rate(theirs)} ({told.peer_scheme}, {told.peer_kv})",
        f"**{ratio['median']:.2f}** ({ratio['least']:.2f} to {ratio['most']:.2f})",
        str(entry["pairs"]),
        f"{entry['quire_read_gb_per_s']:.0f}",
    )


def _of_file(path: Path) -> Iterator[Told]:
    record = json.loads(path.read_text())
    subject, engines = record["subject"], record["engines"]
    for workload, entries in record["summary"].items():
        for peer, entry in entries.items():
            if "ratio" in entry:
                yield Told(
                    shape=subject["shape"],
                    precision=subject["precision"],
                    workload=workload,
                    peer=peer,
                    kv=_plain(kv_dtype_of(engines["quire"], workload)),
                    peer_scheme=engines[peer]["scheme"],
                    peer_kv=_plain(kv_dtype_of(engines[peer], workload)),
                    entry=entry,
                    machine=record["machine"],
                )


def _rate(tokens_per_s: float) -> str:
    """With a decimal where it is small."""
    return f"{tokens_per_s:,.{0 if tokens_per_s >= 100 else 1}f}"


def _plain(dtype: str) -> str:
    """A dtype's name without an engine's wrapping: "<Type: 'uint8_t'>" is uint8_t."""
    return dtype.replace("<Type: '", "").replace("'>", "")
