"""What all routes share: the engine, the settings, the counters, and whether we take requests.

`Engine` is the part of EngineClient the edge uses. Knows no route and no JSON. Always holds:
`engine()` gives an engine only while requests may be taken; `idle` is set exactly while no request
for tokens is open.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from quire.api.generation.request_registry import RequestRegistry
from quire.api.http.auth import Keys
from quire.api.http.errors import SlowReader, shape_of
from quire.api.http.thread_pools import ThreadPools
from quire.api.streaming.resumable_stream import ResumableStreams
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base.cache_usage import CacheReport
from quire.base.errors import (
    ContextTooLong,
    OverloadedError,
    QuireError,
    ShuttingDown,
    TimedOut,
    WorkerError,
)
from quire.base.log import Log
from quire.base.log_process import dropped_lines
from quire.base.records import EngineStats
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.config.admin_keys import read_admin_keys
from quire.config.groups import ServerConfig
from quire.config.tenants import Tenant
from quire.engine.model_card import Health, ModelCard
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.obs.metrics import Metrics
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# Requests that wait while the server is paused.
MOST_HELD = 1024
# When to ask again of a server that an admin holds: nobody knows for how long.
_LOOK_AGAIN_S = 10.0


class Engine(Protocol):
    """What the edge needs of an engine; quire.engine.client.engine_client.EngineClient has it."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    on_stats: Callable[[EngineStats], None] | None
    dead: asyncio.Event

    def default_sampling(self) -> SamplingParams: ...

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None: ...

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        first_stream: int = 0,
        cache_salt: str = "",
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        text_rules: TextRules = PLAIN_TEXT,
    ) -> AsyncIterator[TextDelta]: ...

    def num_waiting(self, request_id: str) -> int: ...

    async def cache_report(self, *, num_prefixes: int = 0) -> CacheReport: ...

    async def flush_cache(self) -> int: ...

    def health(self) -> Health: ...


class ServerState:
    """One server process's state. Made and used in the event loop's thread.

    tenants: of the tenants file, None without one. keys: who may ask, as of now. peers: the other
    processes, where the server has several.
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        log: Log,
        tenants: Sequence[Tenant] | None = None,
        peers: SiblingWorkers | None = None,
    ) -> None:
        self.config = config
        self.peers = peers
        self._admin_digests = read_admin_keys(config.admin_key_file)
        self.know(tenants)
        self.metrics = metrics
        self.log = log
        self.lanes = ThreadPools()
        self.live = RequestRegistry()
        self.tellings = ResumableStreams(config.resume_memory_bytes)
        self.draining = False
        self.num_held = 0
        self._takes = asyncio.Event()
        self._takes.set()
        loop = asyncio.get_running_loop()
        self.leaving: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.idle = asyncio.Event()
        self.idle.set()
        self._engine: Engine | None = None
        self._num_open = 0
        self._counted = _Counted(self._hold, self._let_go)

    def fingerprint(self, card: ModelCard) -> str:
        """The engine's; where this server was set to answer otherwise, of those settings too."""
        config = self.config
        told = (config.tool_call_parser, config.reasoning_parser, config.max_output_tokens)
        if told == ("auto", "auto", None):
            return card.fingerprint
        digest = hashlib.blake2b(repr((card.fingerprint, *told)).encode(), digest_size=8)
        return f"fp_{digest.hexdigest()}"

    @property
    def has_strangers(self) -> bool:
        """Whether callers may be different people: more than one key, or none and open to all."""
        num_keys = len(self.config.api_key)
        num_keys += sum(len(tenant.key_digests) for tenant in self.tenants or ())
        num_keys += len(self._admin_digests) if num_keys else 0
        return num_keys > 1 or (num_keys == 0 and self.config.insecure)

    def know(self, tenants: Sequence[Tenant] | None) -> None:
        """From now on these are the tenants; what was let in goes on."""
        self.tenants = tenants
        shares = self.config.share_prefixes
        self.keys = Keys(self.config.api_key, tenants, self._admin_digests, shares_prefixes=shares)

    def know_admins(self, digests: Sequence[str]) -> None:
        """From now on these are the keys of the admin key file, by their digests."""
        self._admin_digests = tuple(digests)
        self.know(self.tenants)

    def start(self, engine: Engine) -> None:
        """The engine is ready: take requests."""
        self._engine = engine
        engine.on_stats = self.metrics.see

    @property
    def loaded(self) -> Engine | None:
        """The engine, once it is ready, whether requests are taken or not."""
        return self._engine

    @property
    def paused(self) -> bool:
        """Whether requests for tokens are held."""
        return not self._takes.is_set()

    def pause(self) -> None:
        """Hold requests for tokens that come from now on; what runs goes on."""
        if not self.draining:
            self._takes.clear()

    def refuse_new(self) -> None:
        """Take nothing new, held requests neither, until `resume`."""
        self.draining = True
        self._takes.set()

    def resume(self) -> None:
        """Take requests again, unless the server is being stopped."""
        self._takes.set()
        self.draining = self.leaving.done()

    def become(self, *, paused: bool, draining: bool) -> None:
        """As another process of this server is, where an admin was."""
        self.draining = draining or self.leaving.done()
        if paused and not self.draining:
            self._takes.clear()
        else:
            self._takes.set()

    async def admitted(self) -> None:
        """Wait while the server is paused. Raises OverloadedError where too many wait, or none may
        go on."""
        if self.paused:
            if self.num_held >= MOST_HELD:
                raise OverloadedError(
                    "the server is paused; try again later", retry_after_s=_LOOK_AGAIN_S
                )
            self.num_held += 1
            try:
                await self._takes.wait()
            finally:
                self.num_held -= 1
            self.engine()

    def drain(self) -> None:
        """Take nothing new, for good; what is open goes on."""
        self.refuse_new()
        if not self.leaving.done():
            self.leaving.set_result(None)

    def end_all(self) -> None:
        """Grace is over: end what is open with an error."""
        if not self.over.done():
            self.over.set_result(None)

    def engine(self) -> Engine:
        """The engine, if requests may be taken; else OverloadedError or WorkerError says why."""
        if self.draining:
            raise self._refusal()
        if self._engine is None:
            raise OverloadedError("the model is still loading; try again", retry_after_s=1.0)
        if self._engine.dead.is_set():
            raise WorkerError(f"the engine is gone: {self._engine.health().reason}")
        return self._engine

    def _refusal(self) -> ShuttingDown:
        """Told while nothing new is taken: when another server will be here, or this one may be."""
        again_s = max(self.config.grace_s, 1.0) if self.leaving.done() else _LOOK_AGAIN_S
        return ShuttingDown(f"{self._why_draining()}; try elsewhere", retry_after_s=again_s)

    def _why_draining(self) -> str:
        who = (
            "the server is shutting down" if self.leaving.done() else "an admin drained the server"
        )
        return f"{who}: it takes nothing new"

    def health(self) -> Health:
        """The engine's word, or ours while there is none or we are leaving."""
        if self._engine is None:
            reason = "the model is still loading"
            return Health(ok=False, state="starting", reason=reason, pending=0, steps_total=0)
        health = self._engine.health()
        if self.draining and health.state != "dead":
            reason = self._why_draining()
            return Health(
                ok=False,
                state="draining",
                reason=reason,
                pending=health.pending,
                steps_total=health.steps_total,
            )
        if self.paused and health.ok:
            return replace(health, ok=False, state="paused", reason="an admin paused the server")
        return health

    def failed(self, error: QuireError) -> None:
        """A request ended in an error: count it."""
        self.metrics.error(type(error).__name__)
        if isinstance(error, SlowReader):
            self.metrics.slow_reader()
            self.log.warning("stream cut", reason=str(error))
        if isinstance(error, TimedOut):
            self.metrics.timeout()
        elif isinstance(error, OverloadedError | ContextTooLong):
            self.metrics.refused(str(shape_of(error).code))

    def scrape(self) -> bytes:
        """All metrics as text."""
        self.metrics.dropped_lines(dropped_lines())
        return self.metrics.text()

    def request(self, *, counts: bool) -> AbstractContextManager[None]:
        """Held while a request is open; draining waits for those that count."""
        return self._counted if counts else _UNCOUNTED

    def _hold(self) -> None:
        self._num_open += 1
        self.idle.clear()

    def _let_go(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self.idle.set()


class _Counted:
    """Entered by each request that counts, however many are in it."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()


_UNCOUNTED = nullcontext()
