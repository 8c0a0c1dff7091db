"""Engine: the part of EngineClient that the HTTP server uses.

Knows no HTTP. `quire.engine.client.engine_client.EngineClient` implements it; tests use a scripted
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from quire.base.cache_usage import CacheReport
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import QuireError
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.engine.model_card import Health, ModelCard
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.process.messages import TimelinesReported
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer


class Engine(Protocol):
    """A loaded engine."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stats: EngineStats
    on_stats: Callable[[EngineStats], None] | None
    dead: asyncio.Event

    def default_sampling(self) -> SamplingParams: ...

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None: ...

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        first_stream: int = 0,
        cache_salt: str = "",
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        text_rules: TextRules = PLAIN_TEXT,
        output_ids: Sequence[int] = (),
    ) -> AsyncGenerator[TextDelta, None]: ...

    def num_waiting(self, request_id: str) -> int: ...

    async def cache_report(self, *, num_prefixes: int = 0) -> CacheReport: ...

    async def flush_cache(self) -> int: ...

    async def engine_snapshot(self) -> EngineSnapshot: ...

    async def timelines(self, request_id: str) -> TimelinesReported: ...

    def health(self) -> Health: ...

    def refusal(self) -> QuireError | None: ...


class StartingEngine(Engine, Protocol):
    """An engine that is still starting; the server waits for it, and closes it."""

    async def ready(self) -> None: ...

    async def close(self) -> None: ...
