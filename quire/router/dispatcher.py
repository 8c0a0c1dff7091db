"""Dispatcher: answer the requests of clients, each by attempts at replicas.

Holds what the attempts of all requests share: the budget of retries, and where stored responses
are. Knows no HTTP. Always holds: a request that needs a stored response goes where that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from quire.router.admission import Admission
from quire.router.answer import Answer
from quire.router.answer_state import AnswerParts, AnswerState
from quire.router.breaker import RetryBudget
from quire.router.client_response import ClientResponse, InnerResponse
from quire.router.deadlines import before_deadline
from quire.router.failures import Failures
from quire.router.features import Features
from quire.router.fleet import Fleet
from quire.router.model_choice import ModelChoice
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics
from quire.router.stored_responses import StoredResponses, needed_id
from quire.router.summaries import CHAT_PATH, PromptSummary, SummaryOrder

HandOver = Callable[[RoutedRequest, ClientResponse, Failures], Awaitable[dict[str, Any] | None]]
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
        if features.tiers is not None:
            features.tiers.follow(fleet)

    async def answer(
        self,
        request: RoutedRequest,
        client: ClientResponse,
        key: bytes,
        order: SummaryOrder | None = None,
    ) -> None:
        """Answer one request. Raises Refusal, ClientGone.

        key: of the client, b"" without one. order: of a summary where the prompt does not fit.
        """
        shared = self._shared
        request.came_s = asyncio.get_running_loop().time()
        shared.budget.requested()
        if (hedger := shared.features.hedger) is not None and not request.route.is_free:
            tokens = hedger.cost_tokens(request) if hedger.hedges(request) else 0
            hedger.budget.requested(max(tokens, request.prompt_tokens))
            shared.metrics.hedgeable_tokens.inc(max(tokens, request.prompt_tokens))
        tiers = shared.features.tiers
        if tiers is None or not request.route.generates:
            await self._answer(request, client, key, order)
            return
        loop, tier = asyncio.get_running_loop(), tiers.read(request)
        async with before_deadline(request):
            with shared.admission.waiting(request.expected_tokens):
                await tiers.enter(tier, lambda: client.is_gone)
        # The wait for a place is the limit's own effect: counted as late it would keep the limit
        # low for ever.
        placed_s = loop.time()
        try:
            await self._answer(request, client, key, order)
        finally:
            tiers.leave(tier)
        if request.first_token_s:
            others_s = loop.time() - request.first_token_s
            num_each = request.num_delivered / request.journal.num_choices
            tpot_s = others_s / max(num_each - 1, 1)
            tiers.ended(tier, request.first_token_s - placed_s, tpot_s)

    async def _answer(
        self,
        request: RoutedRequest,
        client: ClientResponse,
        key: bytes,
        order: SummaryOrder | None,
    ) -> None:
        shared = self._shared
        summary = None if order is None else self._summary(request, client, key, order)
        choice = ModelChoice(shared.fleet, shared.features, shared.metrics, request, summary)
        failures = Failures()
        async with before_deadline(request):
            if self._look_up is not None:
                await self._look_up(request)
            if self._hand_over is not None:
                request.waited(asyncio.get_running_loop().time())
                request.transfer = await self._hand_over(request, client, failures)
        home = None
        if id_ := needed_id(request):
            home = await shared.responses.holder(key, id_, request)
        state = AnswerState(shared, request, client, choice, key, home, failures)
        await Answer(state).run()
        choice.ended()

    def _summary(
        self, request: RoutedRequest, client: ClientResponse, key: bytes, order: SummaryOrder
    ) -> PromptSummary:
        table, names = self._shared.features.summaries, self._shared.features.names
        assert table is not None, "without it an order is refused"
        models = names.targets(order.model) if order.model in names.names else [order.model]
        ask = partial(self._ask, request, client, key)
        return PromptSummary(table, order, ask, self._shared.fleet.context_tokens(models))

    async def _ask(
        self, request: RoutedRequest, client: ClientResponse, key: bytes, fields: Mapping[str, Any]
    ) -> tuple[int, str, bytes]:
        """Return status, error code and body of a chat that the router itself needs for a request.

        It is routed like one of that client's, with the client's key. Raises Refusal, ClientGone.
        """
        shared = self._shared
        inner = RoutedRequest(CHAT_PATH, request.headers, msgspec.json.encode(fields))
        inner.came_s = asyncio.get_running_loop().time()
        choice = ModelChoice(shared.fleet, shared.features, shared.metrics, inner)
        request.summarizing = inner
        with InnerResponse(client, inner.form) as response:
            state = AnswerState(shared, inner, response, choice, key, None, Failures())
            await Answer(state).run()
            choice.ended()
        request.summarizing = None
        request.replaced_tokens += inner.replaced_tokens
        return response.status, response.code, response.body
