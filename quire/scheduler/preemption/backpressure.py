"""Backpressure: requests are paused while their client reads too slowly, or is stopped.

A paused request leaves its slot as soon as no plan in flight names it. What it computed stays
findable, so it costs running requests nothing and goes on, when it is released, behind the tokens
it has; if its blocks are needed meanwhile they are reused like any others. Beams are not paused:
they report nothing before their end. Always holds: a paused request that has left its slot is not
in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quire.base.timeline import EventKind
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.preemption.preemptor import Preemptor
from quire.scheduler.request_table import RequestTable
from quire.scheduler.sequence import NO_SLOT, SequenceState


class Backpressure(StepExtension):
    """The paused requests of a scheduler. num_held_total: how often a request was paused."""

    def __init__(self, requests: RequestTable, preemptor: Preemptor) -> None:
        self._requests = requests
        self._preemptor = preemptor
        self._held: dict[str, SequenceState] = {}
        self._leaving: dict[str, SequenceState] = {}  # of these, those that may still be in a slot
        self._of_stopped: dict[str, SequenceState] = {}  # of these, those of hold_client only
        self.num_held_total = 0

    @property
    def held(self) -> list[SequenceState]:
        """The live requests that are paused."""
        return [sequence for sequence in self._held.values() if sequence.alive]

    def hold(self, sequence: SequenceState) -> None:
        """Pause `sequence` until it is released."""
        self._of_stopped.pop(sequence.request.request_id, None)
        self._hold(sequence)

    def hold_client(
        self, prefix: str, sequences: Mapping[str, SequenceState], *, is_held: bool
    ) -> None:
        """Pause the requests of a client, of those that live, until it is released, or they are; or
        let those go on that this has paused. prefix: of their ids."""
        if not is_held:
            for request_id in [one for one in self._of_stopped if one.startswith(prefix)]:
                sequence = self._of_stopped.pop(request_id)
                if sequence.alive:
                    self.release(sequence)
            return
        for request_id, sequence in sequences.items():
            if request_id.startswith(prefix) and not sequence.is_held:
                self._hold(sequence)
                if sequence.is_held:
                    self._of_stopped[request_id] = sequence

    def _hold(self, sequence: SequenceState) -> None:
        if sequence.is_held or sequence.group is not None:
            return
        sequence.is_held = True
        self.num_held_total += 1
        self.is_active = True
        self._held[sequence.request.request_id] = sequence
        if sequence.slot == NO_SLOT:
            sequence.history.note(self._requests.now_ms, EventKind.PAUSED)
            self._requests.set_aside(sequence)
        else:
            self._leaving[sequence.request.request_id] = sequence

    def release(self, sequence: SequenceState) -> None:
        """Let `sequence` go on."""
        if not sequence.is_held:
            return
        sequence.is_held = False
        self._of_stopped.pop(sequence.request.request_id, None)
        del self._held[sequence.request.request_id]
        self._leaving.pop(sequence.request.request_id, None)
        if sequence.slot == NO_SLOT:
            sequence.history.note(self._requests.now_ms, EventKind.RESUMED)
            self._requests.enqueue(sequence)

    def begin_step(self, step: Step) -> None:
        """Take held requests out of their slots; pause those in flight until they have landed."""
        self._held = {name: one for name, one in self._held.items() if one.alive}
        if self._of_stopped:
            self._of_stopped = {name: one for name, one in self._of_stopped.items() if one.alive}
        in_flight = {}
        for name, sequence in self._leaving.items():
            if sequence.slot == NO_SLOT:  # it has ended, or was preempted
                continue
            if self._requests.last_steps(np.array([sequence.slot]))[0]:
                in_flight[name] = sequence
            else:
                self._preemptor.set_aside(sequence.slot)
        self._leaving = in_flight
        self.is_active = bool(self._held)
        step.paused += [sequence.slot for sequence in in_flight.values()]
