"""PrefixPins: pins the prefixes that requests mark, while and after they run.

What a request finds of its prefix is pinned when it is admitted, the rest when it leaves its slot,
because its blocks become findable then. Knows requests; quire.cache.pins knows which blocks are
pinned and for how long. Always holds: no code of this file runs while no request has marked a
prefix and no pin is left; a pin displaces no request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cache.pins import Pins
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.sequence import NO_SLOT

if TYPE_CHECKING:
    from quire.cache.chain import Chain
    from quire.cache.manager import CacheManager
    from quire.scheduler.plan_builder import Step
    from quire.scheduler.sequence import SequenceState


@dataclass(slots=True)
class _Marked:
    """A live request with a marked prefix. spans: (blocks, lifetime), longest lifetime first."""

    sequence: SequenceState
    chain: Chain
    spans: tuple[tuple[int, float], ...]
    was_running: bool = True


class PrefixPins(StepExtension):
    """The pins of a scheduler. fields: the counts as fields of EngineStats, always current."""

    def __init__(self, cache: CacheManager, share: float) -> None:
        self._cache, self._share = cache, share
        self._pins: Pins | None = None  # made with the first marked prefix
        self._marked: dict[str, _Marked] = {}
        self._tokens_total = self._num_evicted = 0
        self.fields: dict[str, Any] = {}

    def begin(
        self, sequence: SequenceState, num_found: int, now_ms: float
    ) -> tuple[tuple[float, int], ...]:
        """Pin what an admitted request found of its prefix; return which tokens will be pinned.

        Returns (lifetime in ms, tokens) of those that it computes itself.
        """
        pins, chain = self._pins, sequence.chain
        if chain is None or not self._share:
            return ()
        if pins is None:
            pins = self._pins = Pins(self._cache, self._share)
        size = self._cache.block_size
        marks = sorted(sequence.request.cache_pins, key=lambda pin: -pin.lifetime_ms)
        spans = tuple((pin.num_tokens // size, pin.lifetime_ms) for pin in marks)
        marked = self._marked[sequence.request.request_id] = _Marked(sequence, chain, spans)
        self._pin(marked, now_ms)
        self.is_active = True
        created, at = [], num_found
        for count, lifetime_ms in spans:
            end = min(count, pins.max_blocks)
            if end > at:
                created.append((lifetime_ms, (end - at) * size))
                at = end
        self._tokens_total += sum(tokens for _, tokens in created)
        self._count(pins)
        return tuple(created)

    def begin_step(self, step: Step) -> None:
        """See _settle."""
        self._settle(step.now_ms)

    def counts(self, now_ms: float) -> dict[str, Any]:
        """Return `fields` as of now."""
        self._settle(now_ms)
        return self.fields

    def _settle(self, now_ms: float) -> None:
        """Pin the prefixes of requests that left their slots; end pins that are due."""
        pins = self._pins
        assert pins is not None, "it is active after a prefix was marked"
        changed = self._num_evicted != self._cache.evicted_blocks_total
        for request_id, marked in [*self._marked.items()]:
            sequence = marked.sequence
            is_running = sequence.alive and sequence.slot != NO_SLOT
            if marked.was_running and not is_running:
                self._pin(marked, now_ms)
                changed = True
            marked.was_running = is_running
            if not sequence.alive:
                del self._marked[request_id]
        if now_ms >= pins.next_end_ms:
            pins.expire(now_ms)
            changed = True
        if changed:
            self._count(pins)
            self.is_active = bool(self._marked) or pins.num_blocks > 0

    def _pin(self, marked: _Marked, now_ms: float) -> None:
        assert self._pins is not None, "it is made before"
        most = max(count for count, _ in marked.spans)
        used_ms = marked.sequence.times.last_token_ms
        if math.isnan(used_ms):
            used_ms = now_ms
        found = self._cache.index.table.longest_run(marked.chain.digests[:most])
        if len(found):
            spans = [(count, used_ms + lifetime_ms) for count, lifetime_ms in marked.spans]
            self._pins.pin(found, marked.sequence.request.tenant, spans, now_ms)

    def _count(self, pins: Pins) -> None:
        self._num_evicted = self._cache.evicted_blocks_total
        self.fields = {
            "pinned_blocks": pins.num_blocks,
            "pinned_tokens_total": self._tokens_total,
            "expired_pins_total": pins.expired_total,
            "dropped_pins_total": pins.dropped_total,
            "evicted_pins_total": pins.evicted_total,
        }
