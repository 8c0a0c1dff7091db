"""Quire beside other engines: a table for each workload, and the README's summary.

Reads the files of `bench.compare`. Always holds: a ratio appears only if its file has one
(bench.record), with the dtypes of keys and values and the share of the floor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import kv_dtype_of
from quire.bench.machine import LOAD_MARK, is_loaded

WORKLOAD_NAMES = {
    "w1": "W1: one request, 128 tokens in, 128 out (decode)",
    "w2": "W2: one prompt of 2,048 tokens (prefill)",
    "w3": "W3: 32 requests, 16 at once (prompt + output)",
    "w4": "W4: 16 requests, 1,024 shared tokens (prompt + output)",
}
# In the README, where a row has at most 100 columns.
SHORT_NAMES = {
    "w1": "W1, one request",
    "w2": "W2, one prompt",
    "w3": "W3, 16 at once",
    "w4": "W4, shared prompt",
}
PEER_NAMES = {"openvino": "OpenVINO", "vllm": "vLLM"}
COLUMNS = ("bf16", "int8", "int4", "int4-g128")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRatio:
    """The comparison of one workload with one peer, from one file."""

    shape: str
    precision: str
    workload: str
    peer: str
    kv: str  # dtype of Quire's keys and values
    peer_scheme: str
    peer_kv: str
    entry: dict[str, Any]  # of the record's summary
    machine: dict[str, Any]  # the machine card

    @property
    def ratio(self) -> float:
        """Quire's rate over the peer's: the median of the pairs."""
        return float(self.entry["ratio"]["median"])

    @property
    def peer_name(self) -> str:
        """Return the peer's name as its authors write it."""
        engine = self.peer.split(" ")[0]
        return self.peer.replace(engine, PEER_NAMES.get(engine, engine))

    @property
    def place(self) -> tuple[bool, str, int, int]:
        """Return the sort key of tables: the shape with goals comes first."""
        return (
            self.shape != "qwen3-0.6b",
            self.shape,
            [*WORKLOAD_NAMES].index(self.workload),
            COLUMNS.index(self.precision),
        )


def all_ratios(results: Path) -> list[PeerRatio]:
    """Return every ratio the files have, in the order of tables."""
    found = (one for path in sorted(results.glob("cpu-*.json")) for one in _of_file(path))
    return sorted(found, key=lambda one: (*one.place, one.kv, one.ratio))


def sweeps_text(results: Path) -> str:
    """Return which peers' settings were chosen by a sweep that is on file."""
    swept: dict[tuple[str, str], list[str]] = {}
    for path in sorted(results.glob("sweep-*.json")):
        for entry in json.loads(path.read_text())["tried"]:
            if entry["engine"] != "quire" and entry["rates"]:
                key = PEER_NAMES.get(entry["engine"], entry["engine"]), entry["workload"].upper()
                swept.setdefault(key, [])
                if (precision := path.stem.rsplit("-", 1)[1]) not in swept[key]:
                    swept[key].append(precision)
    if not swept:
        return "All were chosen by hand; none was swept."
    listed = ", ".join(
        f"{engine} in {workload} ({', '.join(precisions)})"
        for (engine, workload), precisions in swept.items()
    )
    return (
        f"Those of {listed} are the best of a sweep, or within 2 % of it (all tries: "
        "`bench/results/sweep-*.json`); all others were chosen by hand, and were not swept."
    )


def strongest(ratios: list[PeerRatio]) -> list[PeerRatio]:
    """Return the fastest peer for each shape, workload, precision and dtype of Quire's KV."""
    best: dict[tuple[object, ...], PeerRatio] = {}
    for one in ratios:
        best.setdefault((*one.place, one.kv), one)
    return [*best.values()]


def summary(ratios: list[PeerRatio]) -> list[str]:
    """Return a table: for each workload, the range of Quire's rate over the fastest peer's."""
    lines = ["| Workload | smallest lead | largest lead |", "|---|---|---|"]
    for workload, name in SHORT_NAMES.items():
        found = [one for one in strongest(ratios) if one.workload == workload]
        if found:
            cells = (name, _case(min(found, key=_ratio)), _case(max(found, key=_ratio)))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def workload_tables(ratios: list[PeerRatio]) -> list[str]:
    """Return a heading and a table for each workload, a line a ratio."""
    headings = (
        "model",
        "weights",
        "KV",
        "Quire, tokens/s",
        "of floor",
        "peer (weights, KV)",
        "peer, tokens/s",
        "ratio (min to max)",
        "pairs",
        "GB/s",
    )
    parts = []
    for workload, name in WORKLOAD_NAMES.items():
        rows = [_cells(one) for one in ratios if one.workload == workload]
        if rows:
            lines = [headings, ("---",) * len(headings), *rows]
            table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
            parts += [f"### {name}", table]
    return parts


def _ratio(one: PeerRatio) -> float:
    return one.ratio


def _case(one: PeerRatio) -> str:
    return f"**{one.ratio:.2f}x** {one.peer_name}, {one.shape} {one.precision}"


def _cells(one: PeerRatio) -> tuple[str, ...]:
    entry, share = one.entry, one.entry.get("quire_floor_share")
    ours, theirs = (entry[side]["median"] for side in ("quire", "other"))
    ratio = entry["ratio"]
    mark = f" {LOAD_MARK}" if is_loaded(one.machine) else ""
    return (
        one.shape + mark,
        one.precision,
        one.kv,
        _rate(ours),
        "" if share is None else f"{100 * share:.0f} %",
        f"{one.peer_name} ({one.peer_scheme}, {one.peer_kv})",
        _rate(theirs),
        f"**{ratio['median']:.2f}** ({ratio['least']:.2f} to {ratio['most']:.2f})",
        str(entry["pairs"]),
        f"{entry['quire_read_gb_per_s']:.0f}",
    )


def _of_file(path: Path) -> Iterator[PeerRatio]:
    record = json.loads(path.read_text())
    subject, engines = record["subject"], record["engines"]
    for workload, entries in record["summary"].items():
        for peer, entry in entries.items():
            if "ratio" in entry:
                yield PeerRatio(
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
    """Return a rate, with a decimal below 100."""
    return f"{tokens_per_s:,.{0 if tokens_per_s >= 100 else 1}f}"


def _plain(dtype: str) -> str:
    """Strip an engine's wrapping from a dtype: "<Type: 'uint8_t'>" is uint8_t."""
    return dtype.replace("<Type: '", "").replace("'>", "")
