"""What client and engine say to each other, whatever carries it.

Frozen records. Client to engine: Submit, Abort, Hold, QueryCache, QuerySnapshot, QueryTimelines,
Stop; where the engine has several clients (message_routing.py), the process that started it also
sends Join and Leave. HoldClient comes from the engine's end of the channel. Engine to client: Hello
first, Loading while it starts, then Ready or Failed; after Ready, Outputs, Refused, CacheReported,
SnapshotReported, TimelinesReported, Beat while a step is long, and Failed at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.base import errors
from quire.base.cache_usage import CacheReport
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import OverloadedError, QuireError, RequestError, WorkerError
from quire.base.records import Request, StepOutputs
from quire.base.timeline import TimelineReport
from quire.engine.model_card import ModelCard

# Raised when a message changes; both sides must agree.
PROTOCOL_VERSION = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """The streams of one caller's request: all are taken or none."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End these streams now; unknown ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Pause these streams, because their reader does not keep up, or resume them.

    They are resumed where `is_held` is False. Unknown ids are ignored.
    """

    request_ids: tuple[str, ...]
    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCache:
    """Report the content of the prefix cache, with the prefixes that spared most tokens.

    The cache is flushed first where `flush` is set. ask_id comes back with the answer.
    """

    ask_id: int
    num_prefixes: int = 0
    flush: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySnapshot:
    """Report the queue, the running batch and the KV blocks. ask_id comes back with the answer."""

    ask_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTimelines:
    """Report the timelines of streams with ids that begin with one of `prefixes`.

    ask_id comes back with the answer.
    """

    ask_id: int
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Another client joins, at sockets of its own. client: its number, never used again.
    process_id: of its process."""

    client: int
    process_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Abort the requests of a client that is gone, and send it nothing more."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldClient:
    """Pause all streams of a client, because its process is stopped, or resume them.

    The engine's end of the channel makes it; no client sends it. prefix: of their ids.
    """

    prefix: str
    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Leave the loop and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The engine's first word."""

    protocol_version: int
    process_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Weights are being packed."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The engine answers from now on. notes: lines worth showing, such as the memory sum."""

    card: ModelCard
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs of one step (None: only the counters changed)."""

    outputs: StepOutputs | None
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A long step goes on. ops_done: operations of the executor so far; more is progress."""

    ops_done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An error of quire's tree, carried by class name and words."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A Submit was not taken."""

    request_ids: tuple[str, ...]
    fault: Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReported:
    """The answer to QueryCache. flushed_blocks: how many could be found before a flush, else 0."""

    ask_id: int
    report: CacheReport
    flushed_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReported:
    """The answer to QuerySnapshot."""

    ask_id: int
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinesReported:
    """The answer to QueryTimelines. kept_steps: how many steps are kept at most; kept_ms: since
    when the oldest of them ended."""

    ask_id: int
    reports: tuple[TimelineReport, ...]
    kept_steps: int
    kept_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine cannot start or go on; nothing follows."""

    fault: Fault


ToEngine = (
    Submit
    | Abort
    | Hold
    | QueryCache
    | QuerySnapshot
    | QueryTimelines
    | Join
    | Leave
    | HoldClient
    | Stop
)
FromEngine = (
    Hello
    | Loading
    | Ready
    | Outputs
    | Beat
    | Refused
    | CacheReported
    | SnapshotReported
    | TimelinesReported
    | Failed
)


def fault_of(error: BaseException) -> Fault:
    """Return an error as it is sent. What is not of quire's tree becomes a WorkerError."""
    if not isinstance(error, QuireError):
        return Fault(kind=WorkerError.__name__, message=f"{type(error).__name__}: {error}")
    return Fault(
        kind=type(error).__name__,
        message=str(error),
        param=error.param if isinstance(error, RequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, OverloadedError) else None,
    )


def error_of(fault: Fault) -> QuireError:
    """Return the error a fault stands for."""
    kind = getattr(errors, fault.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, QuireError)):
        return WorkerError(fault.message)
    if issubclass(kind, RequestError):
        return kind(fault.message, param=fault.param)
    if issubclass(kind, OverloadedError):
        return kind(fault.message, retry_after_s=fault.retry_after_s)
    return kind(fault.message)
