"""Build the exchange of KV blocks with other engines: its port, store, threads and card.

A part of the wiring, like assemble.py, loaded only where blocks are exchanged. The port is opened
before anything is loaded, so that one in use is found out early. Always holds: engines with
another key, fingerprint or layout exchange nothing.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.base.kv_transfer import TransferCard
from quire.base.log import Log
from quire.base.report import Report
from quire.cache.exchange_beside_tier import TierBesideExchange
from quire.cache.exchange_map import ExchangeMap
from quire.cache.store_map import StoreMap
from quire.config.groups import EngineConfig
from quire.config.key_file import read_shared_key
from quire.config.transfer import TransferConfig, peer_address
from quire.engine.assembly.memory_tier import Levels, MemoryTier, RoomSetting, host_memory, pin
from quire.engine.assembly.tier import OpenTier, open_tier
from quire.engine.core import EngineCore
from quire.engine.model_card import ModelCard
from quire.engine.transfer.exchange import KVExchange, Shared
from quire.engine.transfer.fetching import Fetching, FetchTerms
from quire.engine.transfer.handing import Handing
from quire.engine.transfer.own_load import OwnLoad
from quire.engine.transfer.peers import Peers
from quire.execute.executor import Executor
from quire.runner.mover_pair import MoverPair
from quire.runner.tier_mover import TierMover, num_buffers
from quire.scheduler.scheduler import Scheduler
from quire.transfer.folder import TierFolder
from quire.transfer.host import HostStore
from quire.transfer.links.block_client import BlockClient
from quire.transfer.links.block_server import BlockServer
from quire.transfer.links.handshake import TransferKeys
from quire.transfer.links.leases import LeaseBook
from quire.transfer.links.messages import Identity
from quire.transfer.links.nixl import NixlAgent, bindings
from quire.transfer.links.security import LinkSecurity, connecting_context, serving_context
from quire.transfer.links.shared_memory import MappedSegments, OwnSegment
from quire.transfer.links.ways import INLINE, Opener, OwnMemory

_BACKLOG = 64
# What a connection is thought to move in a millisecond, until that is measured.
_BYTES_A_MS = 1_000_000


class ExchangePort:
    """Keys and certificates, and the socket at which blocks are handed over, if they are.

    Raises SettingError where a file or library cannot be used, or the address is not free.
    """

    def __init__(self, config: TransferConfig) -> None:
        assert config.kv_transfer_key_file is not None, "blocks are exchanged"
        keys = TransferKeys.derive(
            read_shared_key(config.kv_transfer_key_file, "kv_transfer_key_file")
        )
        self.hash_key, self.security = keys.digests, _security(config, keys.links)
        if config.kv_transfer_backend == "nixl":
            bindings()
        self.listening = _listen(config) if config.hands_over else None
        self._segment: OwnSegment | None = None

    @property
    def number(self) -> int:
        """The port; 0 where nothing is handed over."""
        return 0 if self.listening is None else int(self.listening.getsockname()[1])

    def open_tier(
        self,
        config: EngineConfig,
        executor: Executor,
        folder: TierFolder | None,
        levels: Levels | None,
        *,
        fingerprint: bytes,
        step_tokens: int,
        clock: Clock,
        report: Report,
    ) -> ExchangeStore:
        """Allocate the memory for blocks on their way, and open the tier in `folder` beside it.

        levels: of a shared store, which has the tier as one of them; its blocks pass the same
        memory. step_tokens: of the largest step. Raises SettingError and CapacityError.
        """
        settings, block_bytes = config.transfer, executor.block_bytes
        room = RoomSetting("kv_transfer_bytes", "--kv-transfer-size", settings.kv_transfer_bytes)
        rooms, num_blocks = [room], room.num_blocks(block_bytes)
        note = _note(settings, self, num_blocks * config.kv_block_tokens)
        if levels is not None:
            num_blocks, note = num_blocks + levels.num_blocks, f"{note}\n{levels.note}"
            rooms.append(levels.room)
        segment = self._segment = _segment(settings, num_blocks * block_bytes)
        memory = _memory(segment, num_blocks * block_bytes, rooms, executor)
        store = HostStore([memory], block_bytes)
        make = ExchangeMap if levels is None else StoreMap
        # Of a step at least, so that none of its blocks waits for the next one.
        step_blocks = -(-step_tokens // config.kv_block_tokens)
        max_saving = max(num_buffers(block_bytes, store.tier), 2 * step_blocks)
        exchange = make(num_blocks, max_saving=max_saving)
        mover = TierMover(executor, store, now_ms=clock.now_ms, report=report)
        opened = ExchangeStore(
            tier=exchange,
            mover=mover,
            hash_key=self.hash_key,
            note=note,
            store=store,
            levels=levels,
            exchange=exchange,
            own_mover=mover,
            memory=memory,
            segment=segment,
        )
        if levels is not None or not config.cache.has_tier:
            return opened
        try:
            own = open_tier(
                folder,
                config,
                executor,
                fingerprint=fingerprint,
                clock=clock,
                report=report,
                exchange=exchange,
            )
        except BaseException:
            mover.close()
            raise
        assert isinstance(own.tier, TierBesideExchange), "opened with an exchange"
        assert isinstance(own.mover, TierMover), "of one store"
        pair = MoverPair(own.mover, mover, first=own.tier.first, on_lost=own.tier.forget_tier)
        return replace(opened, tier=own.tier, mover=pair, note=f"{opened.note}\n{own.note}")

    def start(
        self,
        opened: OpenTier,
        core: EngineCore,
        card: ModelCard,
        config: EngineConfig,
        fingerprint: bytes,
        clock: Clock,
        report: Report,
    ) -> tuple[KVExchange, ModelCard]:
        """Connect memory, scheduler and sockets; return the exchange, and the card that names it.

        opened: by open_tier.
        """
        assert isinstance(opened, ExchangeStore), "opened before the scheduler was made"
        return _started(
            self,
            opened,
            core.scheduler,
            card,
            config.transfer,
            fingerprint=fingerprint,
            clock=clock,
            report=report,
        )

    def close(self) -> None:
        """Close the socket, and memory that others could map, where the engine does not start."""
        if self.listening is not None:
            self.listening.close()
        if self._segment is not None:
            self._segment.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStore(MemoryTier):
    """The memory as a tier, or as a part of one. exchange: the map of its own places; own_mover:
    copies to them. memory: all of it; segment: the same, where other processes may map it."""

    exchange: ExchangeMap
    own_mover: TierMover
    memory: NDArray[np.uint8]
    segment: OwnSegment | None


def _started(
    port: ExchangePort,
    opened: ExchangeStore,
    scheduler: Scheduler,
    card: ModelCard,
    settings: TransferConfig,
    *,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> tuple[KVExchange, ModelCard]:
    addresses = [peer_address(peer) for peer in settings.kv_transfer_peer]
    engine_id = secrets.token_hex(8)
    leases = LeaseBook(clock.now_ms, 1000.0 * settings.kv_transfer_timeout_s)
    assert scheduler.hand_overs is not None, "the scheduler has an ExchangeMap"
    own = OwnLoad(scheduler)
    handing = Handing(
        hand_overs=scheduler.hand_overs,
        tier=opened.exchange,
        leases=leases,
        own=own,
        vocab_size=card.vocab_size,
        now_ms=clock.now_ms,
        report=report,
    )
    fetching = Fetching(
        scheduler=scheduler,
        store=opened.store,
        tier=opened.exchange,
        peers=Peers([(host, number) for host, number in addresses if number]),
        own=own,
        terms=FetchTerms(
            block_size=card.block_size,
            fetch=settings.kv_transfer_fetch,
            block_ms=card.block_bytes / _BYTES_A_MS,
        ),
        now_ms=clock.now_ms,
        report=report,
    )
    ways = _ways(settings, opened, engine_id)
    exchange = KVExchange(
        handing=handing,
        fetching=fetching,
        block_bytes=card.block_bytes,
        shared=ways.to_close,
    )
    try:
        if port.listening is not None:
            opened.own_mover.on_saved = leases.saved
            exchange.server = BlockServer(
                port.listening,
                security=port.security,
                identity=_identity(card, engine_id, fingerprint, ways.handing),
                leases=leases,
                room=opened.store.room,
                desk=handing,
                shared=ways.shared,
                report=report,
            )
        if settings.fetches:
            fetching.client = BlockClient(
                security=port.security,
                identity=_identity(card, engine_id, fingerprint, ways.fetching),
                room=opened.store.room,
                wake=lambda: exchange.wake(),
                openers=ways.openers,
                timeout_s=settings.kv_transfer_timeout_s,
            )
    except BaseException:
        exchange.close()
        raise
    Log("engine").event(
        "KV blocks are exchanged",
        role=settings.role,
        engine_id=engine_id,
        **({"transfer_address": _address(settings, port)} if port.number else {}),
    )
    hosts = tuple(host for host, _ in addresses)
    return exchange, replace(card, transfer=_offer(settings, port, engine_id, hosts))


def _offer(
    settings: TransferConfig, port: ExchangePort, engine_id: str, peer_hosts: tuple[str, ...]
) -> TransferCard:
    return TransferCard(
        engine_id=engine_id,
        role=settings.role,
        host=settings.kv_transfer_host,
        port=port.number,
        peer_hosts=peer_hosts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """How bytes travel, by name, the preferred one first. shared, openers: see BlockServer and
    BlockClient."""

    handing: tuple[str, ...]
    fetching: tuple[str, ...]
    shared: Mapping[str, OwnMemory]
    openers: Mapping[str, Opener]
    to_close: tuple[Shared, ...]


def _ways(settings: TransferConfig, opened: ExchangeStore, engine_id: str) -> _Ways:
    """Return the ways that settings allow here. Raises SettingError where a library lacks."""
    wanted = {"auto": ("shm", "tcp")}.get(
        settings.kv_transfer_backend, (settings.kv_transfer_backend,)
    )
    shared: dict[str, OwnMemory] = {}
    openers: dict[str, Opener] = {}
    to_close: list[Shared] = []
    if "shm" in wanted:
        segments = MappedSegments()
        openers["shm"] = segments.opener()
        to_close.append(segments)
    if opened.segment is not None:
        shared["shm"] = opened.segment
        to_close.append(opened.segment)
    if "nixl" in wanted:
        agent = NixlAgent(engine_id)
        try:
            shared["nixl"] = agent.own(opened.memory)
        except BaseException:
            agent.close()
            raise
        openers["nixl"] = agent.opener(opened.store.block_bytes)
        to_close.append(agent)
    return _Ways(
        handing=tuple(one for one in wanted if one in shared or one == INLINE),
        fetching=wanted,
        shared=shared,
        openers=openers,
        to_close=tuple(to_close),
    )


def _segment(settings: TransferConfig, num_bytes: int) -> OwnSegment | None:
    """Return memory for blocks on their way that others may map, if they may. Raises
    CapacityError."""
    if settings.hands_over and settings.kv_transfer_backend in ("auto", "shm"):
        return OwnSegment(num_bytes)
    return None


def _memory(
    segment: OwnSegment | None,
    num_bytes: int,
    rooms: Sequence[RoomSetting],
    executor: Executor,
) -> NDArray[np.uint8]:
    """Return memory for blocks on their way: the segment's, if there is one."""
    if segment is None:
        return host_memory(num_bytes, rooms, executor)
    pin(segment.memory, rooms, executor)
    return segment.memory


def _security(config: TransferConfig, key: bytes) -> LinkSecurity:
    """Return the key and the TLS of connections. Raises SettingError."""
    cert, authorities = config.kv_transfer_tls_cert, config.kv_transfer_tls_ca
    cert_key = config.kv_transfer_tls_key
    serving = connecting = None
    if config.hands_over and cert is not None:
        serving = serving_context(cert, cert_key, authorities)
    if config.fetches and authorities is not None:
        connecting = connecting_context(authorities, cert, cert_key)
    return LinkSecurity(key, serving, connecting)


def _identity(
    card: ModelCard, engine_id: str, fingerprint: bytes, backends: tuple[str, ...]
) -> Identity:
    return Identity(
        engine_id=engine_id,
        fingerprint=fingerprint,
        block_size=card.block_size,
        block_bytes=card.block_bytes,
        model=card.name,
        recipe=card.recipe,
        kv_dtype=card.kv_cache_dtype,
        backends=backends,
    )


def _listen(config: TransferConfig) -> socket.socket:
    host, port = config.kv_transfer_host, config.kv_transfer_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        raise SettingError(
            f"kv_transfer_port: cannot listen at {host} port {port} ({error}); choose another "
            "--kv-transfer-host or --kv-transfer-port"
        ) from error
    return listening


def _address(settings: TransferConfig, port: ExchangePort) -> str:
    host = settings.kv_transfer_host
    return f"[{host}]:{port.number}" if ":" in host else f"{host}:{port.number}"


def _note(settings: TransferConfig, port: ExchangePort, num_tokens: int) -> str:
    where = f", hands over at {_address(settings, port)}" if port.number else ""
    return f"KV transfer: role {settings.role}{where}, transfer buffer of {num_tokens} tokens"
