"""Examine this machine: read its facts, check them, and run the probes.

Works without the compiled module, which only the probes need: a broken one is a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.doctor.finding import Finding
from quire.doctor.machine_checks import machine_findings
from quire.doctor.machine_facts import MachineFacts, read_machine


def examine_machine(
    *, places: Mapping[str, Path], asked_isa: str, quick: bool
) -> tuple[MachineFacts, list[Finding]]:
    """Return the facts and findings of this machine. quick: without the probes that compute."""
    facts = read_machine(places=places, asked_isa=asked_isa)
    findings = machine_findings(facts)
    if not quick and not facts.native.error:
        from quire.doctor.probes import bandwidth, self_test

        findings.append(bandwidth(facts.num_cores, facts.memory.available_bytes))
        findings.append(self_test(facts.num_cores))
    return facts, findings
