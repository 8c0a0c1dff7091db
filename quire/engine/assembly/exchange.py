"""Build the exchange of KV blocks with other engines: its port, store, threads and card.

A part of the wiring, like assemble.py, loaded only where blocks are exchanged. The port is opened
before anything is loaded, so that one in use is found out early. Always holds: engines with
another key, fingerprint or layout exchange nothing.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, replace

import numpy as np

from quire.base.clock import Clock
from quire.base.errors import CapacityError, SettingError
from quire.base.kv_transfer import TransferCard
from quire.base.log import Log
from quire.base.report import Report
from quire.cache.exchange_map import ExchangeMap
from quire.config.groups import EngineConfig
from quire.config.transfer import TransferConfig, peer_address, read_transfer_key
from quire.engine.assembly.tier import OpenTier
from quire.engine.core import EngineCore
from quire.engine.model_card import ModelCard
from quire.engine.transfer.exchange import Exchange, Terms
from quire.engine.transfer.peers import Peers
from quire.execute.executor import Executor
from quire.runner.tier_mover import TierMover, num_buffers
from quire.transfer.host import HostStore
from quire.transfer.links.block_client import BlockClient
from quire.transfer.links.block_server import BlockServer
from quire.transfer.links.handshake import TransferKeys
from quire.transfer.links.leases import LeaseBook
from quire.transfer.links.messages import Identity
from quire.transfer.links.shared_memory import OwnSegment

_BACKLOG = 64
# What a connection is thought to move in a millisecond, until that is measured.
_BYTES_A_MS = 1_000_000


class ExchangePort:
    """The shared key, and the socket at which blocks are handed over, if they are.

    Raises SettingError where the key cannot be used or the address is not free.
    """

    def __init__(self, config: TransferConfig) -> None:
        assert config.kv_transfer_key_file is not None, "blocks are exchanged"
        self.keys = TransferKeys.derive(read_transfer_key(config.kv_transfer_key_file))
        self.listening = _listen(config) if config.hands_over else None

    @property
    def number(self) -> int:
        """The port; 0 where nothing is handed over."""
        return 0 if self.listening is None else int(self.listening.getsockname()[1])

    def close(self) -> None:
        """Close the socket."""
        if self.listening is not None:
            self.listening.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStore(OpenTier):
    """The store as a tier. segment: its memory, where other processes may map it."""

    port: ExchangePort
    store: HostStore
    segment: OwnSegment | None


def open_store(
    config: EngineConfig, port: ExchangePort, executor: Executor, *, clock: Clock, report: Report
) -> ExchangeStore:
    """Allocate the memory for blocks on their way. Raises SettingError and CapacityError."""
    settings, block_bytes = config.transfer, executor.block_bytes
    num_blocks = settings.kv_transfer_bytes // block_bytes
    if not num_blocks:
        raise SettingError(
            f"kv_transfer_bytes is {settings.kv_transfer_bytes}; a block takes {block_bytes} "
            "bytes: give at least some blocks"
        )
    segment = None
    if settings.hands_over and settings.kv_transfer_backend != "tcp":
        segment = OwnSegment(num_blocks * block_bytes)
        memory = segment.memory
    else:
        try:
            memory = np.empty(num_blocks * block_bytes, np.uint8)
        except MemoryError as error:
            raise CapacityError(
                f"kv_transfer_bytes is {settings.kv_transfer_bytes} and there is no memory for "
                "it; lower --kv-transfer-size"
            ) from error
    store = HostStore([memory], block_bytes)
    tier = ExchangeMap(num_blocks, max_saving=num_buffers(block_bytes, store.tier))
    return ExchangeStore(
        tier=tier,
        mover=TierMover(executor, store, now_ms=clock.now_ms, report=report),
        hash_key=port.keys.digests,
        note=_note(settings, port, num_blocks * config.kv_block_tokens),
        port=port,
        store=store,
        segment=segment,
    )


def start_exchange(
    opened: ExchangeStore,
    core: EngineCore,
    card: ModelCard,
    config: EngineConfig,
    *,
    fingerprint: bytes,
    clock: Clock,
    report: Report,
) -> tuple[Exchange, ModelCard]:
    """Connect store, scheduler and sockets; return the exchange, and the card that names it."""
    settings, port = config.transfer, opened.port
    addresses = [peer_address(peer) for peer in settings.kv_transfer_peer]
    leases = LeaseBook(clock.now_ms, 1000.0 * settings.kv_transfer_timeout_s)
    assert isinstance(opened.tier, ExchangeMap), "made by open_store"
    exchange = Exchange(
        scheduler=core.scheduler,
        mover=opened.mover,
        store=opened.store,
        tier=opened.tier,
        leases=leases,
        peers=Peers([(host, number) for host, number in addresses if number]),
        terms=Terms(
            vocab_size=card.vocab_size,
            block_size=card.block_size,
            block_bytes=card.block_bytes,
            fetch=settings.kv_transfer_fetch,
            block_ms=card.block_bytes / _BYTES_A_MS,
        ),
        now_ms=clock.now_ms,
        report=report,
    )
    exchange.segment = opened.segment
    engine_id = secrets.token_hex(8)
    identity = _identity(card, engine_id, fingerprint, _backends(settings, has_segment=True))
    if port.listening is not None:
        backends = _backends(settings, has_segment=opened.segment is not None)
        exchange.server = BlockServer(
            port.listening,
            key=port.keys.links,
            identity=_identity(card, engine_id, fingerprint, backends),
            leases=leases,
            room=opened.store.room,
            desk=exchange,
            segment=opened.segment,
            report=report,
        )
    if settings.fetches:
        exchange.client = BlockClient(
            key=port.keys.links,
            identity=identity,
            room=opened.store.room,
            wake=lambda: exchange.wake(),
            report=report,
            timeout_s=settings.kv_transfer_timeout_s,
        )
    core.tier = exchange
    Log("engine").event(
        "KV blocks are exchanged",
        role=settings.role,
        engine_id=engine_id,
        **({"transfer_address": _address(settings, port)} if port.number else {}),
    )
    offer = TransferCard(
        engine_id=engine_id,
        role=settings.role,
        host=settings.kv_transfer_host,
        port=port.number,
        peer_hosts=tuple(host for host, _ in addresses),
    )
    return exchange, replace(card, transfer=offer)


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


def _backends(settings: TransferConfig, *, has_segment: bool) -> tuple[str, ...]:
    wanted = {"auto": ("shm", "tcp"), "tcp": ("tcp",), "shm": ("shm",)}
    return tuple(one for one in wanted[settings.kv_transfer_backend] if one != "shm" or has_segment)


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
    return f"KV transfer: role {settings.role}{where}, room for {num_tokens} tokens on their way"
