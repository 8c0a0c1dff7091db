"""WaitingRequests: requests that wait for blocks of the store before they are computed.

The blocks that the pool lacks are looked up by a thread while the request waits at a gate. What is
stored is fetched into host memory if that is predicted to be faster than computing it. What another
engine has claimed is waited for, if that is: blocks are fetched as they come, so that the request
begins when the other engine has finished, and no progress is waited for longer than computing
takes. A fetch goes on while its rest is faster than computing; otherwise it is cancelled, what has
arrived is used, and the rest computed. A request with a link to another engine is looked up as it
comes: the link brings what is not stored, or all where that is faster, and nothing is claimed or
waited for; what it fails to bring is looked up again. Knows the scheduler, the map of places, and
jobs; files and sockets are the levels'. Always holds: maps are used in the engine's thread only;
every wait has a limit; a request that begins has no fetch under way for it alone.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.base.records import Int32s, Request
from quire.base.timeline import WaitReason
from quire.cache.store_map import StoreMap
from quire.engine.early_loads import EarlyLoads
from quire.engine.kv_store.claims import Claims
from quire.engine.kv_store.costs import FetchCosts
from quire.engine.kv_store.fetches import Fetches
from quire.engine.kv_store.job_threads import JobThreads
from quire.engine.kv_store.jobs import ENGINE_ID_BYTES, Lookup, StoreFetch
from quire.engine.kv_store.publishing import Publishing
from quire.engine.outside_blocks import Link, can_use_outside_blocks
from quire.kv_store.level import Fetched
from quire.scheduler.prefill.hand_over import HandOvers
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState

# How often it is looked whether what another engine computes has arrived.
POLL_MS = 50.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that has not begun. keys: of the blocks that the pool lacks; before: those of its
    chain before them.

    link: to an engine that was not asked yet. lookup: under way. levels: of the leading keys that
    are stored, which level has each. awaited: leading keys that are stored when another engine has
    computed them; 0: none is waited for. num_seen: of these, stored when the limit was set.
    num_asked: leading keys of which fetching has begun; num_linked: keys after these that the link
    brings. jobs: of levels. num_left: blocks that these lacked at since_ms, when the limit was set.
    held: places kept for it. until_ms: the limit of the present wait. poll_ms: when to look again
    for what another engine computes. is_ending: its jobs were given up. lost_link: the link has
    failed, while jobs were under way.
    """

    request: Request
    keys: tuple[bytes, ...]
    before: tuple[bytes, ...]
    until_ms: float
    link: Link | None = None
    lookup: Lookup | None = None
    levels: list[int] = field(default_factory=list)
    awaited: int = 0
    num_seen: int = 0
    num_asked: int = 0
    num_linked: int = 0
    jobs: set[StoreFetch] = field(default_factory=set)
    num_left: int = 0
    since_ms: float = 0.0
    held: list[int] = field(default_factory=list)
    poll_ms: float = 0.0
    is_ending: bool = False
    lost_link: bool = False
    is_over: bool = False


class WaitingRequests:
    """A Gate, and the Levels (see outside_blocks.py) of an exchange with other engines.

    Everything is called in the engine's thread. counts: of lookups, hits, misses, waits, those in
    vain, and slow calls. has_news: whether a request may begin since this was reset.
    """

    until_event = True
    reason = WaitReason.KV_LOAD

    def __init__(
        self,
        *,
        hand_overs: HandOvers,
        tier: StoreMap,
        threads: JobThreads,
        fetches: Fetches,
        costs: FetchCosts,
        publishing: Publishing,
        claims: Claims,
        now_ms: Callable[[], float],
    ) -> None:
        self._hand_overs, self._tier, self._early = hand_overs, tier, EarlyLoads(hand_overs)
        self._threads, self._fetches, self._costs = threads, fetches, costs
        self._publishing, self._claims, self._now_ms = publishing, claims, now_ms
        self._engine_id = secrets.token_bytes(ENGINE_ID_BYTES)
        self._waiting: dict[str, _Waiting] = {}
        self._lookups: dict[Lookup, bool] = {}  # under way: whether its thread hangs
        self.counts: Counter[str] = Counter()
        self.fetch_ms = 0.0
        self.has_news = False

    @property
    def request_ids(self) -> list[str]:
        """The requests that have not begun."""
        return [*self._waiting]

    # ---- Gate

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether blocks of `sequence` are being looked up or fetched."""
        request = sequence.request
        waiting = self._waiting.get(request.request_id)
        if waiting is None:
            if sequence.leader is not None or not can_use_outside_blocks(request):
                return False
            waiting = self._begin(request, sequence.token_ids)
            self._waiting[request.request_id] = waiting
        if not waiting.is_over or self._early.are_under_way(request.request_id):
            return True
        sequence.kv.num_fetched_blocks += self._early.take_count(request.request_id)
        return False

    # ---- Levels: of requests for which another engine may have blocks

    def begin(self, request: Request, link: Link) -> None:
        """See Levels."""
        self._waiting[request.request_id] = self._begin(request, request.known_ids, link)

    def look_again(self, request_id: str) -> None:
        """See Levels; after what is still on its way from levels."""
        lost = self._waiting.get(request_id)
        if lost is None:
            return
        if not lost.is_over:
            lost.lost_link = True
            return
        waiting = self._begin(lost.request, lost.request.known_ids)
        waiting.held = lost.held
        self._waiting[request_id] = waiting
        self.has_news |= waiting.is_over

    # ---- requests

    def forget(self, request_id: str) -> None:
        """Note that a request runs or has ended, and waits for nothing here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return
        self._early.end(request_id)
        self._open(waiting)
        for place in waiting.held:
            self._tier.end_fetch(place)
        self._cancel(waiting)

    def clear(self) -> None:
        """Let all requests begin without what is on its way: host memory is emptied."""
        self._fetches.forget_all()
        for waiting in self._waiting.values():
            waiting.link = None
            waiting.lost_link = False
            self._open(waiting)

    def _begin(self, request: Request, token_ids: Int32s, link: Link | None = None) -> _Waiting:
        """Look up what the pool lacks of a request, if that is worth it."""
        chain = self._hand_overs.chain(request, token_ids)
        keys = self._hand_overs.lacking(chain)
        first = len(chain.digests) - len(keys)
        # A preempted request knows more tokens; blocks of answers are in no store.
        num_prompt = len(request.prompt_ids) // self._costs.settings.block_size
        keys = keys[: max(num_prompt - first, 0)]
        compute_ms = self._costs.compute_ms(first, first + len(keys))
        waiting = _Waiting(
            request=request,
            keys=keys,
            before=chain.keys[:first],
            until_ms=self._now_ms() + self._costs.limit_ms(compute_ms),
            link=link,
        )
        can_ask = self._threads.can_ask(hangs=any(self._lookups.values()))
        if keys and can_ask and self._costs.lookup_pays(compute_ms):
            self._look_up(waiting)
        else:
            waiting.is_over = True
            self._use_link(waiting)
            self._publish_rest(waiting)
        return waiting

    def _use_link(self, waiting: _Waiting) -> bool:
        """Have the link bring what levels do not; return whether it brings anything of that."""
        link, waiting.link = waiting.link, None
        if link is not None:
            waiting.num_linked = link.begin(waiting.num_asked)
        return waiting.num_linked > 0

    def _publish_rest(self, waiting: _Waiting) -> None:
        """Have blocks put that are neither stored nor come from an engine, which puts its own."""
        num_there = max(len(waiting.levels), waiting.num_asked + waiting.num_linked)
        self._publish(waiting.request, waiting.keys[num_there:])

    def _publish(self, request: Request, keys: tuple[bytes, ...]) -> None:
        """Have blocks put; a claim ends where nothing of the request is: no engine waits for it."""
        if not self._publishing.publish(request, keys):
            self._claims.end(request.request_id)

    def _open(self, waiting: _Waiting) -> None:
        """Let a request begin, unless its link has failed: then it is looked up again."""
        if waiting.lookup is not None:
            waiting.lookup.is_abandoned = True
            waiting.lookup = None
        if not waiting.is_over:
            waiting.is_over = self.has_news = True
            if waiting.lost_link:
                self.look_again(waiting.request.request_id)

    # ---- lookups, and waits for other engines

    def _look_up(self, waiting: _Waiting) -> None:
        """Look for the blocks that were not found before."""
        num_found = len(waiting.levels)
        compute_ms = self._compute_ms(waiting, num_found, len(waiting.keys))
        lookup = waiting.lookup = Lookup(
            request_id=waiting.request.request_id,
            keys=waiting.keys[num_found:],
            before=(*waiting.before, *waiting.keys[:num_found]),
            owner=self._engine_id + secrets.token_bytes(ENGINE_ID_BYTES),
            may_claim=waiting.link is None and self._costs.claim_pays(compute_ms),
            began_ms=self._now_ms(),
        )
        self._lookups[lookup] = False
        self._threads.look_up(lookup)

    def looked_up(self, lookup: Lookup) -> None:
        """Take in how far a chain is stored, and decide."""
        del self._lookups[lookup]
        self._publishing.forget_stored(lookup.keys[len(lookup.levels) :])
        waiting = self._waiting.get(lookup.request_id)
        if lookup.claimed is not None:
            is_awaited = waiting is not None and waiting.lookup is lookup
            if not is_awaited and not self._publishing.has(lookup.request_id):
                self._claims.release(lookup.claimed, lookup.record)
            else:
                self._claims.add(lookup.request_id, lookup.claimed, lookup.record)
        if waiting is None or waiting.lookup is not lookup:
            return  # it did not wait for it
        waiting.lookup = None
        waiting.levels += lookup.levels
        self._costs.note_lookup(lookup.ended_ms - lookup.began_ms)
        is_first = not waiting.awaited
        if is_first:
            self.counts["lookups"] += 1
        num_elsewhere = 0 if waiting.link is not None else lookup.num_elsewhere
        if not num_elsewhere or not self._waiting_pays(waiting, num_elsewhere):
            self._fetch(waiting)
            return
        if is_first:
            self.counts["waited"] += 1
            waiting.awaited = len(waiting.levels) + num_elsewhere
            self._limit_wait(waiting)
        waiting.poll_ms = self._now_ms() + POLL_MS
        self._fetch_early(waiting)

    def _waiting_pays(self, waiting: _Waiting, num_elsewhere: int) -> bool:
        if self._costs.is_forced:
            return True
        levels = [*waiting.levels, *[self._threads.last_level] * num_elsewhere]
        wait_ms = self._costs.lookup_ms + POLL_MS + self._costs.move_ms(levels)
        return wait_ms < self._compute_ms(waiting, 0, len(levels))

    def _limit_wait(self, waiting: _Waiting) -> None:
        """Set how long to wait for another engine: as long as computing would take."""
        waiting.num_seen = len(waiting.levels)
        limit_ms = self._compute_ms(waiting, waiting.num_seen, waiting.awaited)
        if self._costs.is_forced:
            limit_ms = self._costs.settings.timeout_ms
        waiting.until_ms = self._now_ms() + limit_ms

    def _stop_waiting(self, waiting: _Waiting) -> None:
        """Compute what another engine did not deliver in time, unless it makes progress."""
        if waiting.num_seen < len(waiting.levels) < waiting.awaited:
            self._limit_wait(waiting)
            return
        self.counts["waited in vain"] += 1
        if waiting.lookup is not None:
            waiting.lookup.is_abandoned = True
            waiting.lookup = None
        self._fetch(waiting)

    def _compute_ms(self, waiting: _Waiting, first: int, end: int) -> float:
        """Return what computing some of its keys takes."""
        num_before = len(waiting.before)
        return self._costs.compute_ms(num_before + first, num_before + end)

    # ---- fetches

    def _fetch_early(self, waiting: _Waiting) -> None:
        """Fetch what another engine has put so far, unless that takes half of the places."""
        levels = waiting.levels[waiting.num_asked :]
        compute_ms = self._compute_ms(waiting, waiting.num_asked, len(waiting.levels))
        is_free = 2 * (self._fetches.num_places + len(levels)) <= self._tier.num_blocks
        if levels and is_free and self._costs.fetch_pays(levels, compute_ms):
            self._begin_fetch(waiting)

    def _fetch(self, waiting: _Waiting) -> None:
        """Fetch what is stored, and what a link has, if that is cheaper; publish what neither has.

        A request of which its link brings nothing goes on as one without.
        """
        waiting.awaited = 0
        levels = waiting.levels[waiting.num_asked :]
        if self._levels_pay(waiting, levels):
            self._begin_fetch(waiting)
        else:
            self._costs.fade(levels)
        num_stored = len(waiting.levels)
        num_missing = len(waiting.keys) - num_stored
        had_link = waiting.link is not None
        if not self._use_link(waiting) and had_link and num_missing:
            compute_ms = self._compute_ms(waiting, num_stored, len(waiting.keys))
            waiting.until_ms = self._now_ms() + self._costs.limit_ms(compute_ms)
            self._look_up(waiting)
            return
        self.counts["hits"] += num_stored
        self.counts["misses"] += num_missing
        self._go_on(waiting)

    def _go_on(self, waiting: _Waiting) -> None:
        """Publish what is computed, and wait for what is on its way."""
        self._publish_rest(waiting)
        self._limit_fetch(waiting)
        if not self._fetches.live(waiting.jobs):
            self._open(waiting)

    def _levels_pay(self, waiting: _Waiting, levels: list[int]) -> bool:
        """Return whether to fetch blocks from these levels: they are faster than computing, and
        than the link, if it has the blocks too."""
        link, move_ms = waiting.link, self._costs.move_ms(levels)
        is_slower = link is not None and len(levels) * link.block_ms < move_ms
        if is_slower and not self._costs.is_forced:
            return False
        end = waiting.num_asked + len(levels)
        return self._costs.fetch_pays(levels, self._compute_ms(waiting, waiting.num_asked, end))

    def _begin_fetch(self, waiting: _Waiting) -> None:
        """Fetch the blocks that are stored and not asked for yet, as far as there is room."""
        first, end = waiting.num_asked, len(waiting.levels)
        jobs, count = self._fetches.begin(waiting.keys[first:end], waiting.levels[first:])
        self._early.begin(waiting.request)
        waiting.jobs |= jobs
        waiting.num_asked += count

    def _limit_fetch(self, waiting: _Waiting) -> None:
        """Set how long to wait for the next blocks."""
        waiting.num_left = self._fetches.num_left(waiting.jobs)
        waiting.since_ms = self._now_ms()
        first = waiting.num_asked - waiting.num_left
        move_ms = self._costs.move_ms(waiting.levels[max(first, 0) : waiting.num_asked])
        waiting.until_ms = waiting.since_ms + max(
            self._costs.limit_ms(self._rest_ms(waiting, waiting.num_left)),
            min(2 * move_ms, self._costs.settings.timeout_ms),
        )

    def _rest_ms(self, waiting: _Waiting, num_left: int) -> float:
        """Return what computing the blocks takes that its jobs have not brought."""
        return self._compute_ms(waiting, max(waiting.num_asked - num_left, 0), waiting.num_asked)

    def _stop_fetch(self, waiting: _Waiting, now_ms: float) -> None:
        """Give up a fetch that takes longer than computing; use what has arrived."""
        num_left = self._fetches.num_left(waiting.jobs)
        if not num_left:
            return  # all were read, which is taken in next
        num_read = waiting.num_left - num_left
        if num_read > 0 and not waiting.is_ending:
            left_ms = (now_ms - waiting.since_ms) / num_read * num_left
            if self._costs.is_forced or left_ms < self._rest_ms(waiting, num_left):
                self._limit_fetch(waiting)
                return
        self._cancel(waiting)
        if num_read <= 0 or waiting.is_ending:
            self._open(waiting)
        else:  # what is being read now may still arrive
            waiting.until_ms = now_ms + self._costs.limit_ms(self._rest_ms(waiting, num_left))
        if not waiting.is_ending:
            self.counts["slow"] += 1
        waiting.is_ending = True

    def _cancel(self, given_up: _Waiting) -> None:
        """Cancel its jobs, but for those that bring blocks of other requests that go on."""
        for job in self._fetches.live(given_up.jobs):
            if not any(
                job in other.jobs and other is not given_up and not other.is_ending
                for other in self._waiting.values()
            ):
                job.is_cancelled = True

    def fetched(self, job: StoreFetch) -> None:
        """Enter what a job brought into the map, kept for the requests that wait for it."""
        users = [waiting for waiting in self._waiting.values() if job in waiting.jobs]
        self._fetches.end(job, [waiting.held for waiting in users])
        for waiting in users:
            self._early.load(waiting.request.request_id)
        self.fetch_ms += job.read_ms - job.began_ms
        for level, num_whole, took_ms in job.took():
            self._costs.note_fetch(level, num_whole, took_ms)
        first = next(
            (at for at, one in enumerate(job.outcomes) if one in (Fetched.MISSING, Fetched.BAD)),
            None,
        )
        if first is not None:
            lacking = job.keys[first:]
            self._publishing.forget_stored(lacking)
            for waiting in users:
                if lacking[0] in waiting.keys:
                    at = waiting.keys.index(lacking[0])
                    self._publish(waiting.request, waiting.keys[at:])
        self.has_news = True

    # ---- time

    def look_at_limits(self) -> None:
        """Go on with requests of which a wait has ended; find calls that hang."""
        now_ms = self._now_ms()
        last_ms = now_ms - self._costs.settings.timeout_ms
        for lookup, hangs in self._lookups.items():
            if not hangs and lookup.began_ms < last_ms:
                self._lookups[lookup] = True
                self._threads.note_hung()
        for _ in range(self._fetches.cancel_hung(last_ms)):
            self._threads.note_hung()
        for waiting in self._waiting.values():
            if not waiting.is_over:
                self._look_at(waiting, now_ms)

    def _look_at(self, waiting: _Waiting, now_ms: float) -> None:
        """Decide about a request that waits."""
        if waiting.awaited:
            if now_ms >= waiting.until_ms:
                self._stop_waiting(waiting)
            elif waiting.lookup is None and now_ms >= waiting.poll_ms:
                self._look_up(waiting)
        elif waiting.lookup is not None:
            if now_ms >= waiting.until_ms:
                self.counts["slow"] += 1
                waiting.lookup.is_abandoned = True
                waiting.lookup = None
                self._use_link(waiting)
                self._go_on(waiting)
        elif not self._fetches.live(waiting.jobs):
            self._open(waiting)
        elif now_ms >= waiting.until_ms:
            self._stop_fetch(waiting, now_ms)
