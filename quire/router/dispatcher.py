"""Dispatcher: answer the requests of clients, each by attempts at replicas.

Holds what the attempts of all requests share: the budget of retries, and where stored responses
are. Knows no HTTP. Always holds: a request that needs a stored response goes where that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

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

HandOver = Callable[[RoutedRequest, ClientResponse], Awaitable[dict[str, Any] | None]]
LookUp = Callable[[RoutedRequest], Awaitable[None]]


class Dispatcher:
    """Answers requests of clients. hand_over: has a prompt computed first (prefill_pairs.py).
    look_up: finds the KV blocks of a prompt (exact_prefixes.py)."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: RouterMetrics,
        features: Features,
        hand_over: HandOver | None = None,
        look_up: LookUp | None = None,
    ) -> None:
        self._hand_over = hand_over
        self._look_up = look_up
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
        if (hedger := shared.features.hedger) is not None:
            tokens = hedger.cost_tokens(request) if hedger.hedges(request) else 0
            hedger.budget.requested(max(tokens, request.prompt_tokens))
            shared.metrics.hedgeable_tokens.inc(max(tokens, request.prompt_tokens))
        tiers = shared.features.tiers
        if tiers is None or not request.route.generates:
            await self._answer(request, client, key)
            return
        loop, tier = asyncio.get_running_loop(), tiers.read(request)
        came_s = loop.time()
        await tiers.enter(tier, shared.fleet, lambda: client.is_gone)
        try:
            await self._answer(request, client, key)
        finally:
            tiers.leave(tier, shared.fleet)
        if request.first_token_s:
            others_s = loop.time() - request.first_token_s
            tpot_s = others_s / max(request.num_delivered - 1, 1)
            tiers.ended(tier, request.first_token_s - came_s, tpot_s)

    async def _answer(self, request: RoutedRequest, client: ClientResponse, key: bytes) -> None:
        shared = self._shared
        choice = ModelChoice(shared.fleet, shared.features, shared.metrics, request)
        if self._look_up is not None:
            await self._look_up(request)
        if self._hand_over is not None:
            request.transfer = await self._hand_over(request, client)
        home = None
        if id_ := needed_id(request):
            home = await shared.responses.holder(key, id_, request)
        await Answer(shared, request, client, choice, key, home).run()
        choice.ended()
