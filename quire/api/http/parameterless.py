"""Refuse parameters of the query, and bodies, at routes that take none.

Always holds: an error shows what was sent; an empty body and an empty object are none.
"""

from __future__ import annotations

from starlette.requests import Request

from quire.base.errors import InvalidParameter
from quire.base.show import show

_EMPTY = (b"", b"{}")


def refuse_query(request: Request) -> None:
    """Refuse parameters of the query. Raises InvalidParameter."""
    for name in request.query_params:
        raise _refusal(request, f"the parameter {show(name)} in the query")


async def refuse_parameters(request: Request) -> None:
    """Refuse parameters of the query and in the body. Raises InvalidParameter."""
    refuse_query(request)
    body = (await request.body()).strip()
    if body not in _EMPTY:
        raise _refusal(request, f"the body {show(body[:100].decode(errors='replace'))}")


def _refusal(request: Request, found: str) -> InvalidParameter:
    return InvalidParameter(
        f"{request.method} {request.url.path} was sent with {found}; it takes no parameters: leave "
        "it out"
    )
