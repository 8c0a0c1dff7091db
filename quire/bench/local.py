"""The engine in this process, driven with token ids, and what each request's times were.

All of a run's requests are handed in at once; how many run together is the engine's setting.
Greedy, without end-of-text, so that lengths are exact: a request that ended at another length, or
with an error, ends the measurement. Times are taken where a caller sees tokens.
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

from quire.base.errors import WorkerError
from quire.base.records import EngineStats
from quire.base.sampling_params import SamplingParams
from quire.bench.foreign import rss_bytes
from quire.bench.workloads import Ask, batches
from quire.engine.library.async_llm import AsyncLLM
from quire.obs.timing import RequestTimes

# A result names no paths of whoever measured, only what a folder is called.
_FOLDERS = re.compile(r"(?<=\s)/(?:[^/\s]+/)*")
# Until memory has not grown by more for so long, or at most so long.
_SETTLED_BYTES = 1024**2
_SETTLE_LOOK_S = 0.2
_SETTLE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request's times, and the tokens it was answered with."""

    times: RequestTimes
    token_ids: tuple[int, ...]


class LocalEngine:
    """An AsyncLLM for measuring. `async with LocalEngine(model, settings) as engine: ...`

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
        """Width of the logits."""
        return self._llm.client.card.vocab_size

    @property
    def description(self) -> dict[str, object]:
        """What runs: the model, dtypes, scheme of weights, instruction set, the cache's memory."""
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
        """The engine's counters, as of its latest step."""
        return self._llm.client.stats

    async def settle(self) -> None:
        """Wait until the idle engine has made the memory it makes ahead of use, at most a minute:
        what is measured is an engine in service, not its first seconds."""
        held_bytes, give_up_s = -_SETTLED_BYTES, time.perf_counter() + _SETTLE_LIMIT_S
        while (now_bytes := rss_bytes(os.getpid())) - held_bytes >= _SETTLED_BYTES:
            if time.perf_counter() > give_up_s:
                return
            held_bytes = now_bytes
            await asyncio.sleep(_SETTLE_LOOK_S)

    async def run(self, asks: Sequence[Ask], *, static_batch: int = 0) -> list[Answered]:
        """Answer all, in order. static_batch above 0: groups of so many, one after the other,
        each computed until its longest answer is done (tokens past a request's own are cut)."""
        begin_s = time.perf_counter()
        if not static_batch:
            return list(await asyncio.gather(*(self._answer(ask, ask, begin_s) for ask in asks)))
        answered: list[Answered] = []
        for group in batches(asks, static_batch):
            wanted = asks[len(answered) : len(answered) + len(group)]
            answered += await asyncio.gather(
                *(self._answer(ask, own, begin_s) for ask, own in zip(group, wanted, strict=True))
            )
        return answered

    async def _answer(self, ask: Ask, wanted: Ask, begin_s: float) -> Answered:
        """Compute `ask`; the times and tokens are those of `wanted`, its beginning."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True, seed=0
        )
        first_s = last_s = 0.0
        token_ids: list[int] = []
        async with aclosing(self._llm.generate(list(ask.prompt_ids), sampling)) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise WorkerError(f"a request ended with an error: {delta.error}")
                now_s = time.perf_counter() - begin_s
                if delta.token_ids:
                    first_s = first_s or now_s
                    if len(token_ids) < wanted.output_tokens:
                        last_s = now_s
                token_ids += delta.token_ids
        if len(token_ids) != ask.output_tokens:
            raise WorkerError(
                f"a request for {ask.output_tokens} tokens was answered with {len(token_ids)}; "
                "nothing is measured of wrong answers"
            )
        times = RequestTimes(
            sent_s=0.0,
            first_s=first_s,
            last_s=last_s,
            prompt_tokens=len(ask.prompt_ids),
            output_tokens=wanted.output_tokens,
        )
        return Answered(times=times, token_ids=tuple(token_ids[: wanted.output_tokens]))
