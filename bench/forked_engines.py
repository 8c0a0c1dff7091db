"""Engines in processes that are forked from this one, so that a start takes no import.

A child is what an engine process of `quire serve` is (the same assembly, loop and exchange), with
one pipe in place of the server's sockets. It also says what it holds. Always holds: the parent has
no threads when it forks; a child ends with its parent.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from quire.base.clock import Clock
from quire.base.records import Request, RequestOutput
from quire.config.flags import engine_config
from quire.engine.assembly.assemble import Engine, assemble
from quire.engine.client.thread_link import QueueInbox
from quire.engine.core import serve
from quire.engine.process.messages import FromEngine, Outputs, Refused, Stop, Submit, ToEngine

Answer = list[tuple[int, Any]]

# The parent's ends of all pipes: a child that kept them would keep others from seeing its end.
_ENDS: set[Connection] = set()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What an engine has.

    fetching: jobs, of other engines and of a store. publishing: prompts, blocks and claims of a
    store. kept: places that are kept for a lease, a request or a store. received_blocks: those of
    other engines so far; stored_blocks: those of a store.
    """

    running: int
    waiting: int
    leases: int
    fetching: int
    publishing: int
    kept: int
    used_blocks: int
    descriptors: int
    num_bytes: int
    received_blocks: int
    stored_blocks: int
    problems: tuple[str, ...]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of a request or a transfer is left."""
        return not any(
            (
                *(self.running, self.waiting, self.leases, self.fetching, self.publishing),
                *(self.kept, self.used_blocks),
            )
        )


class ForkedEngine:
    """One engine. Raises EngineGone from all methods where its process has ended."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._pipe, theirs = Pipe()
        _ENDS.add(self._pipe)
        self.process_id = os.fork()
        if not self.process_id:
            for end in _ENDS:
                end.close()
            _run_child(settings, theirs)
        theirs.close()
        self._came: dict[str, deque[Any]] = {}
        self.offer: dict[str, Any] = self._received("ready", 120.0)

    def start(self, request: Request) -> None:
        """Begin a request."""
        self._send(("submit", request))

    def finish(self, request: Request, within_s: float) -> Answer:
        """Return tokens and scores of a request that was begun."""
        answer: Answer = self._received(f"answer {request.request_id}", within_s)
        return answer

    def wait(self, wait_s: float) -> bool:
        """Wait until there is something to be received, at most so long; whether there is."""
        return self._pipe.poll(wait_s)

    def holdings(self) -> Holdings:
        """Return what it has now."""
        self._send(("holdings", None))
        holdings: Holdings = self._received("holdings", 30.0)
        return holdings

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.process_id, signal.SIGKILL)
        self._reap()

    def end(self) -> None:
        """End it as a server does."""
        with suppress(EngineGone):
            self._send(("end", None))
        self._reap()

    def _reap(self) -> None:
        os.waitpid(self.process_id, 0)
        _ENDS.discard(self._pipe)
        self._pipe.close()

    def _send(self, message: tuple[str, Any]) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise EngineGone(str(error)) from error

    def _received(self, kind: str, within_s: float) -> Any:
        """Return the next of a kind; others are kept."""
        while not self._came.get(kind):
            try:
                if not self._pipe.poll(within_s):
                    raise EngineGone(f"no {kind} within {within_s:g} s")
                found, content = self._pipe.recv()
            except (OSError, EOFError) as error:
                raise EngineGone(f"it ended before its {kind}") from error
            if found == "failed":
                raise SystemExit(f"the engine failed: {content}")
            self._came.setdefault(found, deque()).append(content)
        return self._came[kind].popleft()


class EngineGone(Exception):
    """The process has ended, or says nothing."""


def _run_child(settings: dict[str, Any], pipe: Connection) -> None:
    """Be the engine, without its log; never returns."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _serve_pipe(settings, pipe)
    except BaseException as error:  # noqa: BLE001  nothing of the parent may run on here
        with suppress(OSError):
            pipe.send(("failed", repr(error)))
    finally:
        os._exit(0)


def _serve_pipe(settings: dict[str, Any], pipe: Connection) -> None:
    clock = Clock()
    engine = assemble(engine_config(settings), clock=clock, report=lambda what, **fields: None)
    inbox, sending = QueueInbox(), threading.Lock()
    said: dict[str, Answer] = {}

    def send(kind: str, content: Any) -> None:
        with sending:
            pipe.send((kind, content))

    def take(message: FromEngine) -> None:
        if isinstance(message, Refused):
            send("failed", message.fault.message)
        for output in (message.outputs or ()) if isinstance(message, Outputs) else ():
            _note(said.setdefault(output.request_id, []), output)
            if output.finish_reason is not None:
                send(f"answer {output.request_id}", said.pop(output.request_id))

    emit: Callable[[FromEngine], None] = take
    watched: Any = inbox
    if engine.outside is not None:
        blocks = engine.outside.blocks
        emit, watched = blocks.watch(take), blocks.watched(inbox)
    probing = _ProbedInbox(watched, inbox, engine, send)
    threading.Thread(target=_read, args=(pipe, inbox, probing), daemon=True).start()
    offer = engine.card.transfer
    send("ready", None if offer is None else asdict(offer))
    serve(engine.core, probing, emit, clock.now_ms)
    if engine.outside is not None:
        engine.outside.blocks.close()
    engine.core.runner.close()


def _note(said: Answer, output: RequestOutput) -> None:
    scores = output.logprobs or (None,) * len(output.token_ids)
    said.extend((token, repr(one)) for token, one in zip(output.token_ids, scores, strict=True))


def _read(pipe: Connection, inbox: QueueInbox, probing: _ProbedInbox) -> None:
    """Pass on what the parent sends; end with it."""
    while True:
        try:
            kind, content = pipe.recv()
        except (OSError, EOFError):
            os._exit(0)
        if kind == "submit":
            inbox.put(Submit(requests=(content,)))
        elif kind == "holdings":
            probing.is_asked = True
            inbox.wake()
        else:
            inbox.put(Stop())
            return


class _ProbedInbox:
    """An Inbox that answers between steps, in the engine's thread."""

    def __init__(
        self, watched: Any, inbox: QueueInbox, engine: Engine, send: Callable[[str, Any], None]
    ) -> None:
        self._watched, self._inbox, self._engine, self._send = watched, inbox, engine, send
        self.is_asked = False

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """See Inbox."""
        messages: list[ToEngine] = self._watched.take(wait_s)
        if self.is_asked:
            self.is_asked = False
            self._send("holdings", _holdings(self._engine))
        return messages

    def wake(self) -> None:
        """See Inbox."""
        self._inbox.wake()


def _holdings(engine: Engine) -> Holdings:
    scheduler, outside = engine.core.scheduler, engine.outside
    stats = scheduler.stats()
    assert outside is not None, "engines of these benchmarks exchange blocks"
    assert outside.exchange is not None, "engines of these benchmarks exchange blocks"
    transfer, client = outside.exchange.stats(), outside.store_client
    publishing = 0 if client is None else len(client.publishing) + client.publishing.num_putting
    return Holdings(
        running=stats.running,
        waiting=stats.waiting,
        leases=transfer.leases,
        fetching=transfer.fetching + (0 if client is None else len(client.fetches)),
        publishing=publishing + (0 if client is None else len(client.claims)),
        kept=outside.exchange.handing.num_kept,
        used_blocks=stats.blocks_used,
        descriptors=len(os.listdir("/proc/self/fd")),
        num_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        received_blocks=transfer.received_blocks_total,
        stored_blocks=0 if client is None else client.stats().fetched_blocks_total,
        problems=tuple(scheduler.check_integrity()),
    )
