"""gRPC's status codes of errors, by the HTTP status that the same error has.

Knows no call. Always holds: metadata is ASCII, whatever a client sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc

from quire.api.http.errors import report_of
from quire.base.errors import QuireError

_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def code_of(status: int) -> grpc.StatusCode:
    """Return the code for an HTTP status of errors.py."""
    default = grpc.StatusCode.INVALID_ARGUMENT if status < 500 else grpc.StatusCode.INTERNAL
    return _CODES.get(status, default)


def details_of(error: QuireError) -> Sequence[tuple[str, str]]:
    """Return the trailing metadata of an error: its code and field, as in HTTP bodies."""
    report = report_of(error)
    found = (("quire-code", report.code), ("quire-param", report.param))
    # Metadata is ASCII; a field's name is a client's text.
    return [
        (name, value.encode("ascii", "backslashreplace").decode()) for name, value in found if value
    ]
