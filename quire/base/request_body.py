"""Limits of the body of a request: the time it may take and its size, at servers and routers.

Each of them reads bodies its own way and has its own errors; what they have in common is here.
"""

from __future__ import annotations

# A body that takes longer than this is refused.
BODY_TIME_S = 60.0
# As many digits of `content-length` are read: a number with more is larger than any limit.
LENGTH_DIGITS = 18


def late_body(limit_s: float) -> str:
    """Return the message of the error of a body that has not come in time."""
    return f"the request's body did not come within {limit_s:g} s; send it faster, or send less"


def large_body(found: str, limit_bytes: int, flag: str = "") -> str:
    """Return the message of the error of a body that is too large.

    found: how many bytes it has. flag: the one that sets the limit, if any.
    """
    set_by = f" ({flag})" * bool(flag)
    return (
        f"the request body has {found} bytes; at most {limit_bytes} are allowed{set_by}; send less"
    )
