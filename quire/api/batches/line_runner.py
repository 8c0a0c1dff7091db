"""Run one line of a batch: the request that it is, through the route that would answer it.

The route gets a request without a connection, with the key and tenant of the batch and the lowest
priority that the tenant may ask for, in the background. Always holds: a result is the status and
body that a client would get; what says nothing of the line itself (overload, a stop, a dead engine)
is no result.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.batches.line_form import BatchEndpoint
from quire.api.batches.stored_files import new_id
from quire.api.generation.foreign_fields import as_sent
from quire.api.generation.generate import BACKGROUND
from quire.api.generation.parted_answer import PartedAnswer
from quire.api.http.auth import Caller
from quire.api.http.dialect import Dialect, error_response
from quire.base.errors import (
    DeadlineMissed,
    InvalidParameter,
    OverloadedError,
    QuireError,
    StepRowError,
    TimedOut,
    WorkerError,
)

if TYPE_CHECKING:
    from quire.api.server_state import ServerState

# Fields that make an answer more than one body.
_UNFIT = ("stream", "background")
# Errors of the line, though of classes that otherwise say to try again.
_OF_THE_LINE = (DeadlineMissed, TimedOut, StepRowError)


class NotNow(Exception):
    """The line has no result yet: run it later."""


async def run_line(
    server_state: ServerState, endpoint: BatchEndpoint, caller: Caller, body: bytes
) -> tuple[int, str, bytes]:
    """Return the status, request id and body of a line's answer. Raises NotNow."""
    request, dialect = _request_of(endpoint.route, caller, body), endpoint.form.dialect
    try:
        _check(body)
        response: Response = await endpoint.route.endpoint(request)
    except QuireError as error:
        if isinstance(error, OverloadedError | WorkerError) and not isinstance(error, _OF_THE_LINE):
            raise NotNow from error
        sent = request.scope["state"].get("body")
        if sent is not None and isinstance(error, InvalidParameter):
            error = as_sent(error, sent)
        response = _refusal(server_state, error, dialect)
    except Exception as error:  # noqa: BLE001  a bug: report it, and run other lines
        server_state.log.error("line of a batch failed", traceback=traceback.format_exc())
        fault = QuireError(f"internal error ({type(error).__name__}); the server's log has it")
        response = _refusal(server_state, fault, dialect)
    if isinstance(response, PartedAnswer):
        answer = await response.joined()
    else:
        answer = bytes(response.body)
    return response.status_code, response.headers.get("x-request-id", ""), answer


def _refusal(server_state: ServerState, error: QuireError, dialect: Dialect) -> Response:
    server_state.count_error(error)
    return error_response(error, dialect, request_id=new_id("req-"))


def _check(body: bytes) -> None:
    """Refuse what has no single body. Other faults are found by the route."""
    try:
        fields: Mapping[str, Any] = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    for name in _UNFIT:
        if fields.get(name) not in (None, False):
            raise InvalidParameter(
                f"{name} is given in a line of a batch, which has one whole answer; leave it out",
                param=name,
            )


def _request_of(route: Route, caller: Caller, body: bytes) -> Request:
    lowest = caller.tenant.priority_max
    tenant = replace(caller.tenant, priority=lowest, priority_min=lowest)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": route.path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "route": route,
        "state": {"key": caller.key, "name": "", "trace": "", "tenant": tenant, "is_admin": False},
        BACKGROUND: True,
        "quire.disconnected": asyncio.get_running_loop().create_future(),
    }
    return Request(scope, receive)
