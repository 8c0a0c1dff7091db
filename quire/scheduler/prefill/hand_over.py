"""HandOvers: blocks of prompts that other engines fetch are saved as soon as they are computed.

Each step makes findable what the last ones computed, and saves it with the plan being made, so that
a block can be sent while the next chunk of its prompt is computed. On the other side it loads what
has arrived for a prompt that has not begun, and answers which blocks of a request an engine lacks.
Knows digests and blocks; no connection. Always holds: a block is saved only after the steps that
computed it ended well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from quire.base.records import Int32s, Request
from quire.cache.chain import Chain, PrefixMatch
from quire.cache.manager import CacheManager
from quire.cache.tier_transfers import Fetch, TierTransfers
from quire.scheduler.interfaces import BlockLoads, StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.running_batch import RunningBatch


@dataclass(slots=True)
class _HandOver:
    """One prompt. num_users: `begin` without an `end` yet; num_queued: leading blocks that are
    saved, or will be with the next plans."""

    chain: Chain
    num_users: int
    num_queued: int = 0


class HandOvers(StepExtension):
    """The prompts of one scheduler that are handed over, by request id.

    A prompt may have two users: an engine that fetches its blocks, and a store. step_tokens: the
    largest step. loads: begun by `load`, those under way among them.
    """

    def __init__(
        self, batch: RunningBatch, cache: CacheManager, loads: BlockLoads, *, step_tokens: int
    ) -> None:
        assert cache.tiers is not None, "blocks are handed over through a tier"
        self._batch, self._cache, self._loads = batch, cache, loads
        self.step_tokens = step_tokens
        self._tiers: TierTransfers = cache.tiers
        self.loads: list[Fetch] = []
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

    def load(self, chain: Chain, token_ids: Int32s) -> Fetch | None:
        """Begin to load what the tier has of a prompt into the pool, before its request begins.

        What arrives is found like any free block, and kept for no request. None: there is nothing
        to load, or running requests may need the room.
        """
        self.loads = [load for load in self.loads if not load.has_ended]
        match, cache = self._cache.match(chain), self._cache
        coming = {
            key: block
            for load in self.loads
            for key, block in zip(load.keys, load.blocks.tolist(), strict=False)
        }
        before = [coming[key] for key in takewhile(coming.__contains__, match.rest)]
        if before:
            blocks = np.concatenate((match.blocks, np.array(before, np.int32)))
            match = PrefixMatch(match.chain, blocks)
        places = self._tiers.run(match.rest)
        active, num_left = self._batch.active, len(chain.digests) - len(before) + 1
        num_needed = cache.blocks_lacking(active, self._batch.goal[active]) + num_left
        if not len(places) or not cache.can_allocate(num_needed):
            return None
        self._loads.any_used = True
        fetch = cache.swap_in(match, places, token_ids)
        self._tiers.release(fetch)
        self.loads.append(fetch)
        return fetch

    def generating(self) -> tuple[int, int]:
        """Return how many running requests generate, and how many positions they attend to."""
        goals, scheduled = (
            one[self._batch.active] for one in (self._batch.goal, self._batch.scheduled)
        )
        generates = goals - scheduled <= 1
        return int(np.count_nonzero(generates)), int(goals[generates].sum())

    def begin(self, request_id: str, chain: Chain) -> None:
        """Save the blocks of `chain`, a request's prompt, once they are computed or found."""
        begun = self._open.get(request_id)
        # From the first block on: this user may want what the first one did not.
        self._open[request_id] = _HandOver(chain, 1 if begun is None else begun.num_users + 1)
        self.is_active = True

    def end(self, request_id: str) -> None:
        """Note that a user is done with a request: save what it left, and nothing more for it."""
        prompt = self._open.get(request_id)
        if prompt is not None:
            self._save(prompt)
            prompt.num_users -= 1
            if not prompt.num_users:
                del self._open[request_id]
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
