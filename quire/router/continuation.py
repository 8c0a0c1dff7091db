"""Continuation: whether a stream is without its replica now, as metrics and Resumes need to know.

A stream is interrupted from the failure of its replica until the next event, whatever happens in
between. Knows no replica and reads no clock. Always holds: a stream counts among those that
continue elsewhere from the choice of a replica until that has sent something or has failed, too.
"""

from __future__ import annotations

from quire.router.interruption import Interruption
from quire.router.resumes import Resumes
from quire.router.router_metrics import RouterMetrics


class Continuation:
    """Of one stream. last_s: when its last event came; 0 before the first. has_failed: whether a
    replica has failed with the request, and no event has come since."""

    def __init__(self, resumes: Resumes, metrics: RouterMetrics) -> None:
        self.last_s = 0.0
        self.has_failed = False
        self._resumes = resumes
        self._metrics = metrics
        self._interruption: Interruption | None = None
        self._model: str | None = None  # of the replica that was chosen and has sent nothing yet
        self._is_unsent = False  # to that one

    def has_event(self, now_s: float) -> None:
        """Note an event of the stream."""
        if self._interruption is not None:
            self._metrics.resumed_after(self._interruption, now_s)
            self.end()
        self.last_s, self.has_failed = now_s, False

    def failed(self, cause: str, now_s: float, *, has_output: bool) -> None:
        """Note that the replica has failed. has_output: the client has a part of the answer."""
        self._leave()
        self.has_failed = True
        if self._interruption is not None:
            self._metrics.resume_retries.labels("failed").inc()
        elif has_output:
            last_s = self.last_s or now_s
            self._interruption = Interruption(cause, last_s=last_s, noted_s=now_s)

    def chosen(self, model: str) -> None:
        """Note that another replica is to continue the stream: new requests let it go ahead."""
        if self._model is None:
            self._model = model
            self._resumes.began(model)
            self._is_unsent = True
            self._resumes.begin_send()

    def sent(self, now_s: float) -> None:
        """Note that a request that continues the stream was sent."""
        self._note_sent()
        if self._interruption is not None:
            self._interruption.sent(now_s)

    def since_s(self, now_s: float) -> float:
        """Return for how long its failure has been known; 0 where it is not interrupted."""
        return 0.0 if self._interruption is None else self._interruption.resumed_s(now_s)

    def end(self) -> None:
        """Note that the stream goes on, or has ended without that."""
        self._interruption = None
        self._leave()

    def _note_sent(self) -> None:
        if self._is_unsent:
            self._is_unsent = False
            self._resumes.end_send()

    def _leave(self) -> None:
        self._note_sent()
        if self._model is not None:
            model, self._model = self._model, None
            self._resumes.ended(model)
