"""Build the use of a shared KV store: its directory or master, host memory, levels and threads.

A part of the wiring, like assemble.py, loaded only where there is a store. The store is opened
before anything is loaded, so that one that cannot be used is found out early. Always holds: engines
with another model, layout, instruction set or encoding find nothing of each other's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.base.report import Report
from quire.base.user_path import user_path
from quire.cache.store_map import StoreMap
from quire.config.groups import EngineConfig
from quire.config.key_file import read_shared_key
from quire.config.kv_store import KVStoreConfig, StorePlace, store_place
from quire.engine.assembly.memory_tier import Levels, MemoryTier, RoomSetting, host_memory
from quire.engine.assembly.tier import OpenTier
from quire.engine.core import EngineCore
from quire.engine.kv_store.costs import StoreSettings
from quire.engine.kv_store.disk_level import DiskLevel
from quire.engine.kv_store.store_client import StoreClient
from quire.engine.model_card import ModelCard
from quire.execute.executor import Executor
from quire.kv_store.directory import DirectoryStore
from quire.kv_store.directory_files import StoreFiles
from quire.kv_store.entry import HEAD_BYTES, EntryFormat, Seal, checksum, keyed_seal
from quire.kv_store.int8 import Int8Encoding
from quire.kv_store.level import SharedLevel
from quire.kv_store.shared_store import SharedStore
from quire.program.program import Program
from quire.runner.tier_mover import TierMover, num_buffers
from quire.transfer.disk import DiskStore
from quire.transfer.folder import TierFolder
from quire.transfer.host import HostStore

# What a level is thought to give back in a millisecond, until that is measured.
_DISK_BYTES_A_MS, _SHARED_BYTES_A_MS = 500_000, 250_000
_PLAIN = 0  # the number of no encoding


class StorePort:
    """The shared store, open or ready to be opened, and the key of block digests.

    folder: of a disk tier, which is asked before the store.

    Raises SettingError where it cannot be used.
    """

    def __init__(self, engine: EngineConfig, folder: TierFolder | None) -> None:
        config = engine.kv_store
        assert config.kv_store is not None, "there is a store"
        self.config, self._cache, self._folder = config, engine.cache, folder
        self._block_tokens = engine.kv_block_tokens
        self.place: StorePlace = store_place(config.kv_store)
        self.seal: Seal = checksum
        self._files: StoreFiles | None = None
        self._store: SharedStore | None = None  # once it is opened
        self._disk: DiskStore | None = None  # likewise
        self._open: Callable[[int], SharedStore]
        if not self.place.port:
            files = self._files = StoreFiles(user_path(self.place.directory))
            self.hash_key = files.hash_key
            self._open = lambda entry_bytes: DirectoryStore(files, max_bytes=config.kv_store_bytes)
            return
        from quire.kv_store.mooncake import MooncakeStore, check_installed

        assert config.kv_store_key_file is not None, "checked with the settings"
        check_installed()
        secret = read_shared_key(config.kv_store_key_file, "kv_store_key_file")
        self.hash_key = _derived(secret, b"digests", 16)
        self.seal = keyed_seal(_derived(secret, b"entries", 32))
        self._open = lambda entry_bytes: MooncakeStore(
            self.place,
            own_host=config.kv_store_host,
            segment_bytes=config.kv_store_bytes,
            entry_bytes=entry_bytes,
            timeout_s=config.kv_store_timeout_s,
        )

    @property
    def note(self) -> str:
        """Where blocks are shared."""
        size = f"{self.config.kv_store_bytes / 2**30:,.1f} GiB"
        if self._files is None:
            return f"Mooncake at {self.place.host}:{self.place.port}, {size} of it here"
        read_only = "" if self._files.can_write else "; read-only: nothing is added"
        return f"{self._files.path}, {size}{read_only}"

    def fingerprint(self, fingerprint: bytes) -> bytes:
        """Return the fingerprint of blocks that may have travelled in an encoding."""
        encoding = self.config.kv_store_encoding
        if encoding == "none":
            return fingerprint
        named = fingerprint + b"\0transfer " + encoding.encode()
        return hashlib.blake2b(named, digest_size=len(fingerprint)).digest()

    def open_levels(
        self,
        executor: Executor,
        program: Program,
        fingerprint: bytes,
        clock: Clock,
        report: Report,
    ) -> Levels:
        """Open the store, and the disk tier before it. fingerprint: of the engine's blocks.

        Raises SettingError.
        """
        settings, block_bytes = self.config, executor.block_bytes
        buffer_bytes = settings.kv_store_buffer_bytes
        room = RoomSetting("kv_store_buffer_bytes", "--kv-store-buffer-size", buffer_bytes)
        num_blocks = room.num_blocks(block_bytes)
        encoding = _encoding(settings, program, block_bytes)
        entries = EntryFormat(
            fingerprint=fingerprint,
            payload_bytes=block_bytes if encoding is None else encoding.payload_bytes,
            encoding=_PLAIN if encoding is None else encoding.number,
            seal=self.seal,
        )
        self._store = self.open(HEAD_BYTES + entries.payload_bytes)
        shared = SharedLevel(
            self._store,
            entries,
            encoding=encoding,
            now_ms=clock.now_ms,
            timeout_ms=1000.0 * settings.kv_store_timeout_s,
            report=report,
        )
        disk, on_disk = None, ""
        if self._folder is not None:
            self._disk = DiskStore(
                self._folder,
                max_bytes=self._cache.kv_tier_bytes,
                block_bytes=block_bytes,
                fingerprint=fingerprint,
            )
            disk, on_disk = (
                DiskLevel(self._disk, report),
                f"; a tier in {self._folder.path} before it",
            )
        return Levels(
            shared=shared,
            disk=disk,
            room=room,
            num_blocks=num_blocks,
            note=f"shared KV store: {self.note}; transfer buffer of "
            f"{num_blocks * self._block_tokens} tokens{on_disk}",
        )

    def open_tier(
        self, levels: Levels, executor: Executor, clock: Clock, report: Report
    ) -> OpenTier:
        """Allocate host memory for blocks of `levels`. Raises CapacityError."""
        block_bytes = executor.block_bytes
        memory = host_memory(levels.num_blocks * block_bytes, [levels.room], executor)
        store = HostStore([memory], block_bytes)
        return MemoryTier(
            tier=StoreMap(store.num_blocks, max_saving=num_buffers(block_bytes, store.tier)),
            mover=TierMover(executor, store, now_ms=clock.now_ms, report=report),
            hash_key=self.hash_key,
            note=levels.note,
            store=store,
            levels=levels,
        )

    def start(
        self,
        opened: OpenTier,
        core: EngineCore,
        card: ModelCard,
        clock: Clock,
        report: Report,
    ) -> tuple[StoreClient, ModelCard]:
        """Connect host memory, scheduler and levels; return the client, and the engine's card.

        With an encoding answers depend on it, so that the card has another fingerprint.
        """
        assert isinstance(opened, MemoryTier), "opened with levels"
        assert isinstance(opened.tier, StoreMap), "made with levels"
        levels, block_bytes = opened.levels, card.block_bytes
        assert levels is not None, "opened with levels"
        disk_ms = [] if levels.disk is None else [block_bytes / _DISK_BYTES_A_MS]
        client = StoreClient(
            scheduler=core.scheduler,
            store=opened.store,
            tier=opened.tier,
            shared=levels.shared,
            disk=levels.disk,
            settings=StoreSettings(
                block_size=self._block_tokens,
                fetch=self.config.kv_store_fetch,
                timeout_ms=1000.0 * self.config.kv_store_timeout_s,
            ),
            level_ms=[*disk_ms, block_bytes / _SHARED_BYTES_A_MS],
            now_ms=clock.now_ms,
            report=report,
        )
        named = self.fingerprint(card.fingerprint.encode())
        if named != card.fingerprint.encode():
            card = replace(card, fingerprint=f"fp_{named.hex()[:16]}")
        return client, card

    def open(self, entry_bytes: int) -> SharedStore:
        """Open the store for entries of one size. Raises SettingError."""
        if self._files is not None and entry_bytes > self.config.kv_store_bytes:
            raise SettingError(
                f"kv_store_bytes is {self.config.kv_store_bytes}, and a block takes {entry_bytes}: "
                "raise --kv-store-size to at least that"
            )
        return self._open(entry_bytes)

    def close(self) -> None:
        """Close the store and the disk tier before it, where the engine does not start."""
        if self._disk is not None:
            self._disk.close()
        if self._store is not None:
            self._store.close()
        elif self._files is not None:
            self._files.close()


def _encoding(settings: KVStoreConfig, program: Program, block_bytes: int) -> Int8Encoding | None:
    if settings.kv_store_encoding == "none":
        return None
    found = sorted({cache.precision for cache in program.caches})
    if found != ["bf16"]:
        raise SettingError(
            f"kv_store_encoding is int8 and the KV cache is {', '.join(found)}; blocks of a bf16 "
            "cache are encoded: give --kv-cache-dtype bf16, or leave it out"
        )
    return Int8Encoding(block_bytes, program.caches[0].head_dim)


def _derived(secret: bytes, what: bytes, size: int) -> bytes:
    """Return a key of its own for one purpose."""
    return hashlib.blake2b(secret, digest_size=size, person=b"kv store " + what[:7]).digest()
