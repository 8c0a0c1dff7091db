"""Readiness of grammars and of stop strings of beams, as the engine loop queries it.

A request with a grammar waits behind a gate until the grammar is compiled, and beams with stop
strings until the tokenizer is read; where that fails, the request is refused with its error.
Knows requests by id, and no tokens. Always holds: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.base.errors import QuireError
from quire.base.grammar import Grammar
from quire.base.records import Request, RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.base.timeline import WaitReason
from quire.engine.stop_texts import StopTexts
from quire.scheduler.running_batch import RunningBatch
from quire.scheduler.sequence import SequenceState
from quire.structured.compiler import GrammarCompiler

# Ids of requests that are refused, and why.
RefusedFor = tuple[tuple[str, ...], QuireError]


class Grammars:
    """The grammars of live requests, and whether texts can be read."""

    def __init__(self, compiler: GrammarCompiler, texts: StopTexts) -> None:
        self.compiler = compiler
        self.texts = texts
        self.gate = GrammarGate(compiler, texts)
        # Requests that need something here, by id until they end; None: no grammar.
        self.live: dict[str, Grammar | None] = {}
        self._waiting: dict[str, Grammar] = {}  # by request id, until the grammar has settled
        self._reading: dict[str, None] = {}  # ids, until the tokenizer was read or cannot be

    @property
    def wake(self) -> Callable[[], None]:
        """Return the callback called in a thread when a waiting request may be ready."""
        return self.compiler.on_settled

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self.compiler.on_settled = self.texts.on_settled = wake

    def want(self, requests: Sequence[Request]) -> None:
        """Begin to prepare what these new requests need."""
        for request in requests:
            self.live[request.request_id] = request.sampling.structured_outputs
            if (grammar := request.sampling.structured_outputs) is not None:
                self.compiler.pin(grammar)
                self._waiting[request.request_id] = grammar
            if request.sampling.ends_beams_by_text:
                self.texts.want()
                self._reading[request.request_id] = None

    def refused(self) -> list[RefusedFor]:
        """Return requests that cannot be served; each is returned once."""
        refused = self._refused_unread() if self._reading else []
        if not self._waiting:
            return refused
        by_error: dict[int, tuple[list[str], QuireError]] = {}
        for request_id, grammar in list(self._waiting.items()):
            if not self.compiler.is_settled(grammar):
                continue
            del self._waiting[request_id]
            error = self.compiler.error(grammar)
            if error is not None:
                by_error.setdefault(id(error), ([], error))[0].append(request_id)
        return refused + [(tuple(ids), error) for ids, error in by_error.values()]

    def close(self) -> None:
        """Begin to compile nothing more; its threads end."""
        self.compiler.close()

    def forget(self, request_ids: Sequence[str]) -> None:
        """Release what these requests needed: they have ended."""
        for request_id in request_ids:
            if (grammar := self.live.pop(request_id, None)) is not None:
                self.compiler.unpin(grammar)
            self._waiting.pop(request_id, None)
            self._reading.pop(request_id, None)

    def forget_ended(self, events: Sequence[RequestOutput]) -> None:
        """Release what the requests needed that ended with these outputs."""
        self.forget([one.request_id for one in events if one.finish_reason is not None])

    def _refused_unread(self) -> list[RefusedFor]:
        if not self.texts.is_settled:
            return []
        ids, self._reading = tuple(self._reading), {}
        return [] if self.texts.error is None else [(ids, self.texts.error)]


class GrammarGate:
    """A request waits until its grammar is compiled and its text can be read, or never will be."""

    until_event = False
    reason = WaitReason.GRAMMAR

    def __init__(self, compiler: GrammarCompiler, texts: StopTexts) -> None:
        self._compiler = compiler
        self._texts = texts

    def holds(self, sequence: SequenceState, batch: RunningBatch, now_ms: float) -> bool:
        """Return whether something is still being made ready."""
        sampling: SamplingParams = sequence.request.sampling
        grammar = sampling.structured_outputs
        if grammar is not None and not self._compiler.is_ready(grammar):
            return True
        return sampling.ends_beams_by_text and not self._texts.is_ready
