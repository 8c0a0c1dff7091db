"""TenantCeilings: keeps tenants at or below their ceiling of KV blocks.

Exists only where a tenant has a ceiling. Always holds: the first request of a tenant is not
preempted for its ceiling.
"""

from __future__ import annotations

from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.preemption.preemptor import Preemptor


class TenantCeilings(StepExtension):
    """Preempts requests of tenants that have grown beyond their ceilings."""

    is_active = True

    def __init__(self, preemptor: Preemptor) -> None:
        self._preemptor = preemptor

    def begin_step(self, step: Step) -> None:
        """Preempt the last requests above a ceiling; pause those in flight."""
        step.paused += self._preemptor.keep_ceilings()
