"""The engine in this process, driven with token ids, and the times of each request.

All requests of a run are submitted at once; the engine's settings decide how many run together.
Decoding is greedy and ignores end-of-text, so that lengths are exact: a request with another
length, or an error, ends the measurement. Times are taken where a client receives tokens.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from quire.base.engine_stats import EngineStats
from quire.base.errors import WorkerError
from quire.base.sampling_params import SamplingParams
from quire.bench.cpu_use import rss_bytes
from quire.bench.workloads import RequestSpec, batches
from quire.engine.library.async_llm import AsyncLLM
from quire.obs.timing import RequestTimes

# A result has the name of a directory, never its path.
_FOLDERS = re.compile(r"(?<=\s)/(?:[^/\s]+/)*")
# Until memory has not grown by more for so long, or at most so long.
_SETTLED_BYTES = 1024**2
_SETTLE_LOOK_S = 0.2
_SETTLE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """Times and output tokens of one request, and how many tokens speculation proposed for it."""

    times: RequestTimes
    token_ids: tuple[int, ...]
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class LocalEngine:
    """An AsyncLLM for measuring: `async with LocalEngine(model, settings) as engine: ...`

    Raises what AsyncLLM raises.
    """

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._llm = AsyncLLM(model, **settings)

    async def __aenter__(self) -> LocalEngine:
        await self._llm.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._llm.close()

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits."""
        return self._llm.client.card.vocab_size

    @property
    def description(self) -> dict[str, object]:
        """Describe the engine: model, dtypes, weight scheme, instruction set, KV cache memory."""
        card = self._llm.client.card
        return {
            "model": card.name,
            "dtype": card.dtype,
            "quantization": card.quantization,
            "kv_cache_dtype": card.kv_cache_dtype,
            "recipe": card.recipe,
            "fingerprint": card.fingerprint,
            "num_blocks": card.num_blocks,
            "block_size": card.block_size,
            "memory": [_FOLDERS.sub("", note) for note in self._llm.client.notes],
        }

    @property
    def stats(self) -> EngineStats:
        """Return the engine's counters of its latest step."""
        return self._llm.client.stats

    async def settle(self) -> None:
        """Wait, at most a minute, until the idle engine has prefaulted its memory.

        Measurements then show an engine in service, not its first seconds.
        """
        held_bytes, give_up_s = -_SETTLED_BYTES, time.perf_counter() + _SETTLE_LIMIT_S
        while (now_bytes := rss_bytes(os.getpid())) - held_bytes >= _SETTLED_BYTES:
            if time.perf_counter() > give_up_s:
                return
            held_bytes = now_bytes
            await asyncio.sleep(_SETTLE_LOOK_S)

    async def run(
        self, specs: Sequence[RequestSpec], *, static_batch: int = 0
    ) -> list[CompletedRequest]:
        """Run all requests and return the results in order.

        static_batch above 0: groups of that size one after another, each computed until its longest
        answer is complete (tokens beyond a request's own length are cut).
        """
        begin_s = time.perf_counter()
        if not static_batch:
            return list(
                await asyncio.gather(*(self._answer(spec, spec, begin_s) for spec in specs))
            )
        answered: list[CompletedRequest] = []
        for group in batches(specs, static_batch):
            wanted = specs[len(answered) : len(answered) + len(group)]
            answered += await asyncio.gather(
                *(self._answer(spec, own, begin_s) for spec, own in zip(group, wanted, strict=True))
            )
        return answered

    async def _answer(
        self, spec: RequestSpec, wanted: RequestSpec, begin_s: float
    ) -> CompletedRequest:
        """Run `ask`; return the times and tokens of its beginning, `wanted`."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=spec.output_tokens, ignore_eos=True, seed=0
        )
        first_s = last_s = 0.0
        accepted = rejected = 0
        token_ids: list[int] = []
        async with aclosing(self._llm.generate(list(spec.prompt_ids), sampling)) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise WorkerError(f"a request ended with an error: {delta.error}")
                now_s = time.perf_counter() - begin_s
                if delta.token_ids:
                    first_s = first_s or now_s
                    if len(token_ids) < wanted.output_tokens:
                        last_s = now_s
                token_ids += delta.token_ids
                accepted, rejected = delta.accepted_drafts, delta.rejected_drafts
        if len(token_ids) != spec.output_tokens:
            raise WorkerError(
                f"a request for {spec.output_tokens} tokens was answered with {len(token_ids)}; "
                "nothing is measured of wrong answers"
            )
        times = RequestTimes(
            sent_s=0.0,
            first_s=first_s,
            last_s=last_s,
            prompt_tokens=len(spec.prompt_ids),
            output_tokens=wanted.output_tokens,
        )
        return CompletedRequest(
            times=times,
            token_ids=tuple(token_ids[: wanted.output_tokens]),
            accepted_drafts=accepted,
            rejected_drafts=rejected,
        )
