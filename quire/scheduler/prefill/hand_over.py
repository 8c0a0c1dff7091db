"""HandOvers: blocks of prompts that other engines fetch are saved as soon as they are computed.

Each step makes findable what the last ones computed, and saves it with the plan being made, so that
a block can be sent while the next chunk of its prompt is computed. Also answers which blocks of a
request an engine lacks. Knows digests and blocks; no connection. Always holds: a block is saved
only after the steps that computed it ended well.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base.records import Int32s, Request
from quire.cache.chain import Chain
from quire.cache.manager import CacheManager
from quire.cache.tier_transfers import TierTransfers
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.running_batch import RunningBatch


@dataclass(slots=True)
class _HandOver:
    """One prompt. num_queued: leading blocks that are saved, or will be with the next plans."""

    chain: Chain
    num_queued: int = 0


class HandOvers(StepExtension):
    """The prompts of one scheduler that are handed over, by request id."""

    def __init__(self, batch: RunningBatch, cache: CacheManager) -> None:
        assert cache.tiers is not None, "blocks are handed over through a tier"
        self._batch, self._cache = batch, cache
        self._tiers: TierTransfers = cache.tiers
        self._open: dict[str, _HandOver] = {}

    @property
    def num_to_save(self) -> int:
        """Blocks that the next plans save."""
        return self._tiers.num_to_save

    def chain(self, request: Request, token_ids: Int32s) -> Chain:
        """Return the chain of tokens of `request`."""
        chain = self._cache.chain(token_ids, request.cache_salt, request.tenant)
        assert chain is not None, "an exchange of blocks needs prefix caching"
        return chain

    def lacking(self, chain: Chain) -> tuple[bytes, ...]:
        """Return the digests of the blocks after those that pool and tier have."""
        rest = self._cache.match(chain).rest
        return rest[len(self._tiers.run(rest)) :]

    def begin(self, request_id: str, chain: Chain) -> None:
        """Save the blocks of `chain` once they are computed or found."""
        self._open[request_id] = _HandOver(chain)
        self.is_active = True

    def end(self, request_id: str) -> None:
        """Note that a request has ended: save what it left, and nothing after that."""
        prompt = self._open.pop(request_id, None)
        if prompt is not None:
            self._save(prompt)
        self.is_active = bool(self._open)

    def begin_step(self, step: Step) -> None:
        """See StepExtension."""
        batch = self._batch
        active = batch.active
        if len(active):
            self._cache.register(active, batch.computed[active], batch.tokens.tokens)
        for prompt in self._open.values():
            self._save(prompt)

    def _save(self, prompt: _HandOver) -> None:
        digests = prompt.chain.digests[prompt.num_queued :]
        blocks = self._cache.index.table.longest_run(digests)
        self._tiers.save_soon(blocks)
        prompt.num_queued += len(blocks)
