"""The file of a comparison: pairs of samples and their summary.

Written after each pair, by a rename, so that a run can be stopped and continued. Always holds: a
file has one machine, one shape, one precision, one number of threads and one state of Quire; other
samples are rejected. A workload has a ratio only if llama.cpp and OpenVINO both have enough kept
pairs: five, or fewer if all put the peer far behind (is_settled).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDED_PEERS = ("llama.cpp", "openvino")
MIN_PAIRS = 5
# A peer that took three times as long in two pairs is far from a ratio of 1.3; more of its minutes
# would not change the result.
FAR_BEHIND, FAR_BEHIND_PAIRS = 3.0, 2
# The name of each workload's rate.
HEADLINES = {
    "w1": "decode_tokens_per_s",
    "w2": "prefill_tokens_per_s",
    "w3": "total_tokens_per_s",
    "w4": "total_tokens_per_s",
}
# A peer's own benchmark program is measured beside its server; the better one counts.
TOOL_SUFFIX = " tool"


class RecordMismatch(Exception):
    """The file belongs to another machine, setting or state of Quire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of a file, which must match to continue it."""

    shape: str
    precision: str
    threads: int
    quire: str
    cpu: str
    quire_kv: str | None = None  # Quire's KV dtype, if the settings override it


class Record:
    """Pairs of one comparison, in memory and on disk."""

    def __init__(self, path: Path, subject: Subject, machine: Mapping[str, object]) -> None:
        self.path = path
        about = {name: getattr(subject, name) for name in Subject.__dataclass_fields__}
        if path.exists():
            self.content: dict[str, Any] = json.loads(path.read_text())
            known = self.content["subject"]
            differing = [name for name, value in about.items() if known.get(name) != value]
            if differing:
                raise RecordMismatch(
                    f"{path} is about another "
                    + ", ".join(f"{n} ({known.get(n)}, now {about[n]})" for n in differing)
                    + "; take another --out, or --fresh to begin it anew"
                )
        else:
            self.content = {
                "bench": "compare",
                "subject": about,
                "machine": dict(machine),
                "engines": {},
                "checks": {},
                "pairs": [],
                "failures": [],
                "summary": {},
            }

    def add_pair(self, pair: dict[str, Any]) -> None:
        """Keep a pair: workload, peer, quire and other (samples), kept, why; drop an
        earlier failure.
        """
        key = pair["workload"], pair["peer"]
        self.content["failures"] = [
            one for one in self.content["failures"] if (one["workload"], one["peer"]) != key
        ]
        self.content["pairs"].append(pair)
        self.save()

    def add_failure(self, workload: str, peer: str, why: str) -> None:
        """Record once that a peer could not be measured."""
        failure = {"workload": workload, "peer": peer, "why": why[:600]}
        if failure not in self.content["failures"]:
            self.content["failures"].append(failure)
        self.save()

    def kept(self, workload: str, peer: str) -> list[dict[str, Any]]:
        """Return pairs that count."""
        return [
            pair
            for pair in self.content["pairs"]
            if pair["kept"] and (pair["workload"], pair["peer"]) == (workload, peer)
        ]

    def num_tried(self, workload: str, peer: str) -> int:
        """Return how many pairs were taken, kept or not."""
        return sum(
            (pair["workload"], pair["peer"]) == (workload, peer) for pair in self.content["pairs"]
        )

    def save(self) -> None:
        """Write the file, with its summary."""
        self.content["summary"] = self.summary()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.rename(self.path)

    def summary(self) -> dict[str, Any]:
        """Return, for each workload and peer, both medians, and the ratio if it may be reported."""
        entries: dict[str, Any] = {}
        met = dict.fromkeys((pair["workload"], pair["peer"]) for pair in self.content["pairs"])
        for workload, peer in met:
            pairs = self.kept(workload, peer)
            if pairs:
                entry = _medians(pairs, HEADLINES[workload])
                if not (self.is_reportable(workload) and is_settled(pairs, MIN_PAIRS)):
                    del entry["ratio"]
                entries.setdefault(workload, {})[peer] = entry
        return entries

    def is_reportable(self, workload: str) -> bool:
        """Return whether the workload's ratios may be reported.

        The required peers must have enough pairs, and the tokens of all must have been checked.
        """
        checked = self.content["checks"]
        return all(
            is_settled(self.kept(workload, peer), MIN_PAIRS) and checked.get(peer, {}).get("ok")
            for peer in NEEDED_PEERS
        )

    def strongest(self, workload: str) -> tuple[str, dict[str, Any]] | None:
        """Return the peer with the lowest ratio and its entry; None if no ratio may be reported.

        A peer's own tool counts as the peer.
        """
        entries = {
            peer: entry
            for peer, entry in self.summary().get(workload, {}).items()
            if "ratio" in entry
        }
        if not entries:
            return None
        peer = min(entries, key=lambda name: float(entries[name]["ratio"]["median"]))
        return peer, entries[peer]


def is_settled(kept: Sequence[Mapping[str, Any]], wanted: int) -> bool:
    """Return whether kept pairs suffice: `wanted`, or fewer that put the peer far behind."""
    if len(kept) >= wanted:
        return True
    headline = HEADLINES[kept[0]["workload"]] if kept else ""
    return len(kept) >= FAR_BEHIND_PAIRS and all(
        pair["quire"]["rates"][headline] >= FAR_BEHIND * pair["other"]["rates"][headline]
        for pair in kept
    )


def kv_dtype_of(engine: Mapping[str, Any], workload: str) -> str:
    """Return the KV dtype of an engine in a workload."""
    return str(engine.get("kv_dtypes", {}).get(workload, ""))


def _medians(pairs: list[dict[str, Any]], headline: str) -> dict[str, Any]:
    quire = [float(pair["quire"]["rates"][headline]) for pair in pairs]
    other = [float(pair["other"]["rates"][headline]) for pair in pairs]
    entry: dict[str, Any] = {
        "pairs": len(pairs),
        "rate": headline,
        "quire": _spread(quire),
        "other": _spread(other),
        "ratio": _spread([ours / theirs for ours, theirs in zip(quire, other, strict=True)]),
    }
    for side in ("quire", "other"):
        for name in ("floor_share", "read_gb_per_s", "peak_rss_bytes", "own_cores"):
            values = [pair[side][name] for pair in pairs if pair[side].get(name) is not None]
            if values:
                entry[f"{side}_{name}"] = statistics.median(values)
    return entry


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
