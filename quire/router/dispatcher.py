"""Dispatcher: answer the requests of clients, each by attempts at replicas.

Holds what the attempts of all requests share: the budget of retries, and where stored responses
are. Knows no HTTP. Always holds: a request that needs a stored response goes where that is.
"""

from __future__ import annotations

from quire.router.admission import Admission
from quire.router.answer import Answer, AnswerParts
from quire.router.breaker import RetryBudget
from quire.router.client_response import ClientResponse
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.model_choice import ModelChoice
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics
from quire.router.stored_responses import (
    StoredResponses,
    needed_id,
)


class Dispatcher:
    """Answers the requests of clients."""

    def __init__(
        self, fleet: Fleet, admission: Admission, metrics: RouterMetrics, features: Features
    ) -> None:
        self._shared = AnswerParts(
            fleet=fleet,
            admission=admission,
            metrics=metrics,
            features=features,
            budget=RetryBudget(fleet.settings.max_retry_share),
            responses=StoredResponses(fleet),
        )

    async def answer(self, request: RoutedRequest, client: ClientResponse, key: bytes) -> None:
        """Answer one request. key: of the client, b"" without one. Raises Refusal, ClientGone."""
        shared = self._shared
        shared.budget.requested()
        if shared.features.hedger is not None:
            shared.features.hedger.budget.requested(request.prompt_tokens)
            shared.metrics.hedgeable_tokens.inc(request.prompt_tokens)
        choice = ModelChoice(shared.fleet, shared.features, shared.metrics, request)
        home = None
        if id_ := needed_id(request):
            home = await shared.responses.holder(key, id_, request)
        await Answer(shared, request, client, choice, key, home).run()
        choice.ended()
