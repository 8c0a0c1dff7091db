"""Build the sources of KV blocks from outside an engine: an exchange, a shared store, or both.

A part of the wiring, like assemble.py, loaded only where there is one of them. What can be found
out without the model is, before anything is loaded. Always holds: both have one memory and one map
of it, and one name for a block: with an exchange under the transfer key, else under the store's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.base.clock import Clock
from quire.base.report import Report
from quire.config.groups import EngineConfig
from quire.engine.assembly.tier import OpenTier
from quire.engine.core import EngineCore
from quire.engine.model_card import ModelCard
from quire.engine.outside_blocks import OutsideBlocks
from quire.execute.executor import Executor
from quire.program.program import Program
from quire.transfer.folder import TierFolder

if TYPE_CHECKING:
    from quire.engine.assembly.exchange import ExchangePort
    from quire.engine.assembly.kv_store import StorePort
    from quire.engine.kv_store.store_client import StoreClient
    from quire.engine.transfer.exchange import KVExchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What an engine has of them, and the engine's card. None: there is none."""

    blocks: OutsideBlocks
    card: ModelCard
    exchange: KVExchange | None
    store_client: StoreClient | None


class OutsidePorts:
    """What is opened before the model: the port of an exchange, and a store. folder: of a tier.

    Raises SettingError where one of them cannot be used.
    """

    def __init__(self, config: EngineConfig, folder: TierFolder | None) -> None:
        self._config, self._folder = config, folder
        self._exchange: ExchangePort | None = None
        self._store: StorePort | None = None
        try:
            if config.transfer.is_on:
                from quire.engine.assembly.exchange import ExchangePort

                self._exchange = ExchangePort(config.transfer)
            if config.kv_store.is_on:
                from quire.engine.assembly.kv_store import StorePort

                self._store = StorePort(config, folder)
        except BaseException:
            self.close()
            raise

    def fingerprint(self, fingerprint: bytes) -> bytes:
        """Return the fingerprint of the engine's blocks, which may have travelled encoded."""
        return fingerprint if self._store is None else self._store.fingerprint(fingerprint)

    def open_tier(
        self,
        executor: Executor,
        program: Program,
        fingerprint: bytes,
        step_tokens: int,
        clock: Clock,
        report: Report,
    ) -> OpenTier:
        """Allocate memory for blocks on their way, and open what is beside it or below.

        step_tokens: of the largest step. Raises SettingError and CapacityError.
        """
        levels = None
        if self._store is not None:
            levels = self._store.open_levels(executor, program, fingerprint, clock, report)
            if self._exchange is None:
                return self._store.open_tier(levels, executor, clock, report)
        assert self._exchange is not None, "there is one of them"
        return self._exchange.open_tier(
            self._config,
            executor,
            self._folder,
            levels,
            fingerprint=fingerprint,
            step_tokens=step_tokens,
            clock=clock,
            report=report,
        )

    def start(
        self,
        opened: OpenTier | None,
        core: EngineCore,
        card: ModelCard,
        fingerprint: bytes,
        clock: Clock,
        report: Report,
    ) -> Outside:
        """Connect memory, scheduler, sockets and levels. opened: by open_tier.

        With both a request asks the store first, and other engines for the rest.
        """
        assert opened is not None, "opened before the scheduler was made"
        exchange = client = None
        if self._exchange is not None:
            exchange, card = self._exchange.start(
                opened, core, card, self._config, fingerprint, clock, report
            )
        if self._store is not None:
            try:
                client, card = self._store.start(opened, core, card, clock, report)
            except BaseException:
                if exchange is not None:
                    exchange.close()
                raise
            if exchange is not None:
                exchange.fetching.levels = client.waiting
        sources = [one for one in (exchange, client) if one is not None]
        core.tier = blocks = OutsideBlocks(core.scheduler, opened.mover, sources)
        return Outside(blocks=blocks, card=card, exchange=exchange, store_client=client)

    def close(self) -> None:
        """Close what was opened, where the engine does not start."""
        for port in (self._exchange, self._store):
            if port is not None:
                port.close()
