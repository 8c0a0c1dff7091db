"""What an API adds to batches: the route that answers a line, and the form of its result.

The journal and the worker are the same for all APIs. Always holds: a result is one line of JSON
with a line break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from starlette.routing import Route

from quire.api.http.dialect import Dialect


class LineForm(Protocol):
    """The form of the results of one API's batches.

    dialect: of errors. has_files: results are two files, of lines that succeeded and of others;
    else every line has a result, also after a cancel, and they are read in order.
    """

    @property
    def dialect(self) -> Dialect: ...

    @property
    def has_files(self) -> bool: ...

    def answered(self, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
        """Return the result of a line that its route answered."""

    def unanswered(self, custom_id: str, code: str, message: str) -> bytes:
        """Return the result of a line that has no answer. code: of CODES."""


# Why a line has no answer; beside these, "batch_expired" and "batch_cancelled".
CODES = ("server_ended", "invalid_api_key")
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"


@dataclass(frozen=True, slots=True)
class LineUsage:
    """What a line used: its model, and tokens. cached: of the prompt. reasoning: of the output."""

    model: str | None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """The route of a line, and the form of its result.

    usage_of: reads the usage in the body of an answer; None: batches report none.
    """

    route: Route
    form: LineForm
    usage_of: Callable[[bytes], LineUsage] | None = None


def by_path(
    routes: Iterable[Route],
    paths: Iterable[str],
    form: LineForm,
    usage_of: Callable[[bytes], LineUsage] | None = None,
) -> dict[str, BatchEndpoint]:
    """Return the endpoints at these paths."""
    wanted = set(paths)
    return {
        route.path: BatchEndpoint(route, form, usage_of) for route in routes if route.path in wanted
    }
