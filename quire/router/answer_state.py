"""AnswerState: what the parts of one answer share: its request, its client, and what was tried.

Answer (the attempts), Placement (the replica of the next one) and StreamRelay (the events of a
stream) read and write it. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.router.admission import Admission
from quire.router.breaker import RetryBudget
from quire.router.client_response import ClientResponse
from quire.router.continuation import Continuation
from quire.router.failures import Failures
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.model_choice import ModelChoice
from quire.router.replica import Replica
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics
from quire.router.stored_responses import StoredResponses


@dataclass(slots=True, kw_only=True)
class AnswerParts:
    """What all answers of a router use."""

    fleet: Fleet
    admission: Admission
    metrics: RouterMetrics
    features: Features
    budget: RetryBudget
    responses: StoredResponses


class AnswerState:
    """Of one request. client_key: of its client, b"" without one. home: the only replica that can
    answer; None for any. failures: with it so far. key: what policies read of it. tried: replicas
    that failed with it or refused it. has_place: of MovePlaces. has_events: whether the client has
    any, not heartbeats alone; fingerprint: of the replica that sent the first, "" before. doubted:
    the replica that gave a final error, until another one answers."""

    def __init__(
        self,
        parts: AnswerParts,
        request: RoutedRequest,
        client: ClientResponse,
        choice: ModelChoice,
        client_key: bytes,
        home: Replica | None,
        failures: Failures,
    ) -> None:
        self.parts = parts
        self.request = request
        self.client = client
        self.choice = choice
        self.client_key = client_key
        self.home = home
        self.tried: set[Replica] = set()
        self.failures = failures
        self.fingerprint = ""
        self.has_place = self.has_events = False
        self.doubted: Replica | None = None
        self.continuation = Continuation(parts.fleet.resumes, parts.metrics)
        self.read_prompt()

    def read_prompt(self) -> None:
        """Read what placement needs of the prompt, at first and after it was replaced."""
        lanes = self.parts.features.lanes
        self.key = self.request.key()
        self.is_long = lanes is not None and lanes.is_long(self.request.prompt_tokens)

    def note_event(self, fingerprint: str) -> None:
        """Note the first event that the client has: only the same fingerprint goes on like that."""
        self.has_events = True
        self.fingerprint = fingerprint

    def note_answer(self, now_s: float) -> None:
        """Note that a replica answers: a final error before was of the replica that gave it."""
        if self.doubted is not None:
            self.doubted.breaker.failed(now_s)
            self.failures.at.add(self.doubted)  # the last choice, should this one fail
            self.doubted = None

    def leave_place(self) -> None:
        """Give back the place to move again: the attempt has output or has ended."""
        if self.has_place:
            self.has_place = False
            self.parts.admission.places.give_back()

    @property
    def why_lost(self) -> str:
        """Why the stream ends with its replica; "" where it continues or begins anew elsewhere."""
        may_begin_anew = not self.has_events and self.home is None
        return "" if may_begin_anew else self.request.why_not

    @property
    def is_fresh(self) -> bool:
        """Whether it may go to a second replica at once: no replica has failed with it."""
        return not self.client.started and not self.failures.reasons

    @property
    def max_long(self) -> int | None:
        """Of the long prompts that its replica may have, with this one; None for any number."""
        lanes = self.parts.features.lanes
        return lanes.limit if lanes is not None and self.is_long else None
