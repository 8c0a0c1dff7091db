"""RouterSettings: what the operator of a router may set, with every value checked.

Knows no command line. Times are seconds, sizes are tokens or bytes, as the names say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.cors import check_origin
from quire.base.errors import SettingError

WARM_CACHE = "warm-cache"
ROUTING_POLICIES = (WARM_CACHE, "session-affinity", "least-tokens", "power-of-two", "round-robin")
# A backlog that is calibrated by first tokens.
AUTO: Literal["auto"] = "auto"
BacklogTokens = int | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """policy: how a replica is chosen. backlog_tokens: how many more tokens than the least loaded
    replica one may have and still be preferred for its cache; "auto": as many as pay. stall_s: the
    shortest time without progress after which a replica counts as stalled; it grows with the gaps
    that are usual for the replica, to six times this. max_open_per_key: 0 for no limit.
    max_retry_share: of all requests, beside the ten retries that are always allowed; and of the
    open ones, places to move again, of which there are always 64 for requests that are not to
    blame. 0: those only. resume_s: that a request waits for another replica until its next event.
    min_prefill_tokens: shorter prompts are not sent to prefill replicas. role_hold_s: how long a
    side is short of servers before a movable one changes its role. wait_s: a request waits so long
    for a first replica that is available; 0: it is refused at once. cors_origin: origins of web
    pages that may use the router, or *.
    """

    policy: str = WARM_CACHE
    backlog_tokens: BacklogTokens = AUTO
    probe_s: float = 0.5
    stall_s: float = 10.0
    silence_s: float = 120.0
    connect_s: float = 2.0
    resume_s: float = 30.0
    grace_s: float = 30.0
    max_open: int = 4096
    max_open_per_key: int = 0
    max_body_bytes: int = 64 << 20
    history_blocks: int = 65536
    max_retry_share: float = 0.2
    replica_key: str | None = None
    min_prefill_tokens: int = 512
    role_hold_s: float = 30.0
    wait_s: float = 0.0
    cors_origin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.policy not in ROUTING_POLICIES:
            raise SettingError(
                f"--policy is {self.policy!r}; one of {', '.join(ROUTING_POLICIES)} is allowed"
            )
        times = ("probe_s", "stall_s", "silence_s", "connect_s", "resume_s", "role_hold_s")
        for name in times:
            _check(name, getattr(self, name), above=0.0)
        for name in ("grace_s", "wait_s"):
            _check(name, getattr(self, name), above=-1e-9)
        for name in ("max_open", "history_blocks", "max_body_bytes"):
            _check(name, getattr(self, name), above=0)
        if self.backlog_tokens != AUTO:
            if not isinstance(self.backlog_tokens, int):
                raise SettingError(
                    f"backlog_tokens is {self.backlog_tokens!r}; a number or auto is allowed"
                )
            _check("backlog_tokens", self.backlog_tokens, above=-1)
            if self.policy != WARM_CACHE:
                raise SettingError(
                    f"--backlog-tokens is {self.backlog_tokens} and --policy is {self.policy!r}, "
                    f"which knows no warm replica; choose {WARM_CACHE}, or leave --backlog-tokens "
                    "out"
                )
        for origin in self.cors_origin:
            check_origin(origin)
        for name in ("max_open_per_key", "max_retry_share", "min_prefill_tokens"):
            _check(name, getattr(self, name), above=-1)
        if self.stall_s < 2 * self.probe_s:
            raise SettingError(
                f"--stall-seconds is {self.stall_s:g} and replicas are probed every "
                f"{self.probe_s:g} s; at least two probes must fit: raise it"
            )


def _check(name: str, value: float, *, above: float) -> None:
    if not above < value < 1e12:
        raise SettingError(f"{name} is {value}; a number above {max(above, 0):g} is allowed")
