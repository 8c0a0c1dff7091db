"""The parameter `beta` of the query, which the beta clients of Anthropic's SDKs add to each path.

It has no effect: what is served does not depend on it. Knows no route.
"""

from __future__ import annotations

from starlette.requests import Request

BETA = "beta"


def without_beta(request: Request) -> Request:
    """Return a request without the parameter."""
    query: bytes = request.scope["query_string"]
    if BETA not in request.query_params:
        return request
    kept = [part for part in query.split(b"&") if part.partition(b"=")[0] != BETA.encode()]
    return Request({**request.scope, "query_string": b"&".join(kept)}, request.receive)
