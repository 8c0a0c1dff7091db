"""Admission: whether the router takes a request, and when a refused client should come again.

429 where the client's key has too many open requests: only that client should slow down. 503 where
the router or all replicas are full or gone: any client may try again later. `Retry-After` is the
time in which the tokens of open and waiting requests drain at the rate of the last seconds in which
requests were open: time without requests says nothing about the rate.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.base.http_apis import AUTHORIZATION
from quire.router.faults import Refusal
from quire.router.fleet import Fleet
from quire.router.moves import MovePlaces

_SHORTEST_S, _LONGEST_S = 1.0, 60.0
_RATE_S = 10.0
_MAX_SHOWN_CHARS = 200


class Admission:
    """num_open: requests that were admitted and have not ended. places: for those that move to
    another replica again."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settings = fleet.settings
        self._per_key: Counter[bytes] = Counter()
        # Tokens and the seconds with open requests in which they were computed; both fade alike,
        # so that the seconds are _RATE_S at most, or one longer answer's.
        self._drained_tokens = self._measured_s = 0.0
        self._since_s = 0.0
        self._waiting_tokens = 0
        self.num_open = 0
        self.is_draining = False
        self.places = MovePlaces(self._settings.max_retry_share, lambda: self.num_open)

    def admit(self, headers: list[tuple[bytes, bytes]], key: bytes, now_s: float) -> bytes:
        """Count a request; return a digest of its key for `leave`. Raises Refusal.

        Without a key, the Authorization header identifies the client; clients with neither count as
        one.
        """
        if self.is_draining:
            raise Refusal(
                503,
                "shutting_down",
                "the router is shutting down and accepts no new requests; use another router",
                retry_after_s=max(self._settings.grace_s, 1.0),
            )
        if self.num_open >= self._settings.max_open:
            raise Refusal(
                503,
                "overloaded",
                f"{self.num_open} requests are open and at most {self._settings.max_open} may be "
                "(--max-open-requests); try again later",
                retry_after_s=self.retry_after_s(),
            )
        sent = key or dict(headers).get(AUTHORIZATION, b"")
        key = hashlib.blake2b(sent, digest_size=16).digest() if sent else b""
        most = self._settings.max_open_per_key
        if most and self._per_key[key] >= most:
            raise Refusal(
                429,
                "too_many_requests",
                f"this key has {self._per_key[key]} open requests and may have {most} "
                "(--max-open-per-key); wait until one has ended",
                retry_after_s=_SHORTEST_S,
            )
        if not self.num_open:
            self._since_s = now_s
        self.num_open += 1
        self._per_key[key] += 1
        return key

    def leave(self, key: bytes) -> None:
        """Count a request no more."""
        self.num_open -= 1
        self._per_key[key] -= 1
        if not self._per_key[key]:
            del self._per_key[key]

    @contextmanager
    def waiting(self, tokens: int) -> Iterator[None]:
        """Count the tokens of a request that is at no replica yet."""
        self._waiting_tokens += tokens
        try:
            yield
        finally:
            self._waiting_tokens -= tokens

    def drained(self, tokens: int, now_s: float) -> None:
        """Note tokens that were computed; old ones fade."""
        past_s = now_s - self._since_s
        self._since_s = now_s
        kept = max(1.0 - past_s / _RATE_S, 0.0)
        self._drained_tokens = self._drained_tokens * kept + tokens
        self._measured_s = self._measured_s * kept + past_s

    def retry_after_s(self) -> float:
        """Return in how many seconds the tokens of open and waiting requests are computed; the
        shortest time while no rate is known."""
        backlog = self._waiting_tokens
        backlog += sum(one.backlog_tokens for one in self._fleet.replicas.values())
        drained = self._drained_tokens
        predicted_s = backlog * self._measured_s / drained if drained else _SHORTEST_S
        return min(max(predicted_s, _SHORTEST_S), _LONGEST_S)

    def unavailable(self, model: str, asked: str, names: Sequence[str]) -> Refusal:
        """Return the refusal of a request that no replica can take now.

        asked: the name that the client sent. names: those that are no model of a replica.
        """
        if asked not in names and not self._fleet.knows(model):
            served = {name for one in self._fleet.replicas.values() for name in one.models}
            listed = sorted(served | set(names))
            return Refusal(
                404,
                "model_not_found",
                f"model {asked[:_MAX_SHOWN_CHARS]!r} is not served here; "
                f"{' or '.join(map(repr, listed))} is",
                param="model",
            )
        of = f" of model {model!r}" if asked in names else ""
        return Refusal(
            503,
            "no_replica",
            f"no replica{of} is available: {self._fleet.why_none()}; try again later",
            retry_after_s=self.retry_after_s(),
        )
