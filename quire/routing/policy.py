"""RoutingPolicy: choose a replica for a request. The protocol, and what a policy may read.

A replica is a server behind `quire route`, or an engine of --data-parallel-size: its maker counts
what it has open. A policy sees only replicas that may take the request. Choices may depend on
anything; answers do not, since every replica of a fingerprint gives the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar


class Replica(Protocol):
    """What a policy reads of a replica. number: a bit of the masks in PrefixHistory."""

    @property
    def name(self) -> str:
        """What sessions are hashed with: the same in every process."""

    @property
    def number(self) -> int:
        """Unique among the replicas."""

    @property
    def backlog_tokens(self) -> int:
        """Tokens of prompts without output yet, and of expected output."""

    @property
    def loads(self) -> Collection[Any]:
        """Its open requests."""


AnyReplica = TypeVar("AnyReplica", bound=Replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKey:
    """What of a request a policy reads. blocks: names of its prompt's blocks. session: the
    client's key for affinity, "" without one. tokens: of prompt and expected output, estimated.
    hashes: of the prompt's KV blocks of block_size tokens, where they are known."""

    blocks: Sequence[int] = ()
    session: str = ""
    tokens: int = 0
    hashes: Sequence[int] = ()
    block_size: int = 0


class PolicyCount(NamedTuple):
    """A number that a policy has counted; name: of the metric, after quire_router_."""

    name: str
    text: str
    value: int


class RoutingPolicy(Protocol):
    """A way to choose. uses_events: whether it reads the blocks that replicas report."""

    uses_events: bool

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return one of the replicas, of which there is at least one."""

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Note that the request was sent there."""

    def forget(self, replica: Replica) -> None:
        """Note that the replica has lost its cache, or is gone."""

    def counts(self) -> Sequence[PolicyCount]:
        """Return what it shows among the router's metrics."""


class PlainPolicy:
    """Base of policies that remember nothing of requests: they have `choose` only."""

    uses_events = False

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Keep nothing."""

    def forget(self, replica: Replica) -> None:
        """Keep nothing."""

    def counts(self) -> Sequence[PolicyCount]:
        """Count nothing."""
        return ()


def lightest(replicas: Sequence[AnyReplica]) -> AnyReplica:
    """Return the replica with the fewest tokens, then requests; the first of equals."""
    return min(replicas, key=lambda one: (one.backlog_tokens, len(one.loads)))
