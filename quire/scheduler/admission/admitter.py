"""Admitter: which waiting requests begin in a step, and with how many tokens of its budget.

Walks along the queue. Knows gates, sources of KV and what must stay free for running requests;
preempts nothing. Always holds: a request is admitted only if the blocks for all its known tokens
are free beside those that running requests still need; a request that lacks blocks blocks those
behind it, so none is overtaken except through a gate, and long prompts by a few short ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.base.timeline import WaitReason
from quire.cache.chain import PrefixMatch
from quire.cache.manager import CacheManager
from quire.scheduler.admission.gates import ForkGate
from quire.scheduler.admission.kv_loads import KVLoads
from quire.scheduler.admission.pending_prefixes import PendingPrefixes
from quire.scheduler.admission.slot_allocation import (
    KVSource,
    Row,
    SlotAllocator,
    find_kv_source,
)
from quire.scheduler.interfaces import Gate, SlotGroups, StepExtension
from quire.scheduler.plan_builder import Step
from quire.scheduler.request_history import NO_OBSTACLE, Obstacle, Obstacles
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import NO_SLOT, SequenceState
from quire.scheduler.step_budget import BlockShares
from quire.scheduler.waiting_queue import QueuePolicy, WaitingQueue

# How many requests have their prefixes digested and looked up together.
LOOK_UP_AT_ONCE = 16
# How many short requests may overtake a long one that lacks blocks; then it blocks them.
MAX_OVERTAKES = 16
# How much a preemption raises the watermark, at most, and when half of that is gone.
_RAISE, _MAX_FACTOR = 1.5, 16.0
_HALF_LIFE_STEPS = 512


class Watermark:
    """Blocks that admission leaves free, so that admitted requests are not preempted at once.

    A running request takes a block every block_size steps: half a block for each is their growth
    over half that time. Each preemption raises the mark, and steps without one lower it again.
    Always holds: where nothing runs there is no mark, or nothing ever would; it never keeps more
    than a quarter of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._factor = 1.0
        self._at_step = 0

    def preempted(self, step: int) -> None:
        """Raise the mark: a request was preempted in `step`."""
        self._factor = min(self._factor_at(step) * _RAISE, _MAX_FACTOR)
        self._at_step = step

    def blocks(self, num_running: int, step: int) -> int:
        """Return how many blocks to leave free beside num_running requests."""
        if not num_running:
            return 0
        least = self._least(num_running)
        return max(least, min(int(least * self._factor_at(step)), self._num_blocks // 4))

    def max_blocks(self, num_running: int) -> int:
        """Return a bound of `blocks`, whatever was preempted."""
        return max(self._least(num_running), self._num_blocks // 4)

    def _least(self, num_running: int) -> int:
        return max(self._num_blocks // 100, num_running // 2)

    def _factor_at(self, step: int) -> float:
        if self._factor == 1.0:
            return 1.0
        left: float = 0.5 ** ((step - self._at_step) / _HALF_LIFE_STEPS)
        return 1.0 + (self._factor - 1.0) * left


@dataclass(slots=True, kw_only=True)
class AdmissionRules:
    """What else may keep a request waiting: gates, extensions, and blocks to leave free.

    obstacles: what kept requests waiting (StepHistory.obstacles).
    """

    gates: list[Gate]
    extensions: Sequence[StepExtension]
    watermark: Watermark
    obstacles: Obstacles


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One walk along the queue, and its results so far.

    reserved_blocks: blocks that running and newly admitted requests still need for known tokens.
    max_margin: the watermark is at most so many.
    blocked: a request lacks blocks, so that only tenants with a floor left go on. started: slots of
    `rows`, and of beams without a row yet; admitted: the requests of rows. held: tenants with a
    request that waits though it was its turn. overtaken: a long request that lacks blocks and may
    still be overtaken. matches: prefixes looked up ahead, by arrival. is_plain: nothing but slots,
    budget and blocks keeps a request without leader and group waiting.
    """

    step: Step
    num_running: int
    reserved_blocks: int
    max_margin: int
    blocked: bool
    is_plain: bool
    obstacle: Obstacle = NO_OBSTACLE
    try_again: bool = False
    rows: list[Row] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    overtaken: SequenceState | None = None
    skips_long: bool = False
    matches: dict[int, PrefixMatch] = field(default_factory=dict)


class Admitter:
    """Admits requests of a queue into `batch`."""

    def __init__(
        self,
        batch: RunningBatch,
        cache: CacheManager,
        policy: QueuePolicy,
        shares: BlockShares,
        slots: SlotAllocator,
        loads: KVLoads,
        rules: AdmissionRules,
        groups: SlotGroups,
    ) -> None:
        self._batch = batch
        self._cache = cache
        self._policy = policy
        self._shares = shares
        self._slots = slots
        self._loads = loads
        self._rules = rules
        self._groups = groups
        self._extensions = [one for one in rules.extensions if one.limits_admission]
        self._fork_gate = ForkGate()
        self._pending = PendingPrefixes(cache.block_size)
        # Newly admitted prompts, with blocks found and end, and their first digests: entered into
        # the pending prefixes once a request begins like one of them.
        self._fresh: list[tuple[SequenceState, int, int]] = []
        self._first_digests: set[int | None] = set()
        self._obstacle = NO_OBSTACLE  # of the last walk

    def add_gate(self, gate: Gate) -> None:
        """Add a reason for requests to wait; no effect if it is there."""
        if gate not in self._rules.gates:
            self._rules.gates.append(gate)

    def admit(
        self,
        queue: WaitingQueue,
        step: Step,
        *,
        floors_only: bool = False,
        before: tuple[float, ...] | None = None,
    ) -> bool:
        """Admit while budget, slots and blocks last.

        floors_only: only into blocks reserved for a request's tenant. before: none of this rank or
        behind. Returns whether trying again in the next step can succeed though nothing happens.
        """
        batch, budget = self._batch, step.budget
        # If none can be admitted, no prefix is looked up, and registering blocks can wait.
        if budget.spent or not batch.free_slots:
            self._note_obstacle(step, _obstacle_of(batch))
            return budget.spent
        walk = self._begin(step, floors_only=floors_only)
        for sequence in self._upcoming(walk, queue):
            if budget.spent or (before is not None and self._policy.rank(sequence) >= before):
                walk.try_again = True
                walk.obstacle = (WaitReason.BUDGET if budget.spent else WaitReason.ORDER, -1)
                break
            if not batch.free_slots:
                walk.obstacle = _obstacle_of(batch)
                break
            if not walk.is_plain or sequence.leader is not None or sequence.group is not None:
                if self._ends_walk(walk, sequence):
                    break
                if not self._extensions_allow(walk, sequence):
                    walk.try_again, walk.obstacle = True, (WaitReason.ORDER, -1)
                    break
                if self._is_held(walk, sequence):
                    continue
            match = walk.matches.get(sequence.arrival)
            source = find_kv_source(sequence, self._cache, batch, match)
            first_digest = _first_digest(sequence)
            may_wait = self._pending.under_way or first_digest in self._first_digests
            if may_wait and self._is_pending(walk, sequence, source):
                walk.try_again = True
                sequence.history.wait(step.now_ms, WaitReason.PREFIX)
                continue
            if not self._has_room(walk, sequence, source):
                walk.is_plain = False
                continue
            if source.places is not None and self._loads.begin(sequence, source, step.now_ms):
                walk.reserved_blocks += source.num_new_blocks - len(source.places)
                walk.matches.clear()  # the blocks just taken may be among those found before
                sequence.history.wait(step.now_ms, WaitReason.KV_LOAD)
                continue
            count = budget.allot_one(
                source.start,
                len(sequence.token_ids) - source.start,
                scored=sequence.scores is not None and sequence.has_positions_to_score,
                is_long=sequence.entry.is_long,
            )
            if count >= 1:
                if source.match is not None and first_digest is not None:
                    self._fresh.append((sequence, len(source.match.blocks), source.start + count))
                    self._first_digests.add(first_digest)
                self._start(walk, sequence, source, count)
                continue
            walk.try_again = True
            sequence.history.wait(step.now_ms, WaitReason.BUDGET)
            if not sequence.entry.is_long:
                walk.obstacle = (WaitReason.BUDGET, -1)
                break
            # The share of long prompts is spent, not the step.
            walk.skips_long, walk.is_plain = True, False
        if walk.obstacle != self._obstacle:
            self._note_obstacle(step, walk.obstacle)
        if walk.rows:
            queue.remove_all(walk.admitted)
            batch.activate(walk.started)
            self._slots.add_rows(step.builder, walk.rows)
        return walk.try_again

    def _note_obstacle(self, step: Step, obstacle: Obstacle) -> None:
        if obstacle != self._obstacle:
            self._obstacle = obstacle
            self._rules.obstacles.append((step.now_ms, *obstacle))

    def _begin(self, step: Step, *, floors_only: bool) -> _Walk:
        """Make findable what running requests have computed; reserve what they need."""
        batch, cache = self._batch, self._cache
        self._shares.changed()
        if self._pending.under_way:
            self._pending.begin_step(batch)
        if self._fresh:
            computed = batch.computed.item
            self._fresh = [
                one
                for one in self._fresh
                if (slot := one[0].slot) != NO_SLOT and computed(slot) < len(one[0].token_ids)
            ]
            self._first_digests = {_first_digest(one[0]) for one in self._fresh}
        active = batch.active
        reserved_blocks = 0
        if len(active):
            cache.register(active, batch.computed[active], batch.tokens.tokens)
            reserved_blocks = cache.blocks_lacking(active, batch.goal[active])
        return _Walk(
            step=step,
            num_running=len(active),
            reserved_blocks=reserved_blocks,
            max_margin=self._rules.watermark.max_blocks(len(batch.sequences)),
            blocked=floors_only,
            is_plain=not (
                floors_only or self._extensions or self._rules.gates or self._shares.limits_running
            ),
        )

    def _upcoming(self, walk: _Walk, queue: WaitingQueue) -> Iterator[SequenceState]:
        """Yield the waiting requests in order; prefixes are looked up for several at a time.

        A match stays valid until a block is allocated, which is put off to the end of the walk.
        """
        for batch in queue.batches(LOOK_UP_AT_ONCE):
            if len(batch) > 1 and self._cache.prefix_caching:
                self._look_up(walk, batch[: len(self._batch.free_slots)])
            yield from batch

    def _look_up(self, walk: _Walk, sequences: list[SequenceState]) -> None:
        """Find the prefixes of `sequences`, except of forks."""
        fresh = [one for one in sequences if one.chain is None and one.leader is None]
        if fresh:
            chains = self._cache.chains(
                [(one.token_ids, one.request.cache_salt, one.request.tenant) for one in fresh]
            )
            for one, chain in zip(fresh, chains, strict=True):
                one.chain = chain
        chains_of = {
            one.arrival: one.chain
            for one in sequences
            if one.chain is not None and one.leader is None
        }
        matches = self._cache.match_all([*chains_of.values()])
        walk.matches = dict(zip(chains_of, matches, strict=True))

    def _ends_walk(self, walk: _Walk, sequence: SequenceState) -> bool:
        """Return whether neither `sequence` nor any request behind it can begin."""
        if len(self._batch.free_slots) < sequence.num_slots:
            walk.obstacle = (WaitReason.SLOT, -1)
            return True
        if walk.overtaken is not None and walk.overtaken.entry.num_overtakes >= MAX_OVERTAKES:
            walk.blocked = True
            walk.obstacle = (WaitReason.BLOCKS, walk.overtaken.arrival)
        return walk.blocked and not self._shares.any_floor_left()

    def _extensions_allow(self, walk: _Walk, sequence: SequenceState) -> bool:
        for extension in self._extensions:
            if extension.is_active and not extension.allows_admission(walk.step, sequence):
                return False
        return True

    def _is_held(self, walk: _Walk, sequence: SequenceState) -> bool:
        """Return whether `sequence` waits for something other than blocks; others may overtake."""
        shares = self._shares
        if sequence.request.tenant in walk.held:
            sequence.history.wait(walk.step.now_ms, WaitReason.ORDER)
            return True
        if shares.is_full(sequence):
            sequence.history.wait(walk.step.now_ms, WaitReason.TENANT_LIMIT)
            return True
        if (walk.skips_long and sequence.entry.is_long) or (
            walk.blocked and not shares.has_floor_left(sequence)
        ):
            sequence.history.wait(walk.step.now_ms, WaitReason.ORDER)
            return True
        batch, now_ms = self._batch, walk.step.now_ms
        if sequence.leader is not None and self._fork_gate.holds(sequence, batch, now_ms):
            walk.try_again = True
            sequence.history.wait(now_ms, WaitReason.GROUP)
            return True
        for gate in self._rules.gates:
            if gate.holds(sequence, batch, now_ms):
                sequence.history.wait(now_ms, gate.reason)
                walk.try_again |= not gate.until_event
                return True
        return False

    def _is_pending(self, walk: _Walk, sequence: SequenceState, source: KVSource) -> bool:
        """Return whether steps in flight compute so much of its prefix that it waits for them."""
        if source.match is None or sequence.has_positions_to_score:
            return False
        for one in self._fresh:
            self._pending.expect(*one)
        self._fresh.clear()
        self._first_digests.clear()
        budget = walk.step.budget
        num_computable = min(len(sequence.token_ids) - source.start, budget.tokens)
        return self._pending.holds(sequence, source.match.num_blocks, num_computable, self._batch)

    def _has_room(self, walk: _Walk, sequence: SequenceState, source: KVSource) -> bool:
        """Return whether there are blocks for all known tokens; if not, note what may overtake."""
        cache, shares, num_new = self._cache, self._shares, source.num_new_blocks
        takeable = cache.num_takeable(source.match)
        room = takeable - walk.reserved_blocks
        limits_tenants = shares.has_floors or shares.has_ceilings
        if num_new <= room - walk.max_margin and not (walk.blocked or limits_tenants):
            return True
        num_running = walk.num_running + len(walk.rows)
        if num_running:
            room -= self._rules.watermark.blocks(num_running, walk.step.builder.step)
        taken = num_new + cache.num_free - takeable
        if not shares.passes_ceiling(sequence, taken):
            walk.held.add(sequence.request.tenant)
            sequence.history.wait(walk.step.now_ms, WaitReason.TENANT_CEILING)
            return False
        room -= shares.reserved_for_others(sequence)
        if not walk.blocked and num_new <= room:
            return True
        if shares.fits_floor(sequence, taken):
            return True
        if self._loads.any_used and self._loads.release_kept(sequence):
            return self._has_room(walk, sequence, source)
        sequence.history.wait(walk.step.now_ms, WaitReason.BLOCKS)
        if sequence.entry.is_long and not walk.blocked:
            walk.overtaken, walk.skips_long = sequence, True
        else:
            if not walk.blocked:
                walk.obstacle = (WaitReason.BLOCKS, sequence.arrival)
            walk.blocked = True
            walk.held.add(sequence.request.tenant)
        return False

    def _start(self, walk: _Walk, sequence: SequenceState, source: KVSource, count: int) -> None:
        """Give `sequence` a slot and `count` tokens; it leaves the queue after the walk."""
        cache, builder = self._cache, walk.step.builder
        walk.admitted.append(sequence)
        if walk.overtaken is not None:
            walk.overtaken.entry.num_overtakes += 1
        self._shares.dequeued(sequence)
        slot = self._slots.allocate_slot(builder, sequence, source, walk.step.now_ms)
        row = (slot, source.start, count)
        walk.rows.append(row)
        walk.started.append(slot)
        # Blocks are allocated at the end of the walk, except those of forks, and where tenants'
        # floors are counted by the blocks that requests hold.
        if source.leader_slot is None:
            walk.reserved_blocks += source.num_new_blocks
        else:
            walk.matches.clear()
        if self._shares.has_floors:
            before = cache.num_free
            self._slots.allocate([row])
            walk.reserved_blocks -= before - cache.num_free
            walk.matches.clear()
        if sequence.group is not None:
            walk.started += self._groups.allocate_slots(sequence, builder)


def _obstacle_of(batch: RunningBatch) -> Obstacle:
    """Return what keeps any waiting request from being admitted: slots, or else the budget."""
    return (WaitReason.BUDGET if batch.free_slots else WaitReason.SLOT, -1)


def _first_digest(sequence: SequenceState) -> int | None:
    """Return half of the digest of its first block; None for a prompt shorter than a block."""
    chain = sequence.chain
    return chain.digests.item(0) if chain is not None and len(chain.digests) else None
