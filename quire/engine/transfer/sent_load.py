"""SentLoad: the load that a prefill engine sends when a connection opens.

That of its last step, and the prompts that came since then: a step may take seconds, and all that
connect during one would otherwise find the engine idle. Noted in the engine's thread; prompts are
ordered, and the load is read, in threads of connections. Always holds: a prompt counts once, from
its order on, until the load is noted with it.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from quire.base.prefill_load import PrefillLoad
from quire.engine.transfer.own_load import OwnLoad

_Span = tuple[int, int]  # positions to compute


class SentLoad:
    """The load of the engine of `own`."""

    def __init__(self, own: OwnLoad) -> None:
        self._own, self._noted = own, own.now()
        self._lock = threading.Lock()
        # By request: prompts that the engine has not taken, and those that it has since `note`.
        self._ordered: dict[str, _Span] = {}
        self._taken: dict[str, _Span] = {}

    def note(self) -> None:
        """Note the load, with all prompts that were taken before."""
        noted = self._own.now()
        with self._lock:
            self._noted = noted
            self._taken.clear()

    def order(self, request_id: str, num_tokens: int) -> None:
        """Count a prompt that another engine orders."""
        with self._lock:
            self._ordered[request_id] = 0, num_tokens

    def take(self, request_id: str, start: int, end: int) -> None:
        """Count a prompt that the engine takes, which has the positions before `start`."""
        with self._lock:
            self._ordered.pop(request_id, None)
            self._taken[request_id] = start, end

    def drop(self, request_id: str) -> None:
        """Count a prompt no more, as one that is refused."""
        with self._lock:
            self._ordered.pop(request_id, None)
            self._taken.pop(request_id, None)

    def now(self) -> PrefillLoad:
        """Return the load; without further prompts while their times are guesses."""
        with self._lock:
            load, spans = self._noted, [*self._ordered.values(), *self._taken.values()]
        if not load.is_measured:
            return load
        more_ms = sum(load.prompt_ms(start, end) for start, end in spans)
        return replace(load, queue_ms=load.queue_ms + more_ms)
