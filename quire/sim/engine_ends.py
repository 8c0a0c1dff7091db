"""EngineEnds: the sources of KV blocks outside a simulated engine, on its virtual clock.

KVExchange, StoreClient and OutsideBlocks are the engine's own; threads, connections and copies are
virtual. Knows no other engine but by `HandingSide`. Always holds: what is due by the engine's time
has happened when the engine takes its messages; a copy between host memory and the pool takes no
time of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.base.block_copies import BlockCopies, CopiesEnded, Int32s, Tier
from quire.base.engine_stats import EngineStats
from quire.base.records import StepOutputs, StepPlan
from quire.base.report import Field
from quire.cache.exchange_map import ExchangeMap
from quire.cache.store_map import StoreMap
from quire.config.groups import EngineConfig
from quire.engine.kv_store.costs import StoreSettings
from quire.engine.kv_store.store_client import StoreClient
from quire.engine.outside_blocks import BlockSource, OutsideBlocks
from quire.engine.process.messages import FromEngine, Outputs, Refused, ToEngine
from quire.engine.transfer.exchange import KVExchange
from quire.engine.transfer.fetching import Fetching, FetchTerms
from quire.engine.transfer.handing import Handing
from quire.engine.transfer.own_load import OwnLoad
from quire.engine.transfer.peers import Peers
from quire.kv_store.entry import HEAD_BYTES
from quire.runner.tier_mover import num_buffers
from quire.scheduler.scheduler import Scheduler
from quire.sim.events import EngineEvents
from quire.sim.virtual_links import HandingSide, TimedLeases, VirtualConnections
from quire.sim.virtual_store import (
    TIMEOUT_MS,
    StoreSpec,
    VirtualClaims,
    VirtualStore,
    VirtualThreads,
    store_level,
)
from quire.transfer.host import HostStore

_ANY_TOKEN = 1 << 31  # ids stand for content; no vocabulary bounds them
_KEEP_LEASES_MS = 60_000.0  # the default of --kv-transfer-timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The links of engines with roles. gb_per_s: what an engine receives in a second.

    latency_ms: the time of a message. fetch: as --kv-transfer-fetch. num_blocks: places in each
    engine's memory for blocks on their way.
    """

    gb_per_s: float
    latency_ms: float
    fetch: str
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What one engine has outside. store: shared, with its numbers; link: with the engines by
    host, and those of them that it asks by itself."""

    block_bytes: int
    store: tuple[VirtualStore, StoreSpec] | None = None
    link: LinkSpec | None = None
    others: Mapping[str, HandingSide] | None = None
    peers: Sequence[str] = ()

    def tier(self) -> ExchangeMap | None:
        """Return the map of the memory for blocks on their way; None where there is none."""
        num_blocks = 0
        if self.store is not None:
            num_blocks += max(self.store[1].buffer_bytes // self.block_bytes, 1)
        if self.link is not None:
            num_blocks += self.link.num_blocks
        if not num_blocks:
            return None
        make = ExchangeMap if self.store is None else StoreMap
        return make(num_blocks, max_saving=num_buffers(self.block_bytes, Tier.HOST))


class VirtualMover:
    """A BlockMover that moves at once."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._copies: list[BlockCopies] = []

    def begin(self, copies: BlockCopies) -> None:
        """See BlockMover."""
        self._copies.append(copies)

    def wait_for(self, blocks: Int32s) -> None:
        """See BlockMover."""

    def ended(self) -> CopiesEnded | None:
        """See BlockMover."""
        if not self._copies:
            return None
        parts, self._copies = self._copies, []
        to_tiers = np.concatenate([one.to_tiers for one in parts])
        return CopiesEnded(
            to_tiers=to_tiers,
            to_blocks=np.concatenate([one.to_blocks for one in parts]),
            arrived=np.ones(len(to_tiers), np.bool_),
            fetched=int((to_tiers == Tier.POOL).sum()),
        )

    def clear(self) -> None:
        """See BlockMover."""

    def close(self) -> None:
        """See BlockMover."""

    def note_plan(self, plan: StepPlan) -> None:
        """Make the copies of a plan."""
        if plan.tier_copies is not None:
            self.begin(plan.tier_copies)


class EngineEnds:
    """What one simulated engine has outside; its core asks `blocks`, a TierEnd."""

    def __init__(
        self,
        outside: Surroundings,
        scheduler: Scheduler,
        tier: ExchangeMap,
        config: EngineConfig,
        events: EngineEvents,
    ) -> None:
        self._outside, self._scheduler, self._tier = outside, scheduler, tier
        self._events, self._block_size = events, config.kv_block_tokens
        self.mover = VirtualMover()
        self._memory = HostStore([np.zeros(tier.num_blocks, np.uint8)], 1)
        self.side: HandingSide | None = None
        self._connections: VirtualConnections | None = None
        self.exchange = self._exchange(outside.link) if outside.link is not None else None
        self.client = self._client(*outside.store) if outside.store is not None else None
        if self.exchange is not None and self.client is not None:
            self.exchange.fetching.levels = self.client.waiting
        sources: list[BlockSource] = []
        sources += [] if self.exchange is None else [self.exchange]
        sources += [] if self.client is None else [self.client]
        self.blocks = OutsideBlocks(scheduler, self.mover, sources)
        self._passed: FromEngine | None = None
        self._watched = self.blocks.watch(self._pass)

    def has_work(self) -> bool:
        """Return whether events are pending."""
        return bool(len(self._events)) or bool(self._connections)

    def next_ms(self) -> float:
        """Return the time of the next event, or the earliest it may have; inf for none."""
        links_ms = np.inf if self._connections is None else self._connections.next_ms()
        return float(min(self._events.next_ms, links_ms))

    def take(self, messages: list[ToEngine]) -> list[ToEngine]:
        """Process events that are due; return the messages that the engine handles next."""
        self._events.run_due()
        if self._connections is not None:
            self._connections.advance()
            self._events.run_due()
        return self.blocks.take(messages)

    def seen(self, outputs: StepOutputs) -> StepOutputs | None:
        """Record the outputs of a step; return those of requests with a client."""
        self._passed = None
        self._watched(Outputs(outputs=outputs, stats=EngineStats()))
        return self._passed.outputs if isinstance(self._passed, Outputs) else None

    def refused(self, message: Refused) -> None:
        """Note that the engine does not take a request, or has given it up."""
        self._watched(message)

    def in_stats(self, stats: EngineStats) -> EngineStats:
        """Return the engine's counters with those of its sources."""
        of_store = None
        if self.client is not None:
            of_store = self.client.stats()
            entry_bytes = HEAD_BYTES + self._outside.block_bytes
            of_store = replace(
                of_store,
                fetched_bytes_total=of_store.fetched_blocks_total * entry_bytes,
                put_bytes_total=of_store.put_blocks_total * entry_bytes,
            )
        transfer = None if self.exchange is None else self.exchange.stats()
        return replace(stats, transfer=transfer, kv_store=of_store)

    def _pass(self, message: FromEngine) -> None:
        self._passed = message

    def _exchange(self, link: LinkSpec) -> KVExchange:
        """Return the exchange with other engines, of which the prices are known."""
        hand_overs, events, outside = self._scheduler.hand_overs, self._events, self._outside
        assert hand_overs is not None, "the scheduler has an ExchangeMap"
        block_ms = outside.block_bytes / (link.gb_per_s * 1e6)
        leases = TimedLeases(events.now_ms, _KEEP_LEASES_MS)
        own = OwnLoad(self._scheduler)
        handing = Handing(
            hand_overs=hand_overs,
            tier=self._tier,
            leases=leases,
            own=own,
            vocab_size=_ANY_TOKEN,
            now_ms=events.now_ms,
            report=report_nothing,
        )
        fetching = Fetching(
            scheduler=self._scheduler,
            store=self._memory,
            tier=self._tier,
            peers=Peers([(host, 1) for host in outside.peers]),
            own=own,
            terms=FetchTerms(block_size=self._block_size, fetch=link.fetch, block_ms=block_ms),
            now_ms=events.now_ms,
            report=report_nothing,
        )
        self._connections = fetching.client = VirtualConnections(
            events, outside.others or {}, latency_ms=link.latency_ms, block_ms=block_ms
        )
        self.side = HandingSide(handing=handing, leases=leases, events=events)
        return KVExchange(handing=handing, fetching=fetching, block_bytes=outside.block_bytes)

    def _client(self, store: VirtualStore, spec: StoreSpec) -> StoreClient:
        """Return the use of a shared store, of which the prices are known."""
        shared = store_level(store, self._events, report_nothing)
        assert isinstance(self._tier, StoreMap), "made with a store"
        block_ms = spec.block_ms(self._outside.block_bytes)
        threads = VirtualThreads(shared, self._events, spec, block_ms, report_nothing)
        return StoreClient(
            scheduler=self._scheduler,
            store=self._memory,
            tier=self._tier,
            shared=shared,
            disk=None,
            settings=StoreSettings(
                block_size=self._block_size, fetch=spec.fetch, timeout_ms=TIMEOUT_MS
            ),
            level_ms=[block_ms],
            now_ms=self._events.now_ms,
            report=report_nothing,
            threads=threads,
            claims=VirtualClaims(shared, threads.lookers, self._events.now_ms),
        )


def report_nothing(what: str, **fields: Field) -> None:
    """Ignore reports: what fails is counted."""
