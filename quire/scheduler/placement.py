"""Placement: where a waiting request's keys and values can come from when it is admitted.

Either from a running leader of its group (a fork), or from the prefix index and on from a tier, or
from nowhere.
Decides nothing about order or budget and changes no books.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.base.records import NO_INTS, Int32s
from quire.cache.chain import PrefixMatch
from quire.cache.manager import CacheManager
from quire.scheduler.gate import prompt_is_computed
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket


class Placement(NamedTuple):
    """start: first position to compute. stored: positions before it lie in shared blocks.

    start is stored, but for a request whose known tokens are all there: its last token is
    computed again, without storing, because its logits are needed. num_new_blocks: what it
    takes from the pool until all its known tokens are computed, those of its beams too. places:
    where a tier goes on with its chain after `match`; they could be fetched first.
    """

    start: int
    stored: int
    num_new_blocks: int
    match: PrefixMatch | None = None
    places: Int32s = NO_INTS
    leader_slot: int | None = None


def place(
    ticket: Ticket, cache: CacheManager, state: RunningState, match: PrefixMatch | None = None
) -> Placement:
    """Return the cheapest way to admit `ticket` now. match: of its chain, where it is known."""
    known = len(ticket.token_ids)
    total_blocks = cache.blocks_for(known) + ticket.num_tail_blocks(cache)
    leader = ticket.leader
    may_fork = leader is not None and not ticket.was_admitted and prompt_is_computed(leader, state)
    if leader is not None and may_fork and cache.can_fork(leader.slot, known):
        copied = int(known % cache.block_size > 0)
        return Placement(
            start=known - 1, stored=known, num_new_blocks=copied, leader_slot=leader.slot
        )
    if ticket.chain is None:
        ticket.chain = cache.chain(
            ticket.token_ids, ticket.request.cache_salt, ticket.request.tenant
        )
    if ticket.chain is None:
        return Placement(start=0, stored=0, num_new_blocks=total_blocks)
    if match is None:
        match = cache.match(ticket.chain)
    if ticket.has_positions_to_score:  # what the index holds has no logits
        blocks = match.blocks[: ticket.num_scored // cache.block_size]
        match = PrefixMatch(match.chain, blocks)
        places = NO_INTS
    else:
        places = NO_INTS if cache.tiers is None else cache.tiers.run(match.rest)
    stored = len(match.blocks) * cache.block_size
    return Placement(
        start=min(stored, known - 1),
        stored=stored,
        num_new_blocks=total_blocks - len(match.blocks),
        match=match,
        places=places,
    )
