"""Turn a trace into a simulation's requests, at a given speed.

Prompts are made up so that sharing is real: where a trace names blocks of a prompt, equal names
become equal tokens, and all other tokens belong to one request only. Token ids stand for content;
no vocabulary bounds them. Always holds: the same trace and settings give the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.base.rare_records import Speculation
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.obs.trace import MOONCAKE_BLOCK_TOKENS, Arrival
from quire.sim.runner import STOP_ID, PlannedOutput

HEAVY, LIGHT = "heavy", "light"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. output_tokens: its length in the trace, unknown to the engine."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Settings that all requests of a simulation share. max_tokens: their output limit.

    The objectives are passed to the engine where they are set (see Request). max_drafts: most draft
    tokens of a step, 0 for none.
    """

    max_tokens: int
    max_model_len: int
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    deadline_ms: float | None = None
    max_drafts: int = 0


def trace_requests(
    trace: Sequence[Arrival], *, speed: float, defaults: RequestDefaults, tenant: str = ""
) -> tuple[list[TraceRequest], int]:
    """Return the trace's requests, `speed` times as fast, and how many were left out.

    Requests longer than the context are left out; longer answers are cut to max_tokens.
    """
    if not speed > 0:
        raise SettingError(f"the speed is {speed}; it must be above 0")
    requests = [
        TraceRequest(
            arrival_ms=1e3 * one.arrival_s / speed,
            prompt_tokens=one.prompt_tokens,
            output_tokens=min(one.output_tokens, defaults.max_tokens),
            block_ids=one.block_ids,
            block_tokens=one.block_tokens,
            tenant=tenant,
        )
        for one in trace
    ]
    fit = [
        request
        for request in requests
        if request.prompt_tokens + request.output_tokens <= defaults.max_model_len
    ]
    if not fit:
        raise SettingError(
            f"none of the {len(trace)} requests of the trace has at most {defaults.max_model_len} "
            "tokens; raise max_model_len"
        )
    return fit, len(requests) - len(fit)


def with_flood(
    trace: Sequence[Arrival],
    *,
    every: int,
    light_speed: float,
    speed: float,
    defaults: RequestDefaults,
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return a light tenant's requests among a flood, and those of the light tenant alone.

    Each `every`-th request of the trace belongs to the light tenant and arrives at light_speed; the
    others arrive at `speed`. The light tenant's requests end with the flood's.
    """
    light = [one for number, one in enumerate(trace) if number % every == 0]
    heavy = [one for number, one in enumerate(trace) if number % every]
    if not light or not heavy:
        raise SettingError(
            f"the trace has {len(trace)} requests; a light tenant gets one in {every} of them, "
            "which must leave some to each"
        )
    flood, _ = trace_requests(heavy, speed=speed, defaults=defaults, tenant=HEAVY)
    calm, _ = trace_requests(light, speed=light_speed, defaults=defaults, tenant=LIGHT)
    calm = [request for request in calm if request.arrival_ms <= flood[-1].arrival_ms] or calm[:1]
    return sorted([*flood, *calm], key=lambda request: request.arrival_ms), calm


class RequestFactory:
    """Makes engine requests of trace requests; `planned` has the outputs of unfinished ones.

    vocab_size: upper bound of token ids; content is then encoded as pairs of ids.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        defaults: RequestDefaults,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self._asks = defaults
        # Token ids without the stop id; a content id is written as two digits of this base.
        self._base = None if vocab_size is None else vocab_size - 1
        self._sampling = SamplingParams(seed=0, max_tokens=defaults.max_tokens)
        self.planned: dict[str, PlannedOutput] = {}
        named = max((max(request.block_ids, default=-1) for request in requests), default=-1)
        # Content ids: first those of shared blocks, then one for each request.
        self._first_block, self._first_own = STOP_ID + 1, STOP_ID + 2 + named
        if self._base is not None and self._base**2 < self._first_own + len(requests):
            raise SettingError(
                f"the vocabulary has {vocab_size} tokens; pairs of them cannot encode "
                f"{self._first_own + len(requests)} distinct contents; take fewer requests"
            )

    def make(self, number: int, request: TraceRequest) -> Request:
        """Return the engine's request `number` of the run."""
        own, defaults = self._first_own + self.content_of(number), self._asks
        name = str(number)
        token_id = own if self._base is None else STOP_ID + 1 + own % self._base
        self.planned[name] = PlannedOutput(request.prompt_tokens + request.output_tokens, token_id)
        return Request(
            request_id=name,
            group_id=name,
            stream=0,
            prompt_ids=self._prompt(request, own),
            sampling=self._sampling,
            stop_ids=(STOP_ID,),
            max_total_tokens=min(
                request.prompt_tokens + defaults.max_tokens, defaults.max_model_len
            ),
            arrival_ms=request.arrival_ms,
            tenant=request.tenant,
            deadline_ms=defaults.deadline_ms,
            ttft_slo_ms=defaults.ttft_slo_ms,
            tpot_slo_ms=defaults.tpot_slo_ms,
            speculation=Speculation(max_drafts=defaults.max_drafts)
            if defaults.max_drafts
            else None,
        )

    def content_of(self, number: int) -> int:
        """Return which request of all has the content of request `number` of this run."""
        return number

    def forget(self, request_id: str) -> None:
        """Drop a request that ended or was rejected."""
        del self.planned[request_id]

    def _prompt(self, request: TraceRequest, own: int) -> NDArray[np.int32]:
        prompt = np.full(request.prompt_tokens, own, np.int32)
        if request.block_ids:
            named = np.array(request.block_ids, np.int32) + self._first_block
            shared = np.repeat(named, request.block_tokens)[: request.prompt_tokens]
            prompt[: len(shared)] = shared
        if self._base is None:
            return prompt
        high, low = np.divmod(prompt, self._base)
        high[1::2] = low[1::2]
        return high + np.int32(STOP_ID + 1)
