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
    def queued_tokens(self) -> int:
        """Tokens of prompts without output yet that it has to compute, cached ones left out."""

    @property
    def expected_tokens(self) -> int:
        """Tokens of expected output."""

    @property
    def loads(self) -> Collection[Any]:
        """Its open requests."""


AnyReplica = TypeVar("AnyReplica", bound=Replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKey:
    """What of a request a policy reads. blocks: names of its prompt's blocks. session: the
    client's key for affinity, "" without one. tokens: of prompt and expected output, estimated;
    prompt_tokens: of the prompt alone. hashes: of the prompt's KV blocks of block_size tokens,
    where they are known."""

    blocks: Sequence[int] = ()
    session: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    hashes: Sequence[int] = ()
    block_size: int = 0


class PolicyCount(NamedTuple):
    """A number that a policy has counted or learned; name: of the metric, after
    quire_router_."""

    name: str
    text: str
    value: float


class RoutingPolicy(Protocol):
    """A way to choose. uses_events: whether it reads the blocks that replicas report."""

    uses_events: bool

    def choose(self, replicas: Sequence[AnyReplica], key: RouteKey) -> AnyReplica:
        """Return one of the replicas, of which there is at least one."""

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Note that the request was sent there."""

    def new_tokens(self, replica: Replica, key: RouteKey) -> int:
        """Return how many tokens of the prompt the replica has to compute, as far as is known."""

    def note_first_token(
        self, replica: Replica, new_tokens: int, queued_tokens: int, seconds: float
    ) -> None:
        """Note when a first token came. new_tokens: of its prompt, as `new_tokens` had said;
        queued_tokens: that the replica had to compute when the request was sent there."""

    def forget(self, replica: Replica) -> None:
        """Note that the replica has lost its cache, or is gone."""

    def counts(self) -> Sequence[PolicyCount]:
        """Return what it shows among the router's metrics."""


class PlainPolicy:
    """Base of policies that remember nothing of requests: they have `choose` only."""

    uses_events = False

    def sent(self, replica: Replica, key: RouteKey) -> None:
        """Keep nothing."""

    def new_tokens(self, replica: Replica, key: RouteKey) -> int:
        """Return all of them: this policy does not know what is cached."""
        return key.prompt_tokens

    def note_first_token(
        self, replica: Replica, new_tokens: int, queued_tokens: int, seconds: float
    ) -> None:
        """Learn nothing."""

    def forget(self, replica: Replica) -> None:
        """Keep nothing."""

    def counts(self) -> Sequence[PolicyCount]:
        """Count nothing."""
        return ()


def lightest(replicas: Sequence[AnyReplica]) -> AnyReplica:
    """Return the replica with the fewest tokens, then requests; the first of equals."""
    return min(replicas, key=lambda one: (one.backlog_tokens, len(one.loads)))
