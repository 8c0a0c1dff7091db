"""Grammars: what the engine's loop asks of the compiler of grammars, and who waits for which.

A request whose answer follows a grammar waits behind a gate until that is compiled; one that
cannot be is refused by its compiler's words. Knows requests by id, and no tokens. Always holds:
nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.base.errors import QuireError
from quire.base.grammar import Grammar
from quire.base.records import Request
from quire.scheduler.state import RunningState
from quire.scheduler.ticket import Ticket
from quire.structured.compiler import GrammarCompiler

# Ids of requests that are refused, and why.
RefusedFor = tuple[tuple[str, ...], QuireError]


class Grammars:
    """The grammars of live requests."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._waiting: dict[str, Grammar] = {}  # by request id, until the grammar has settled

    @property
    def wake(self) -> Callable[[], None]:
        """Called in a thread when somebody's wait may have ended."""
        return self.compiler.on_settled

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self.compiler.on_settled = wake

    def want(self, requests: Sequence[Request]) -> None:
        """These have come: their grammars are compiled from now on."""
        for request in requests:
            if request.sampling.structured_outputs is not None:
                self.compiler.want(request.sampling.structured_outputs)
                self._waiting[request.request_id] = request.sampling.structured_outputs

    def refused(self) -> list[RefusedFor]:
        """Requests whose grammar cannot be used; each is told once."""
        if not self._waiting:
            return []
        by_error: dict[int, tuple[list[str], QuireError]] = {}
        for request_id, grammar in list(self._waiting.items()):
            if not self.compiler.is_settled(grammar):
                continue
            del self._waiting[request_id]
            error = self.compiler.error(grammar)
            if error is not None:
                by_error.setdefault(id(error), ([], error))[0].append(request_id)
        return [(tuple(ids), error) for ids, error in by_error.values()]

    def close(self) -> None:
        """Begin to compile nothing more; its threads end."""
        self.compiler.close()

    def forget(self, request_ids: Sequence[str]) -> None:
        """These have been aborted."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)


class GrammarGate:
    """A request waits until its grammar is compiled, or was found unusable."""

    until_event = False

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def holds(self, ticket: Ticket, state: RunningState, now_ms: float) -> bool:
        """Whether the grammar is still being compiled."""
        grammar = ticket.request.sampling.structured_outputs
        return grammar is not None and not self._compiler.is_ready(grammar)
