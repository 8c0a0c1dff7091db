"""State shared by all routes of one server process: engine, keys, open requests, counters.

Knows no route and no JSON. Always holds: `engine()` returns an engine only while requests are
accepted; `idle` is set exactly while no POST request is open; a request is found only with the key
that it was sent with; the ended requests that are kept are bounded in number and time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.requests import Request

from quire.api.engine_protocol import Engine
from quire.api.http.auth import Keys
from quire.api.http.errors import Aborted, SlowReader, UnknownRequest, shape_of
from quire.api.lifecycle import Lifecycle
from quire.api.streaming.event_journal import ResumableStreams
from quire.base.errors import (
    ContextTooLong,
    OverloadedError,
    QuireError,
    TimedOut,
)
from quire.base.log import Log
from quire.base.log_process import dropped_lines
from quire.base.show import show
from quire.base.timeline import MAX_HISTORIES
from quire.config.admin_keys import read_admin_keys
from quire.config.server_config import ServerConfig
from quire.config.tenants import Tenant
from quire.engine.model_card import Health, ModelCard
from quire.obs.metrics import Metrics
from quire.output_parsers.selection import select_parsers

if TYPE_CHECKING:
    from quire.api.generation.recorder import Recorder

P = ParamSpec("P")
T = TypeVar("T")

# Template rendering holds the interpreter lock: more threads end no earlier and delay the loop.
NUM_THREADS = 2
MAX_ENDED = 1024
# Time that ended requests are kept.
ENDED_S = 60.0


class ServerState:
    """The state of one server process. Created and used in the event loop's thread.

    tenants: of the tenants file, None without one.
    """

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        log: Log,
        tenants: Sequence[Tenant] | None = None,
    ) -> None:
        self.config = config
        self._admin_digests = read_admin_keys(config.admin_key_file)
        self.set_tenants(tenants)
        self.metrics = metrics
        self.log = log
        self.thread_pools = ThreadPools()
        self.closing = ExitStack()  # of threads and stores, at the end of serving
        self.closing.callback(self.thread_pools.close)
        self.requests = RequestRegistry()
        self.resumable_streams = ResumableStreams(config.resume_memory_bytes)
        self.lifecycle = Lifecycle(config.grace_s)
        self.on_begin: Callable[[OpenRequest, Request], None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self.recorders: set[Recorder] = set()
        self._engine: Engine | None = None
        self._served: Engine | None = None
        self._num_open = 0
        self._counted = _Counted(self._request_opened, self._request_closed)

    def fingerprint(self, card: ModelCard) -> str:
        """Return the fingerprint of answers: the engine's, and of settings that change answers."""
        config = self.config
        settings = (config.tool_call_parser, config.reasoning_parser, config.max_output_tokens)
        if settings == ("auto", "auto", None):
            return card.fingerprint
        digest = hashlib.blake2b(repr((card.fingerprint, *settings)).encode(), digest_size=8)
        return f"fp_{digest.hexdigest()}"

    @property
    def has_several_users(self) -> bool:
        """Whether requests may come from different users: several keys, or none and --insecure."""
        num_keys = len(self.config.api_key)
        num_keys += sum(len(tenant.key_digests) for tenant in self.tenants or ())
        num_keys += len(self._admin_digests) if num_keys else 0
        return num_keys > 1 or (num_keys == 0 and self.config.insecure)

    def set_tenants(self, tenants: Sequence[Tenant] | None) -> None:
        """Replace the tenants; open requests continue."""
        self.tenants = tenants
        shares = self.config.share_prefixes
        self.keys = Keys(self.config.api_key, tenants, self._admin_digests, shares_prefixes=shares)

    def set_admin_keys(self, digests: Sequence[str]) -> None:
        """Replace the keys of the admin key file, given as digests."""
        self._admin_digests = tuple(digests)
        self.set_tenants(self.tenants)

    def start(self, engine: Engine) -> None:
        """Accept requests: the engine is ready. Selects the output parsers of its templates, so
        that the first chat finds the selection in the cache."""
        self._engine = self._served = engine
        config = self.config
        for source in () if engine.template is None else engine.template.sources:
            select_parsers(
                source,
                tool_parser=config.tool_call_parser,
                reasoning_parser=config.reasoning_parser,
            )
        engine.on_stats = self.metrics.see
        self.metrics.see(engine.stats)  # /metrics shows the KV blocks before the first step
        self.metrics.show_vllm_names(engine.card.name, engine.card.block_size)

    def serve_through(self, engine: Engine | None) -> None:
        """Send requests that arrive from now on through `engine`; None: to the engine itself."""
        self._served = engine or self._engine

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine once it is ready, whether or not requests are accepted."""
        return self._engine

    def engine(self) -> Engine:
        """Return the engine if requests are accepted. Raises OverloadedError or WorkerError."""
        if self.lifecycle.draining:
            raise self.lifecycle.refusal()
        if self._engine is None or self._served is None:
            raise OverloadedError("the model is still loading; try again", retry_after_s=1.0)
        if (refusal := self._engine.refusal()) is not None:
            raise refusal
        return self._served

    def health(self) -> Health:
        """Return the engine's health, or the server's while it is starting or draining."""
        if self._engine is None:
            reason = "the model is still loading"
            return Health(ok=False, state="starting", reason=reason, pending=0, steps_total=0)
        health = self._engine.health()
        if self.lifecycle.draining and health.state != "dead":
            reason = self.lifecycle.draining_reason
            return replace(health, ok=False, state="draining", reason=reason)
        if self.lifecycle.paused and health.ok:
            return replace(health, ok=False, state="paused", reason="an admin paused the server")
        return health

    def count_error(self, error: QuireError) -> None:
        """Count the error that ended a request."""
        self.metrics.error(type(error).__name__)
        if isinstance(error, SlowReader):
            self.metrics.slow_reader()
            self.log.warning("stream cut", reason=str(error))
        if isinstance(error, TimedOut):
            self.metrics.timeout()
        elif isinstance(error, OverloadedError | ContextTooLong):
            self.metrics.refused(str(shape_of(error).code))

    def scrape(self) -> bytes:
        """Return all metrics as text."""
        self.metrics.dropped_lines(dropped_lines())
        return self.metrics.text()

    def track_request(self, *, counts: bool) -> AbstractContextManager[None]:
        """Return the context of one open request; draining waits for those that count."""
        return self._counted if counts else _UNCOUNTED

    def _request_opened(self) -> None:
        self._num_open += 1
        self.idle.clear()

    def _request_closed(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self.idle.set()


class _Counted:
    """The context of all counted requests; it is entered once for each of them."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()


_UNCOUNTED = nullcontext()


class ThreadPools:
    """Threads beside the event loop for templates and long texts: a quick pool and a slow one.

    Large bodies and templates of requests go to the slow pool, so they delay only each other.
    Neither pool shares threads with the reading of bodies. Work that has not begun when its client
    disconnects is never begun.
    """

    def __init__(self) -> None:
        self._quick = ThreadPoolExecutor(NUM_THREADS, "quire-quick")
        self._slow = ThreadPoolExecutor(NUM_THREADS, "quire-slow")

    async def run(
        self, slow: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function` in a thread of a pool; return or raise what it does."""
        pool = self._slow if slow else self._quick
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Start no further work; running requests end by themselves."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Requester:
    """The sender of a request: the digest of its key (b"" without keys), and the `x-request-id`
    that it gave the request ("" for none)."""

    key: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """Token counts of a request so far. finish_reasons: of its choices, "open" for running ones."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()


def _new_cut() -> asyncio.Future[QuireError]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request. cut: set to an error, it ends the request with it. read_progress: returns the
    counts so far. on_end: called once when the request has ended. Created in the event loop."""

    id: str
    requester: Requester
    route: str
    is_stream: bool = False
    created_s: float = field(default_factory=time.time)
    cut: asyncio.Future[QuireError] = field(default_factory=_new_cut)
    read_progress: Callable[[], RequestProgress] = field(default=RequestProgress, init=False)
    ended_s: float | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    on_end: Callable[[], None] | None = field(default=None, init=False)

    @property
    def state(self) -> str:
        """waiting (no token yet), running, done or failed."""
        if self.ended_s is not None:
            return "done" if self.error is None else "failed"
        return "running" if self.read_progress().finish_reasons else "waiting"

    def end_with(self, error: QuireError) -> None:
        """End the request with `error`, unless it was ended before."""
        if not self.cut.done():
            self.cut.set_result(error)


class RequestRegistry:
    """Requests of one server by id, and by their `x-request-id`: open ones and recently ended.

    on_end: called with each request that has ended.
    """

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._ended: OrderedDict[str, OpenRequest] = OrderedDict()
        self._names: dict[Requester, OpenRequest] = {}
        self._past: OrderedDict[str, Requester] = OrderedDict()  # ended before those
        self.on_end: Callable[[OpenRequest], None] | None = None

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def begin(self, request: OpenRequest) -> None:
        """Register an open request."""
        self._open[request.id] = request
        if request.requester.name:
            self._names[request.requester] = request

    def end(self, request: OpenRequest, error: QuireError | None = None) -> None:
        """Record that a request has ended, and with which error. A second call has no effect."""
        if self._open.pop(request.id, None) is None:
            return
        last = request.read_progress()  # keep the counts, not the prompts they are read from
        request.read_progress = lambda: last
        request.ended_s = time.monotonic()
        request.error = None if error is None else shape_of(error).code or "error"
        self._ended[request.id] = request
        self._forget_expired()
        on_end, request.on_end = request.on_end, None
        if on_end is not None:
            on_end()
        if self.on_end is not None:
            self.on_end(request)

    def find(self, id_or_name: str, key: bytes) -> OpenRequest:
        """Return the request with that id or `x-request-id`. Raises UnknownRequest."""
        self._forget_expired()
        request = self._open.get(id_or_name) or self._ended.get(id_or_name)
        if request is None:
            request = self._names.get(Requester(key, id_or_name))
        if request is None or request.requester.key != key:
            raise UnknownRequest(
                f"request {show(id_or_name)} is not known here: it was never sent with this key, "
                f"or ended more than {ENDED_S:g} s ago"
            )
        return request

    def senders(self) -> Iterator[tuple[str, Requester]]:
        """Yield the ids of all known requests with their senders, those that ended long ago first.

        Requests are known here longer than `find` has them.
        """
        self._forget_expired()
        yield from self._past.items()
        for one in (*self._ended.values(), *self._open.values()):
            yield one.id, one.requester

    def abort(self, request: OpenRequest) -> bool:
        """End a request; return whether it was still open."""
        if request.id not in self._open:
            return False
        request.end_with(Aborted("the request was ended by an abort of its id"))
        return True

    def _forget_expired(self) -> None:
        oldest_s = time.monotonic() - ENDED_S
        while self._ended:
            first = next(iter(self._ended.values()))
            if len(self._ended) <= MAX_ENDED and (first.ended_s or 0.0) > oldest_s:
                return
            del self._ended[first.id]
            self._past[first.id] = first.requester
            if len(self._past) > MAX_HISTORIES:
                self._past.popitem(last=False)
            if self._names.get(first.requester) is first:
                del self._names[first.requester]
