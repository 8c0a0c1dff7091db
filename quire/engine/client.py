"""EngineClient: the engine's face in an event loop, whether it runs in a process or a thread.

    client = EngineClient.spawn(config)        # returns at once; the engine starts beside us
    await client.ready()                       # raises what the engine could not do
    async for delta in client.generate(prompt_ids, sampling, request_id="r1"): ...
    await client.drain(grace_s=30); await client.close()

Makes Requests (one a stream), sends them, and turns what comes back into text. Knows no HTTP and
no scheduling. Always holds: each open generate ends, by a finish reason or by an error; a dead
engine raises WorkerError in all of them; closing a generator aborts what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from quire.base.records import EngineStats
from quire.base.sampling_params import SamplingParams
from quire.config.groups import EngineConfig
from quire.engine.card import Health, ModelCard
from quire.engine.output import TextDelta
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer


class EngineClient:
    """One engine, seen from an event loop. All methods belong to that loop's thread.

    `card`, `tokenizer` and `template` may be read once `ready()` has returned. `stats` is the
    latest known (all zeros at first). `dead` is set when the engine is gone, for whatever reason
    but close().
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    stats: EngineStats
    dead: asyncio.Event

    @classmethod
    def spawn(cls, config: EngineConfig, *, watchdog_s: float = 60.0) -> EngineClient:
        """Start an engine process; returns at once, needs no running loop. Imports overlap."""
        raise NotImplementedError

    @classmethod
    def in_process(cls, config: EngineConfig, *, watchdog_s: float = 60.0) -> EngineClient:
        """Start an engine in a thread of this process."""
        raise NotImplementedError

    async def ready(self) -> None:
        """Wait until the engine can answer. Raises ModelError, CapacityError, SettingError ..."""
        raise NotImplementedError

    def default_sampling(self) -> SamplingParams:
        """Sampling parameters with the model's generation defaults."""
        raise NotImplementedError

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
    ) -> AsyncIterator[TextDelta]:
        """Stream the n choices of one request, interleaved; each delta has its `index`.

        An async generator: close it (`aclose`) to abort what still runs. Raises at the first
        step RequestError where the request cannot be served (ContextTooLong with both numbers),
        OverloadedError where the queue is full, ShuttingDown while draining, and at any step
        WorkerError where the engine died. An error of one stream comes as a delta with
        finish_reason "error" and does not end the others.
        """
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """End the streams of a request; its generator yields their last deltas ("abort")."""
        raise NotImplementedError

    def health(self) -> Health:
        """Progress: ok only in state ready, and if steps advance while work is pending."""
        raise NotImplementedError

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let open streams finish for `grace_s`, then abort the rest."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the engine; open streams get WorkerError. Does not set `dead`."""
        raise NotImplementedError
