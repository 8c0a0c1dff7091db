"""Requests by id: what is open, and for a short while what has ended; who may ask, and ending one.

A request is known by the id its answer carries, and by the `x-request-id` its caller gave it, which
is known before anything is answered. Knows no JSON and no route. Always holds: only who shows the
key a request came with finds it; what is kept of ended requests is bounded in number and time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.api.http.errors import Aborted, UnknownRequest, shape_of
from quire.base.errors import QuireError
from quire.base.show import show

MOST_ENDED = 1024
# What has ended is told for so long.
ENDED_S = 60.0


@dataclass(frozen=True, slots=True)
class Requester:
    """Who sent a request: the digest of the key (empty where none is set), and its own name for
    the request ("" where it gave none)."""

    key: bytes = b""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """How far a request is. finish_reasons: of its choices, "open" for those that go on."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request. cut: set to an error, it ends the request with it. on_end: called when it has
    ended, once. Made in the event loop."""

    id: str
    asker: Requester
    route: str
    is_stream: bool = False
    created_s: float = field(default_factory=time.time)
    cut: asyncio.Future[QuireError] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    look: Callable[[], RequestProgress] = RequestProgress
    ended_s: float | None = None
    error: str | None = None
    on_end: Callable[[], None] | None = None

    @property
    def progress(self) -> RequestProgress:
        """How far it is."""
        return self.look()

    @property
    def state(self) -> str:
        """waiting (nothing was made yet), running, done or failed."""
        if self.ended_s is not None:
            return "done" if self.error is None else "failed"
        return "running" if self.progress.finish_reasons else "waiting"

    def end_with(self, error: QuireError) -> None:
        """Whatever runs for this request ends with `error`; the first one counts."""
        if not self.cut.done():
            self.cut.set_result(error)


class RequestRegistry:
    """All of one server."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._ended: OrderedDict[str, OpenRequest] = OrderedDict()
        self._names: dict[Requester, OpenRequest] = {}

    @property
    def num_open(self) -> int:
        """How many are open."""
        return len(self._open)

    def begin(self, live: OpenRequest) -> None:
        """A request is open."""
        self._open[live.id] = live
        if live.asker.name:
            self._names[live.asker] = live

    def end(self, live: OpenRequest, error: QuireError | None = None) -> None:
        """It has ended, with an error or well. A second call changes nothing."""
        if self._open.pop(live.id, None) is None:
            return
        last = live.look()  # what is looked at holds prompts: only the numbers are kept
        live.look = lambda: last
        live.ended_s = time.monotonic()
        live.error = None if error is None else shape_of(error).code or "error"
        self._ended[live.id] = live
        self._forget()
        told, live.on_end = live.on_end, None
        if told is not None:
            told()

    def find(self, asked: str, key: bytes) -> OpenRequest:
        """The request of that id, or of that name its caller gave it. Raises UnknownRequest."""
        self._forget()
        live = self._open.get(asked) or self._ended.get(asked)
        if live is None:
            live = self._names.get(Requester(key, asked))
        if live is None or live.asker.key != key:
            raise UnknownRequest(
                f"request {show(asked)} is not known here: it was never asked with this key, or "
                f"ended more than {ENDED_S:g} s ago"
            )
        return live

    def abort(self, live: OpenRequest) -> bool:
        """End an open request; whether it was still open."""
        if live.id not in self._open:
            return False
        live.end_with(Aborted("the request was ended by an abort of its id"))
        return True

    def _forget(self) -> None:
        oldest_s = time.monotonic() - ENDED_S
        while self._ended:
            first = next(iter(self._ended.values()))
            if len(self._ended) <= MOST_ENDED and (first.ended_s or 0.0) > oldest_s:
                return
            del self._ended[first.id]
            if self._names.get(first.asker) is first:
                del self._names[first.asker]
