"""Errors of the router: a replica that failed with a request, and the router's own refusals.

A ReplicaFault says whether the request may be its cause, since a request is never tried on a third
replica after two failed with it at one place (failures.py).
"""

from __future__ import annotations

from quire.base.errors import QuireError


class ReplicaFault(QuireError):
    """An exchange with a replica that did not end as it should.

    is_suspect: the replica failed while it worked on the request, so the request may be the cause.
    is_shared: that is weak evidence, as Replica.is_shared says; set when the attempt ends.
    is_silence: the replica was given up for its silence, and may only have been slow.
    is_drain: the replica ends, and has ended the exchange for that.
    cause: what ended the exchange: its "connection", the "silence" of the replica, a "fence" for
    another reason, or an "error" that the replica reported.
    """

    def __init__(
        self,
        message: str,
        *,
        is_suspect: bool,
        is_silence: bool = False,
        is_drain: bool = False,
        cause: str = "connection",
    ) -> None:
        super().__init__(message)
        self.cause = "silence" if is_silence else cause
        self.is_suspect = is_suspect
        self.is_shared = False
        self.is_silence = is_silence
        self.is_drain = is_drain


class StaleConnection(ReplicaFault):
    """A kept connection had been closed when it was used again, or the process that may have
    accepted it stopped before it answered."""


class Blameless(ReplicaFault):
    """One that says nothing against the replica: that is neither fenced nor counted as failed."""


class HasNoRoom(Blameless):
    """A stream that a replica has ended because it is overloaded: a refusal, after heartbeats or
    output."""

    def __init__(self, code: str) -> None:
        super().__init__(f"error {code}", is_suspect=False, cause="error")


class OtherFingerprint(Blameless):
    """An answer that continues no stream: the replica was started again and serves something
    else."""

    def __init__(self, found: str) -> None:
        why = f"it answers with fingerprint {found} now"
        super().__init__(why, is_suspect=False, cause="error")


class NoFiles(Blameless):
    """A connection that was not made, because the router may open no more files."""

    def __init__(self) -> None:
        super().__init__("the router may open no more files (ulimit -n)", is_suspect=False)


class SlowClient(Blameless):
    """The end of a connection that was paused for its slow client: servers give such a reader up.
    Counted against the request, as the server may have died of it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; its client reads slowly", is_suspect=True)


class ProcessStopped(Blameless):
    """One of the API processes of a replica has stopped; the others go on, as does its engine."""

    def __init__(self) -> None:
        super().__init__(
            "the API process of the replica has stopped", is_suspect=False, is_silence=True
        )


class ClientGone(QuireError):
    """The client has closed its connection."""

    def __init__(self, message: str = "the client has closed its connection") -> None:
        super().__init__(message)


class Refusal(QuireError):
    """What the router itself answers: an HTTP status and OpenAI's error code.

    is_final: the same request would fail again, so that clients should not send it by themselves.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_final = is_final
