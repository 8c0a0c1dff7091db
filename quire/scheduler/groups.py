"""Beam groups: the beams of one request on their slots, from the queue to their last word.

A group has `width` seats, a slot each, from its admission to its end. One of them computes the
prompt; then each step is decided when every beam's row has come back, and the beams of the next
one take seats: the first child of a beam stays where that was, any other branches off into a free
seat (shares the full blocks, copies the partial one, takes over the tokens). So a beam's row is
never planned ahead of its result: its goal is what it knows, and its next plan waits for the
decision. A preempted group goes as a whole and comes back as one beam computing what all begin
with, from which the others branch and compute their own tails.

Knows slots, blocks by number and tickets; what goes on is BeamSearch's to say. Always holds: no
plan in flight names a group that is to branch; members not running have no blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.records import (
    TOO_FEW_SEQUENCES,
    FinishReason,
    Request,
    RequestOutput,
    StepResult,
)
from quire.cache.manager import CacheManager
from quire.scheduler.beams import BeamSearch, Told, told_of
from quire.scheduler.draft import Branches, PlanDraft
from quire.scheduler.flight import Flight
from quire.scheduler.policy import Policy
from quire.scheduler.state import Bools, Index, Int32s, RunningState
from quire.scheduler.tenants import TenantBooks
from quire.scheduler.ticket import NO_SLOT, Ticket

_MISSING = (
    TOO_FEW_SEQUENCES + "{} sequences for {} streams: what is banned, or the grammar, leaves no "
    "more of them; lower n"
)


def check_beam_blocks(
    request: Request, max_tokens: int, max_running: int, max_kv_tokens: int, block_size: int
) -> None:
    """Raise unless the beams of `request`, of `max_tokens` tokens each, always fit into the cache.

    max_running, max_kv_tokens: requests that may run at once here, and KV tokens they may hold.
    Beams share the full blocks of the prompt. A search is rejected rather than shortened, because
    its answer must not depend on the size of the cache. Raises InvalidParameter, or ContextTooLong
    where the cache has no room for one new token a beam.
    """
    sampling, prompt = request.sampling, len(request.prompt_ids)
    width, param = sampling.num_sequences, "n" if sampling.best_of is None else "best_of"
    if width > max_running:
        raise InvalidParameter(
            f"{param} is {width} beams, which run at once; {max_running} requests may run at "
            "once here: lower it",
            param=param,
        )
    # Beside their own blocks: while beams branch, the blocks they are copied from are still held.
    shared, num_blocks = prompt // block_size, max_kv_tokens // block_size
    own_blocks = (num_blocks - shared - (width - 1)) // width
    fitting_tokens = (shared + own_blocks) * block_size
    if fitting_tokens <= prompt:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and {width} beams need one more each, in blocks of "
            f"their own; the KV cache has {max_kv_tokens} tokens for them: shorten the prompt, "
            f"lower {param} or give it more memory",
            param="prompt",
        )
    if fitting_tokens < max_tokens:
        needed = shared + width * (-(-max_tokens // block_size) - shared) + width - 1
        raise InvalidParameter(
            f"{width} beams of up to {max_tokens - prompt} new tokens need {needed} KV blocks of "
            f"{block_size} tokens; {num_blocks} are available: set max_tokens to at most "
            f"{fitting_tokens - prompt}, lower {param} or enlarge the KV cache",
            param="max_tokens",
        )


@dataclass(slots=True, eq=False)
class BeamGroup:
    """One request's beams. members: who runs, a seat each; the first stands in the queue for all.

    streams: who is told, the best sequence first. seats: of the search's beams. results: by beam,
    its next tokens. branches: (beam, from seat, to seat) still to be made, the first `shared`
    tokens in common; None: nothing is to be done before its rows can go on.
    """

    search: BeamSearch
    members: list[Ticket]
    streams: list[Ticket] = field(default_factory=list)
    seats: list[int] = field(default_factory=lambda: [0])
    results: dict[int, Told] = field(default_factory=dict)
    branches: list[tuple[int, int, int]] | None = None
    shared: int = 0
    resumes: bool = False

    @property
    def slots(self) -> list[int]:
        """Where its members run; empty while they wait."""
        return [member.slot for member in self.members if member.slot != NO_SLOT]

    @property
    def seat_slots(self) -> list[int]:
        """The slot of each beam, best first."""
        return [self.members[seat].slot for seat in self.seats]

    def num_tail_blocks(self, cache: CacheManager) -> int:
        """What members beside the first take from the pool when it comes back."""
        if not self.resumes:
            return 0
        each = cache.blocks_for(self.search.length) - self.shared // cache.block_size
        return (self.search.num_beams - 1) * each

    def pack(self) -> None:
        """It leaves its slots: what it knows is what it begins with when it comes back."""
        tokens, search = self.search.tokens, self.search
        for seat, member in enumerate(self.members):
            member.token_ids = tokens[min(seat, search.num_beams - 1)].copy()
            member.chain = None
        self.seats = list(range(search.num_beams))
        self.results.clear()
        self.branches = None
        self.resumes = search.num_beams > 1
        if self.resumes:
            self.shared = search.num_shared_tokens

    def decide(self) -> None:
        """All beams have their results: who goes on, and where."""
        beams = range(self.search.num_beams)
        told = [self.results[beam] for beam in beams]
        self.results = {}
        self.shared = self.search.length
        parents = self.search.advance(told)
        if self.search.is_done:
            return
        old, self.seats = self.seats, [-1] * len(parents)
        taken: set[int] = set()
        for beam, parent in enumerate(parents):
            if old[parent] not in taken:
                self.seats[beam] = old[parent]
                taken.add(old[parent])
        free = iter(seat for seat in range(len(self.members)) if seat not in taken)
        self.branches = []
        for beam, parent in enumerate(parents):
            if self.seats[beam] < 0:
                self.seats[beam] = next(free)
                self.branches.append((beam, old[parent], self.seats[beam]))


class BeamGroups:
    """All groups of a scheduler."""

    def __init__(
        self, state: RunningState, cache: CacheManager, policy: Policy, tenants: TenantBooks
    ) -> None:
        self._state = state
        self._cache = cache
        self._policy = policy
        self._tenants = tenants
        self._groups: dict[str, BeamGroup] = {}  # by group_id, while a stream waits for it
        self.running: list[BeamGroup] = []  # in order of admission

    def join(self, ticket: Ticket) -> Ticket | None:
        """One more stream to tell. Returns who enters the queue; None if somebody did already."""
        request = ticket.request
        group = self._groups.get(request.group_id)
        if group is None:
            search = BeamSearch(request, ticket.limit)
            members = [
                Ticket(
                    request=replace(
                        request,
                        request_id=f"{request.request_id} beam {seat}",
                        stream=request.stream + seat,
                    ),
                    arrival=ticket.arrival,
                    limit=ticket.limit,
                    token_ids=ticket.token_ids,
                )
                for seat in range(search.width)
            ]
            group = BeamGroup(search, members)
            for member in members:
                member.beams = group
                member.leader = None if member is members[0] else members[0]
            self._groups[request.group_id] = group
        ticket.beams = group
        group.streams.append(ticket)
        return group.members[0] if len(group.streams) == 1 else None

    def seat(self, first: Ticket, draft: PlanDraft) -> list[int]:
        """The members beside `first`, which just took its slot, take theirs; returns them."""
        group, state = first.beams, self._state
        assert group is not None, "a member knows its group"
        if group.resumes:  # the others wait until it has computed what all begin with
            group.branches = [(beam, 0, beam) for beam in range(1, group.search.num_beams)]
        self.running.append(group)
        for member in group.members[1:]:
            member.key = first.key
            slot = state.occupy(member, 0, 0)
            self._cache.name_slot(slot, member.request.request_id)
            self._policy.admitted(member, 0)
            self._tenants.runs(member)
            draft.add_admission(member.admission())
        slots = group.slots
        known = state.tokens.lengths[slots[0]]
        state.hold_at(slots[:1], int(known), computed=int(state.computed[slots[0]]))
        state.hold_at(slots[1:], 0, computed=0)
        return slots[1:]

    def leave(self, group: BeamGroup) -> None:
        """It runs no longer."""
        if group in self.running:
            self.running.remove(group)

    def forget(self, group: BeamGroup) -> list[Ticket]:
        """It is over; returns the streams nobody has told so."""
        self.leave(group)
        del self._groups[group.members[0].request.group_id]
        for member in group.members:
            member.alive = False
        return group.streams

    def to_branch(self) -> Iterator[BeamGroup]:
        """Running groups that cannot go on before they have branched, and can now."""
        for group in self.running.copy():
            if group.branches is None or not group.slots:
                continue
            trunk = group.members[0].slot
            if not group.resumes or self._state.computed[trunk] >= group.shared:
                yield group

    def num_needed(self, group: BeamGroup) -> int:
        """Blocks it takes to branch and to hold all it knows then."""
        cache, search = self._cache, group.search
        moved = {beam for beam, _, _ in group.branches or ()}
        each = cache.blocks_for(search.length) - group.shared // cache.block_size
        stay = [slot for beam, slot in enumerate(group.seat_slots) if beam not in moved]
        known = np.full(len(stay), search.length, np.int32)
        return len(moved) * each + int(cache.blocks_short(np.array(stay), known).sum())

    def branch(self, group: BeamGroup, draft: PlanDraft) -> None:
        """Beams take their seats, with blocks for all they know; their rows may go on."""
        cache, state, search = self._cache, self._state, group.search
        branches, group.branches = group.branches or [], None
        sources = [group.members[source].slot for _, source, _ in branches]
        targets = [group.members[seat].slot for _, _, seat in branches]
        copy_from, copy_to = cache.branch(sources, targets, group.shared, draft.step)
        slots = group.seat_slots
        for slot in slots:
            lacks = cache.capacities[slot] < search.length
            cache.extend(slot, search.length)
            if lacks or slot in targets:
                draft.add_deltas(cache.entries(slot))
        moved = Branches(slots=frozenset(slots), copy_from=copy_from, copy_to=copy_to)
        if group.resumes:  # tokens came with the admissions; the first goes on by itself
            group.resumes = False
            draft.add_branches(moved)
            state.hold_at(targets, search.length, computed=group.shared)
            return
        state.tokens.tokens[slots, : search.length] = search.tokens
        state.tokens.lengths[slots] = search.length
        draft.add_branches(
            replace(
                moved,
                sources=np.array(sources, np.int32),
                targets=np.array(targets, np.int32),
                known_slots=np.array(slots, np.int32),
                known_ids=search.tokens[:, -1].copy(),
            )
        )
        state.hold_at(slots, search.length, computed=group.shared)

    def take(
        self, index: Index, rows: Index, result: StepResult, entries: Index | None, now_ms: float
    ) -> list[BeamGroup]:
        """Rows `rows` of slots `index` are back; returns the groups whose search is done."""
        if not self.running:
            return []
        done = []
        for row in rows.tolist():
            ticket = self._state.ticket(int(index[row]))
            group = ticket.beams
            if group is None:
                continue
            entry = row if entries is None else int(entries[row])
            beam = group.seats.index(group.members.index(ticket))
            group.results[beam] = told_of(result, entry, group.search.num_logprobs)
            if len(group.results) == group.search.num_beams:
                first = group.members[0]
                if np.isnan(first.first_token_ms):
                    first.first_token_ms = now_ms
                group.decide()
                if group.search.is_done:
                    done.append(group)
        return done

    def one_each(self, index: Index) -> Index:
        """Which of the rows `index` stand for a request each: of a group's the last."""
        stands = np.ones(len(index), np.bool_)
        for rows in self._rows_of_groups(index):
            stands[rows[:-1]] = False
        return stands.nonzero()[0]

    def as_one(self, index: Index, needs: Int32s) -> None:
        """Put the needs of a group's rows on the last of them: no beam is another's victim."""
        for rows in self._rows_of_groups(index):
            needs[rows[-1]] = needs[rows].sum()

    def together(self, index: Index, goes_on: Bools) -> None:
        """Let a group's rows go on if its last may."""
        for rows in self._rows_of_groups(index):
            goes_on[rows] = goes_on[rows[-1]]

    def keep_together(
        self, index: Index, steps: NDArray[np.int64], flights: Iterable[Flight]
    ) -> None:
        """A plan that names one of a group's slots names all; see Roster.last_steps."""
        for group in self.running:
            rows = np.isin(index, group.slots)
            if rows.any():
                slots = np.array(group.slots, np.intp)
                named = (one.plan.step for one in flights if one.names(slots).any())
                steps[rows] = max(named, default=0)

    def outputs(self, group: BeamGroup, now_ms: float) -> list[RequestOutput]:
        """The last words of a search that is done: the best sequence to the first stream."""
        first, found = group.members[0], group.search.finished
        scores = first.take_scores()
        told = []
        for ticket in group.streams:
            ticket.cached_tokens, ticket.cache_use = first.cached_tokens, first.cache_use
            ticket.num_preemptions = first.num_preemptions
            ticket.first_scheduled_ms = first.first_scheduled_ms
            ticket.first_token_ms = first.first_token_ms
            ticket.last_token_ms = now_ms
            output, scores = ticket.output(scores=scores), None
            rank = ticket.request.stream - first.request.stream
            if rank >= len(found):
                error = _MISSING.format(len(found), first.request.sampling.n)
                told.append(replace(output, finish_reason=FinishReason.ERROR, error=error))
                continue
            one = found[rank]
            told.append(
                replace(
                    output,
                    token_ids=one.token_ids,
                    logprobs=one.logprobs,
                    finish_reason=one.finish_reason,
                    stop_id=one.stop_id,
                    score=one.score,
                )
            )
        return told

    def problems(self) -> list[str]:
        """Contradictions between groups and slots, in words."""
        return [
            f"beam group {name} runs in slots {group.slots} of {len(group.members)} seats"
            for name, group in self._groups.items()
            if len(group.slots) not in (0, len(group.members))
            or (group in self.running) != bool(group.slots)
        ]

    def _rows_of_groups(self, index: Index) -> Iterator[Index]:
        for group in self.running:
            rows = np.flatnonzero(np.isin(index, group.slots))
            if len(rows):
                yield rows
