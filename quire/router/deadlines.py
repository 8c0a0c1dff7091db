"""Deadlines: a request waits in the router no longer than until its answer is wanted.

The time that passes here is taken from what replicas are given (RoutedRequest.waited); a replica
refuses a request that it would answer too late, and ends one that runs past its time. Knows no
replica. Always holds: a request without deadline_ms is not affected.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from quire.base.deadline import until_deadline
from quire.router.faults import Refusal
from quire.router.routed_request import RoutedRequest


def before_deadline(request: RoutedRequest) -> AbstractAsyncContextManager[None]:
    """Run a block that waits; raise Refusal once the deadline of the request has passed."""
    return until_deadline(request.deadline_s, _missed)


def _missed() -> Refusal:
    return Refusal(
        503,
        "deadline_missed",
        "no replica could take the request before its deadline_ms had passed; send it again with "
        "a longer one, or later",
    )
