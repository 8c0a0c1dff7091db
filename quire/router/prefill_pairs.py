"""PrefillPairs: have the prompt of a request computed by a prefill replica before it is decoded.

The request goes to a prefill replica first, for one token; what that answers lets the decode
replica fetch the prompt's KV blocks. Prefill replicas are a fleet of their own, chosen by the same
policy. Always holds: whatever fails here, the request goes to a decode replica without the
parameters, which computes the prompt itself, but for one that ends engines: its error is passed on;
a prefill replica that fails with a request counts among the replicas that did, where that is
evidence against the request; the client gets nothing else of the prefill's answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import Counter

from quire.router.api_forms import error_code, error_message, is_final, may_end_engines
from quire.router.attempt import Attempt
from quire.router.client_response import ClientResponse
from quire.router.failures import Failures
from quire.router.faults import Refusal, ReplicaFault
from quire.router.fleet import Fleet
from quire.router.routed_request import RoutedRequest
from quire.router.router_metrics import RouterMetrics

PARAMS = "kv_transfer_params"
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
# Fields that one whole token does without.
_LEFT_OUT = ("stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens")


class PrefillPairs:
    """Asks the replicas of `fleet`. min_tokens: estimated prompt tokens from which that pays."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, *, min_tokens: int) -> None:
        self.fleet = fleet
        self._min_tokens = min_tokens
        self._outcomes: Counter = metrics.prefills

    async def hand_over(
        self, request: RoutedRequest, client: ClientResponse, failures: Failures
    ) -> dict[str, Any] | None:
        """Return the parameters for a decode replica; None: it gets the request as it is.

        failures: of the request, to which a fault is added. Raises Refusal where it ends engines.
        """
        if not self._is_suited(request):
            return None
        key = request.key()
        replica = self.fleet.choose(key, request.model)
        if replica is None:
            self._outcomes.labels("no_replica").inc()
            return None
        request.is_prefilled = True
        body = {name: one for name, one in request.fields.items() if name not in _LEFT_OUT}
        wanted = {"max_tokens": 1, PARAMS: {"do_remote_decode": True}}
        try:
            attempt = Attempt(self.fleet, replica, request, client)
            attempt.load.has_heartbeats = False  # its answer is whole
            self.fleet.weigh(replica, key, attempt.load)
            with attempt:
                self.fleet.policy.sent(replica, key)
                exchange = await attempt.send(msgspec.json.encode({**body, **wanted}))
                answer = await exchange.body()
                status, is_full = exchange.status, request.form.is_overloaded(exchange.status)
                if is_final(status, exchange.headers):
                    attempt.cancel()
                    self._check_final(error_code(exchange.headers), answer)
                elif status >= 500 and status != 504 and not is_full:
                    raise ReplicaFault(f"it answered {status}", is_suspect=True)
                if status == 200:  # with its only token
                    self.fleet.note_first_token(replica, attempt.load, attempt.age_s)
        except ReplicaFault as fault:
            request.is_prefilled = False
            if not fault.is_shared:  # decode replicas compute the prompt anew
                failures.note(replica, fault, request.num_delivered)
            self._outcomes.labels("failed").inc()
            self.fleet.log.warning(
                "prefill replica failed; the prompt is decoded without it",
                replica=replica.name,
                reason=str(fault),
            )
            return None
        params = _params_in(answer) if status == 200 else None
        request.is_prefilled = status == 200
        self._outcomes.labels("refused" if params is None else "handed_over").inc()
        return params

    def _check_final(self, code: str, answer: bytes) -> None:
        """Raise Refusal for a final error that a decode replica may not meet, as its engines may
        die of the request; others may be this replica's own."""
        if may_end_engines(code):
            self._outcomes.labels("refused").inc()
            raise Refusal(500, "poison_request", error_message(answer), is_final=True)

    def _is_suited(self, request: RoutedRequest) -> bool:
        """Return whether a request has one long prompt and one choice, and no transfer yet."""
        fields, prompt = request.fields, request.fields.get("prompt")
        if request.path not in _PATHS or request.prompt_tokens < self._min_tokens:
            return False
        if any(fields.get(name) is not None for name in (PARAMS, "output_ids", "prompt_logprobs")):
            return False
        if any(fields.get(name) not in (None, 1) for name in request.form.answers):
            return False
        if fields.get("echo") or fields.get("use_beam_search") or fields.get("max_tokens") == 0:
            return False
        is_several = isinstance(prompt, list) and not all(type(one) is int for one in prompt)
        return bool(fields) and not is_several


def _params_in(raw: bytes) -> dict[str, Any] | None:
    try:
        answer = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    found = answer.get(PARAMS) if isinstance(answer, dict) else None
    return found if isinstance(found, dict) else None
