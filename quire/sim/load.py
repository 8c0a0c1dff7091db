"""What arrives in a simulation: a trace's requests, as fast as asked for, in the engine's terms.

Content is made up so that sharing is real: where a trace names blocks of a prompt, equal names
become equal tokens, and what it does not name is no other request's. Token ids stand for content
and for nothing else; no vocabulary bounds them. Always holds: the same trace and settings give
the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.obs.trace import MOONCAKE_BLOCK_TOKENS, Arrival
from quire.sim.runner import STOP_ID, Planned

HEAVY, LIGHT = "heavy", "light"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to come. output_tokens: what it will get; the engine is not told."""

    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What all requests say of themselves. max_tokens: the most output, whatever comes of it.

    The goals are told to the engine where they are set (see Request).
    """

    max_tokens: int
    max_model_len: int
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    deadline_ms: float | None = None


def jobs_of(
    trace: Sequence[Arrival], *, speed: float, asks: Asks, tenant: str = ""
) -> tuple[list[Job], int]:
    """The trace's requests, `speed` times as fast, and how many were left out.

    Left out is what the context cannot hold; answers longer than max_tokens are cut to it.
    """
    if not speed > 0:
        raise SettingError(f"the speed is {speed}; it must be above 0")
    jobs = [
        Job(
            arrival_ms=1e3 * one.arrival_s / speed,
            prompt_tokens=one.prompt_tokens,
            output_tokens=min(one.output_tokens, asks.max_tokens),
            block_ids=one.block_ids,
            tenant=tenant,
        )
        for one in trace
    ]
    fit = [job for job in jobs if job.prompt_tokens + job.output_tokens <= asks.max_model_len]
    if not fit:
        raise SettingError(
            f"none of the {len(trace)} requests of the trace has at most {asks.max_model_len} "
            "tokens; raise max_model_len"
        )
    return fit, len(jobs) - len(fit)


def flooded(
    trace: Sequence[Arrival], *, every: int, light_speed: float, speed: float, asks: Asks
) -> tuple[list[Job], list[Job]]:
    """Each `every`-th request belongs to a light tenant, whose pace stays; the others flood.

    Returns all jobs in order of arrival, and those of the light tenant alone. The light tenant
    asks for as long as the flood lasts.
    """
    light = [one for number, one in enumerate(trace) if number % every == 0]
    heavy = [one for number, one in enumerate(trace) if number % every]
    if not light or not heavy:
        raise SettingError(
            f"the trace has {len(trace)} requests; a light tenant gets one in {every} of them, "
            "which must leave some to each"
        )
    flood, _ = jobs_of(heavy, speed=speed, asks=asks, tenant=HEAVY)
    calm, _ = jobs_of(light, speed=light_speed, asks=asks, tenant=LIGHT)
    calm = [job for job in calm if job.arrival_ms <= flood[-1].arrival_ms] or calm[:1]
    return sorted([*flood, *calm], key=lambda job: job.arrival_ms), calm


class Requests:
    """Makes the engine's requests of jobs; `planned` says what becomes of those that live.

    vocab_size: token ids stay below it, and content is told by pairs of them.
    """

    def __init__(self, jobs: Sequence[Job], asks: Asks, *, vocab_size: int | None = None) -> None:
        self._asks = asks
        # Ids but the stop id; one that names content is written as two digits of this base.
        self._base = None if vocab_size is None else vocab_size - 1
        self._sampling = SamplingParams(seed=0, max_tokens=asks.max_tokens)
        self.planned: dict[str, Planned] = {}
        named = max((max(job.block_ids, default=-1) for job in jobs), default=-1)
        # Ids above the stop id name shared blocks; those above all of them, one request each.
        self._first_block, self._first_own = STOP_ID + 1, STOP_ID + 2 + named
        if self._base is not None and self._base**2 < self._first_own + len(jobs):
            raise SettingError(
                f"the vocabulary has {vocab_size} tokens; pairs of them are too few to tell "
                f"{self._first_own + len(jobs)} contents apart: take fewer requests"
            )

    def make(self, number: int, job: Job) -> Request:
        """Request `number` of the run."""
        own, asks = self._first_own + number, self._asks
        name = str(number)
        token_id = own if self._base is None else STOP_ID + 1 + own % self._base
        self.planned[name] = Planned(job.prompt_tokens + job.output_tokens, token_id)
        return Request(
            request_id=name,
            group_id=name,
            stream=0,
            prompt_ids=self._prompt(job, own),
            sampling=self._sampling,
            stop_ids=(STOP_ID,),
            max_total_tokens=min(job.prompt_tokens + asks.max_tokens, asks.max_model_len),
            arrival_ms=job.arrival_ms,
            tenant=job.tenant,
            deadline_ms=asks.deadline_ms,
            ttft_slo_ms=asks.ttft_slo_ms,
            tpot_slo_ms=asks.tpot_slo_ms,
        )

    def forget(self, request_id: str) -> None:
        """A request ended, or was refused."""
        del self.planned[request_id]

    def _prompt(self, job: Job, own: int) -> NDArray[np.int32]:
        prompt = np.full(job.prompt_tokens, own, np.int32)
        if job.block_ids:
            named = np.array(job.block_ids, np.int32) + self._first_block
            shared = np.repeat(named, MOONCAKE_BLOCK_TOKENS)[: job.prompt_tokens]
            prompt[: len(shared)] = shared
        if self._base is None:
            return prompt
        high, low = np.divmod(prompt, self._base)
        high[1::2] = low[1::2]
        return high + np.int32(STOP_ID + 1)
