"""The query of a list in Anthropic's API: `limit`, and `before_id` or `after_id`.

Knows nothing of what is listed. Always holds: other parameters are refused, except `beta`.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from quire.api.anthropic.fields import QUERY_PARAMS
from quire.base.errors import InvalidParameter
from quire.base.show import show

_QUERY = ("limit", "before_id", "after_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """Which part of a list is asked for. before, after: ids; at most one is given."""

    limit: int
    before: str | None = None
    after: str | None = None


def page_query(request: Request, *, num_listed: int, max_listed: int) -> PageQuery:
    """Return what a request asks for. num_listed: without a limit. Raises InvalidParameter."""
    query = request.query_params
    for name in query:
        if name not in _QUERY and name not in QUERY_PARAMS:
            raise InvalidParameter(
                f"{show(name)} is a parameter of the query, and {', '.join(_QUERY)} are known; "
                "leave it out",
                param=name[:64],
            )
    before, after = query.get("before_id"), query.get("after_id")
    if before is not None and after is not None:
        raise InvalidParameter(
            "before_id and after_id are both given; give one of them", param="before_id"
        )
    limit = limit_of(request, num_listed=num_listed, max_listed=max_listed)
    return PageQuery(limit=limit, before=before, after=after)


def limit_of(request: Request, *, num_listed: int, max_listed: int) -> int:
    """Return how many entries a page has. Raises InvalidParameter."""
    text = request.query_params.get("limit", str(num_listed))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(max_listed))
    if not is_number or not 1 <= int(text) <= max_listed:
        raise InvalidParameter(
            f"limit is {show(text)}; a whole number from 1 to {max_listed} is allowed",
            param="limit",
        )
    return int(text)
