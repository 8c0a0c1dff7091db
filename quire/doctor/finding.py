"""Finding: the result of one check, with a verdict, the evidence, and what to do.

A check is a function that returns findings; it prints nothing. Levers are changes that could help;
prediction.py adds their predicted effects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The result of a check, the best first."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change that could help.

    text: the flags as they are written, or what else to do. change: new values of fields of a
    Scenario (scenario.py), by name; empty for a change that is not simulated.
    """

    text: str
    change: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A lever's predicted effect: metrics of the simulated load by name, without and with it."""

    lever: Lever
    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    check: a short name. found: what was found, one sentence. action: what to do, "" for nothing.
    evidence: what the verdict rests on, by the name of a metric or file. levers: candidates to
    predict, the most plausible first; metric: the metric of a simulation that they shall improve.
    effects: predictions, the best lever first. note: why there is no prediction.
    """

    check: str
    verdict: Verdict
    found: str
    action: str = ""
    evidence: Mapping[str, str] = field(default_factory=dict)
    levers: tuple[Lever, ...] = ()
    metric: str = ""
    effects: tuple[Effect, ...] = ()
    note: str = ""

    def record(self) -> dict[str, Any]:
        """Return the finding for JSON output."""
        return {
            "check": self.check,
            "verdict": self.verdict.value,
            "found": self.found,
            "action": self.action,
            "evidence": dict(self.evidence),
            "levers": [lever.text for lever in self.levers],
            "metric": self.metric,
            "effects": [
                {
                    "lever": effect.lever.text,
                    "before": dict(effect.before),
                    "after": dict(effect.after),
                }
                for effect in self.effects
            ],
            "note": self.note,
        }


def ok(check: str, found: str, **evidence: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check=check, verdict=Verdict.OK, found=found, evidence=evidence)


def warning(check: str, found: str, action: str, **evidence: str) -> Finding:
    """Return a finding that may cost speed or safety."""
    return Finding(
        check=check, verdict=Verdict.WARNING, found=found, action=action, evidence=evidence
    )


def problem(check: str, found: str, action: str, **evidence: str) -> Finding:
    """Return a finding that must be fixed."""
    return Finding(
        check=check, verdict=Verdict.PROBLEM, found=found, action=action, evidence=evidence
    )


def worst(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict; OK where there are no findings."""
    order = list(Verdict)
    return max((one.verdict for one in findings), key=order.index, default=Verdict.OK)
