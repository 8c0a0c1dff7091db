"""Print findings: one block each, wrapped to the terminal's width, and a count at the end.

Colours only where the output is a terminal and NO_COLOR is not set. The JSON object has the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from quire.doctor.finding import Effect, Finding, Verdict, worst
from quire.doctor.situation import time_text

MIN_WIDTH, MAX_WIDTH = 60, 100
_COLORS = {Verdict.OK: "32", Verdict.WARNING: "33", Verdict.PROBLEM: "1;31"}
_WORDS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.PROBLEM: "PROBLEM"}
_WORD_WIDTH = 9
_MAX_SHOWN_EFFECTS = 2
_NAMES = {
    "ttft_p95_ms": "TTFT p95",
    "tpot_p95_ms": "TPOT p95",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p99_ms": "TPOT p99",
    "output_tokens_per_s": "tokens/s",
    "preemptions_per_100": "preemptions per 100 requests",
}
# Simulated with all requests at once, so that latencies mean nothing.
_THROUGHPUT = "output_tokens_per_s"
# What an effect shows beside the metric it is for.
_ALSO = ("ttft_p95_ms", "tpot_p95_ms")


def outcome_of(findings: Sequence[Finding], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a run."""
    return {
        **about,
        "verdict": worst(findings).value,
        "findings": [finding.record() for finding in findings],
    }


def report_text(title: str, findings: Sequence[Finding], *, width: int, color: bool) -> str:
    """Return the report of a run."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    name_width = max(len(finding.check) for finding in findings) + 2
    lines = [*wrap(title, width), ""]
    for finding in findings:
        lines += _block(finding, name_width, width, color=color)
    counts = Counter(finding.verdict for finding in findings)
    lines += ["", ", ".join(_counted(counts[one], one) for one in reversed(Verdict))]
    return "\n".join(lines)


def _block(finding: Finding, name_width: int, width: int, *, color: bool) -> list[str]:
    word = _WORDS[finding.verdict].ljust(_WORD_WIDTH)
    if color:
        word = f"\033[{_COLORS[finding.verdict]}m{word}\033[0m"
    margin = " " * (_WORD_WIDTH + name_width)
    first, *rest = wrap(finding.found, width - len(margin)) or [""]
    lines = [f"{word}{finding.check.ljust(name_width)}{first}", *(margin + line for line in rest)]
    if finding.verdict is Verdict.OK:
        return lines
    for name, value in finding.evidence.items():
        lines += _hanging(f"{name}: {value}", "| ", margin, width)
    if finding.action:
        lines += _hanging(finding.action, "-> ", margin, width)
    for number, effect in enumerate(finding.effects[:_MAX_SHOWN_EFFECTS]):
        lines += _hanging(effect.lever.text, "try " if number == 0 else "or  ", margin, width)
        lines += _hanging(_effect_text(effect, finding.metric), "      ", margin, width)
    if not finding.effects and finding.levers:
        levers = ", or ".join(lever.text for lever in finding.levers)
        lines += _hanging(levers, "try ", margin, width)
    if finding.note:
        lines += _hanging(finding.note, "(  ", margin, width, end=")")
    return lines


def _hanging(text: str, mark: str, margin: str, width: int, *, end: str = "") -> list[str]:
    """Return text behind a mark, its further lines aligned."""
    mark = mark.rstrip("( ") + "(" if mark.startswith("(") else mark
    parts = wrap(text + end, width - len(margin) - len(mark), break_on_hyphens=False) or [""]
    return [margin + (mark if at == 0 else " " * len(mark)) + part for at, part in enumerate(parts)]


def _effect_text(effect: Effect, metric: str) -> str:
    """Return metrics without and with a lever: the one it is for, then the others."""
    names = dict.fromkeys((metric, *(() if metric == _THROUGHPUT else _ALSO)))
    shown = [
        f"{_NAMES[name]} {_value(name, effect.before)} -> {_value(name, effect.after)}"
        for name in names
        if name in _NAMES and name in effect.before and name in effect.after
    ]
    return ", ".join(shown) + " (simulated)"


def _value(name: str, metrics: Mapping[str, float]) -> str:
    value = metrics[name]
    if name.endswith("_ms"):
        return time_text(value / 1e3)
    return f"{value:,.0f}" if name == _THROUGHPUT else f"{value:.3g}"


def _counted(count: int, verdict: Verdict) -> str:
    if verdict is Verdict.OK:
        return f"{count} ok"
    return f"{count} {verdict.value}{'' if count == 1 else 's'}"
