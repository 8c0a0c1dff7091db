"""Beam groups: the beams of one request on their slots, from the queue to their last output.

A group has `width` slots from its admission to its end. One of them computes the prompt; then each
step is decided when every beam's row has come back, and the beams of the next one get slots: the
first child of a beam stays in its slot, any other branches into a free one (shares the full blocks,
copies the partial one, takes over the tokens). So a beam's row is never planned ahead of its
result: its goal is what it knows, and its next plan waits for the decision. A preempted group goes
as a whole and comes back as one beam that computes the common prefix, from which the others branch
and compute their own tails.

Knows slots, blocks by number and sequences; BeamSearch decides which beams go on. Always holds: no
plan in flight names a group that is to branch; members that do not run have no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

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
from quire.scheduler.beam.beam_search import BeamCandidates, BeamSearch, beam_candidates_of
from quire.scheduler.in_flight import InFlightPlans
from quire.scheduler.interfaces import StepExtension
from quire.scheduler.plan_builder import Branches, PlanBuilder, Step
from quire.scheduler.prompt_scores import take_scores
from quire.scheduler.running_batch import Bools, Index, Int32s, RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceGroup, SequenceState
from quire.scheduler.step_budget import BlockShares
from quire.scheduler.waiting_queue import QueuePolicy

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
    """The beams of one request.

    members: one per slot; the first waits in the queue for all. streams: one per requested
    sequence, for the best first. member_of_beam: the number of the member that runs each beam of
    the search. results: candidates by beam. branches: (beam, from member, to member) still to be
    made, with the first `shared` tokens in common; None: nothing is to be done before its rows can
    go on. resumes: it was preempted.
    """

    search: BeamSearch
    members: list[SequenceState]
    streams: list[SequenceState] = field(default_factory=list)
    member_of_beam: list[int] = field(default_factory=lambda: [0])
    results: dict[int, BeamCandidates] = field(default_factory=dict)
    branches: list[tuple[int, int, int]] | None = None
    shared: int = 0
    resumes: bool = False

    @property
    def slots(self) -> list[int]:
        """The slots of its members; empty while they wait."""
        return [member.slot for member in self.members if member.slot != NO_SLOT]

    @property
    def num_candidates(self) -> int:
        """How many candidates the worker reports of each row."""
        return self.search.num_candidates

    @property
    def beam_slots(self) -> list[int]:
        """The slot of each beam, best first."""
        return [self.members[number].slot for number in self.member_of_beam]

    def num_tail_blocks(self, cache: CacheManager) -> int:
        """Return the blocks that members beside the first need when it comes back."""
        if not self.resumes:
            return 0
        each = cache.blocks_for(self.search.length) - self.shared // cache.block_size
        return (self.search.num_beams - 1) * each

    def pack(self) -> None:
        """Keep the tokens of all beams: what the group begins with when it comes back."""
        tokens, search = self.search.tokens, self.search
        for number, member in enumerate(self.members):
            member.token_ids = tokens[min(number, search.num_beams - 1)].copy()
            member.chain = None
        self.member_of_beam = list(range(search.num_beams))
        self.results.clear()
        self.branches = None
        self.resumes = search.num_beams > 1
        if self.resumes:
            self.shared = search.num_shared_tokens

    def decide(self) -> None:
        """Decide which beams go on, and in which slots, once all have their candidates."""
        beams = range(self.search.num_beams)
        candidates = [self.results[beam] for beam in beams]
        self.results = {}
        self.shared = self.search.length
        parents = self.search.advance(candidates)
        if self.search.is_done:
            return
        old, self.member_of_beam = self.member_of_beam, [-1] * len(parents)
        taken: set[int] = set()
        for beam, parent in enumerate(parents):
            if old[parent] not in taken:
                self.member_of_beam[beam] = old[parent]
                taken.add(old[parent])
        free = iter(one for one in range(len(self.members)) if one not in taken)
        self.branches = []
        for beam, parent in enumerate(parents):
            if self.member_of_beam[beam] < 0:
                self.member_of_beam[beam] = next(free)
                self.branches.append((beam, old[parent], self.member_of_beam[beam]))


class Room(Protocol):
    """Finds blocks for a group that branches."""

    def has_room(self, index: Index, needs: Int32s) -> bool:
        """Return whether needs[i] blocks are free for slots index[i]."""

    def make_room(self, index: Index, over: Index, needs: Int32s) -> Bools:
        """Preempt for rows `over` of slots `index`; return which rows may advance."""


class BeamGroups(StepExtension):
    """All beam groups of a scheduler. running: those with slots, in order of admission."""

    def __init__(
        self, batch: RunningBatch, cache: CacheManager, policy: QueuePolicy, shares: BlockShares
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._policy = policy
        self._tenants = shares
        self._groups: dict[str, BeamGroup] = {}  # by group_id, while a stream waits for it
        self.running: list[BeamGroup] = []
        self._room: Room | None = None

    def connect(self, room: Room) -> None:
        """Take what finds blocks for groups that branch."""
        self._room = room

    def begin_step(self, step: Step) -> None:
        """Let decided groups branch; note in `step` where blocks ran short for one."""
        assert self._room is not None, "connected before the first step"
        for group in self.to_branch():
            needs = np.array([self.num_needed(group)], np.int32)
            last = np.array(group.slots[-1:], np.intp)
            may_branch = self._room.has_room(last, needs)
            if not may_branch:
                step.has_room = False
                index = self._batch.active
                row = (index == last).nonzero()[0]
                rows = self._room.make_room(index, row, needs)
                may_branch = bool(rows[row[0]])
            if may_branch:
                self.branch(group, step.builder)

    def add(self, sequence: SequenceState) -> SequenceState | None:
        """Add a stream; return the sequence that enters the queue for its group.

        None if one did so before.
        """
        request = sequence.request
        group = self._groups.get(request.group_id)
        if group is None:
            search = BeamSearch(request, sequence.limit)
            members = [
                SequenceState(
                    request=replace(
                        request,
                        request_id=f"{request.request_id} beam {number}",
                        stream=request.stream + number,
                    ),
                    arrival=sequence.arrival,
                    limit=sequence.limit,
                    token_ids=sequence.token_ids,
                )
                for number in range(search.width)
            ]
            group = BeamGroup(search, members)
            for member in members:
                member.group = group
                member.leader = None if member is members[0] else members[0]
            self._groups[request.group_id] = group
        sequence.group = group
        group.streams.append(sequence)
        return group.members[0] if len(group.streams) == 1 else None

    def allocate_slots(self, first: SequenceState, builder: PlanBuilder) -> list[int]:
        """Give the members beside `first`, which just got its slot, theirs; return these."""
        group, batch = self._group_of(first), self._batch
        if group.resumes:  # the others wait until it has computed what all begin with
            group.branches = [(beam, 0, beam) for beam in range(1, group.search.num_beams)]
        self.running.append(group)
        self.is_active = True
        for member in group.members[1:]:
            member.entry.key = first.entry.key
            slot = batch.occupy(member, 0, 0)
            self._cache.name_slot(slot, member.request.request_id)
            self._policy.admitted(member, 0)
            self._tenants.started(member)
            builder.add_admission(member.admission())
        slots = group.slots
        known = batch.tokens.lengths[slots[0]]
        batch.hold_at(slots[:1], int(known), computed=int(batch.computed[slots[0]]))
        batch.hold_at(slots[1:], 0, computed=0)
        return slots[1:]

    def computed_by_all(self, index: Index, computed: Int32s) -> Int32s:
        """Return computed[i], less where other beams are still to begin within slot index[i].

        They see blocks that the beam in this slot has passed.
        """
        computed = computed.copy()
        for group in self.running:
            if group.resumes and group.branches is not None and group.slots:
                first = index == group.members[0].slot
                computed[first] = np.minimum(computed[first], group.shared)
        return computed

    def release(self, group: SequenceGroup) -> None:
        """Note that a group has left its slots."""
        self.running = [one for one in self.running if one is not group]
        self.is_active = bool(self.running)

    def forget(self, group: SequenceGroup) -> None:
        """Note that a group has ended."""
        self.release(group)
        del self._groups[group.members[0].request.group_id]
        for member in group.members:
            member.alive = False

    def _group_of(self, sequence: SequenceState) -> BeamGroup:
        return self._groups[sequence.request.group_id]

    def to_branch(self) -> Iterator[BeamGroup]:
        """Yield running groups that must branch before they go on, and can now."""
        for group in self.running.copy():
            if group.branches is None or not group.slots:
                continue
            trunk = group.members[0].slot
            if not group.resumes or self._batch.computed[trunk] >= group.shared:
                yield group

    def num_needed(self, group: BeamGroup) -> int:
        """Return the blocks it takes to branch and to hold all tokens known then."""
        cache, search = self._cache, group.search
        moved = {beam for beam, _, _ in group.branches or ()}
        each = cache.blocks_for(search.length) - group.shared // cache.block_size
        stay = [slot for beam, slot in enumerate(group.beam_slots) if beam not in moved]
        known = np.full(len(stay), search.length, np.int32)
        return len(moved) * each + int(cache.blocks_short(np.array(stay), known).sum())

    def branch(self, group: BeamGroup, builder: PlanBuilder) -> None:
        """Let beams take their slots, with blocks for all they know; their rows may go on."""
        cache, batch, search = self._cache, self._batch, group.search
        branches, group.branches = group.branches or [], None
        sources = [group.members[source].slot for _, source, _ in branches]
        targets = [group.members[target].slot for _, _, target in branches]
        copy_from, copy_to = cache.branch(sources, targets, group.shared, builder.step)
        slots = group.beam_slots
        for slot in slots:
            lacks = cache.capacities[slot] < search.length
            cache.extend(slot, search.length)
            if lacks or slot in targets:
                builder.add_deltas(cache.entries(slot))
        moved = Branches(slots=frozenset(slots), copy_from=copy_from, copy_to=copy_to)
        if group.resumes:  # tokens came with the admissions; the first goes on by itself
            group.resumes = False
            builder.add_branches(moved)
            batch.hold_at(targets, search.length, computed=group.shared)
            return
        batch.tokens.tokens[slots, : search.length] = search.tokens
        batch.tokens.lengths[slots] = search.length
        builder.add_branches(
            replace(
                moved,
                sources=np.array(sources, np.int32),
                targets=np.array(targets, np.int32),
                known_slots=np.array(slots, np.int32),
                known_ids=search.tokens[:, -1].copy(),
            )
        )
        batch.hold_at(slots, search.length, computed=group.shared)

    def take(
        self, index: Index, rows: Index, result: StepResult, entries: Index | None, now_ms: float
    ) -> list[BeamGroup]:
        """Take in rows `rows` of slots `index`; return the groups that are finished."""
        done = []
        for row in rows.tolist():
            sequence = self._batch.sequence(int(index[row]))
            if sequence.group is None:
                continue
            group = self._group_of(sequence)
            entry = row if entries is None else int(entries[row])
            beam = group.member_of_beam.index(group.members.index(sequence))
            group.results[beam] = beam_candidates_of(result, entry, group.search.num_logprobs)
            if len(group.results) == group.search.num_beams:
                first = group.members[0]
                if np.isnan(first.times.first_token_ms):
                    first.times.first_token_ms = now_ms
                group.decide()
                if group.search.is_done:
                    done.append(group)
        return done

    def last_rows(self, index: Index) -> Index:
        """Return which of the rows `index` stand for a request each: of a group the last."""
        stands = np.ones(len(index), np.bool_)
        for rows in self._rows_of_groups(index):
            stands[rows[:-1]] = False
        return stands.nonzero()[0]

    def sum_needs(self, index: Index, needs: Int32s) -> None:
        """Put the needs of a group on its last row: no beam is preempted for another."""
        for rows in self._rows_of_groups(index):
            needs[rows[-1]] = needs[rows].sum()

    def share_decision(self, index: Index, goes_on: Bools) -> None:
        """Let the rows of a group go on if its last may."""
        for rows in self._rows_of_groups(index):
            goes_on[rows] = goes_on[rows[-1]]

    def keep_together(
        self, index: Index, steps: NDArray[np.int64], in_flight: InFlightPlans
    ) -> None:
        """Treat a plan that names one slot of a group as naming all; see RequestTable."""
        for group in self.running:
            rows = np.isin(index, group.slots)
            if rows.any():
                slots = np.array(group.slots, np.intp)
                named = (one.plan.step for one in in_flight if one.names(slots).any())
                steps[rows] = max(named, default=0)

    def outputs(self, group: SequenceGroup, now_ms: float) -> list[RequestOutput]:
        """Return the outputs of a search that is done, the best sequence for the first stream."""
        first = group.members[0]
        found = self._group_of(first).search.finished
        scores = take_scores(first)
        outputs = []
        for sequence in group.streams:
            sequence.kv.cached_tokens, sequence.kv.cache_use = (
                first.kv.cached_tokens,
                first.kv.cache_use,
            )
            sequence.preemption.count = first.preemption.count
            sequence.times.first_scheduled_ms = first.times.first_scheduled_ms
            sequence.times.first_token_ms = first.times.first_token_ms
            sequence.times.last_token_ms = now_ms
            output, scores = sequence.output(scores=scores), None
            rank = sequence.request.stream - first.request.stream
            if rank >= len(found):
                error = _MISSING.format(len(found), first.request.sampling.n)
                outputs.append(replace(output, finish_reason=FinishReason.ERROR, error=error))
                continue
            one = found[rank]
            outputs.append(
                replace(
                    output,
                    token_ids=one.token_ids,
                    logprobs=one.logprobs,
                    finish_reason=one.finish_reason,
                    stop_id=one.stop_id,
                    score=one.score,
                )
            )
        return outputs

    def problems(self) -> list[str]:
        """Return contradictions between groups and slots, in words."""
        return [
            f"beam group {name} runs in slots {group.slots} of {len(group.members)} members"
            for name, group in self._groups.items()
            if len(group.slots) not in (0, len(group.members))
            or (group in self.running) != bool(group.slots)
        ]

    def _rows_of_groups(self, index: Index) -> Iterator[Index]:
        for group in self.running:
            rows = np.flatnonzero(np.isin(index, group.slots))
            if len(rows):
                yield rows
