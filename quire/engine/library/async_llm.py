"""AsyncLLM: the engine inside a Python program that has an event loop, in one process.

    async with AsyncLLM("path/to/model") as llm:
        async for delta in llm.generate("Once upon a time"):
            print(delta.text, end="")

The engine runs in a thread of this process, behind the client the server uses: the same tokens.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.config.flags import engine_config, keywords_in_errors
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.request_builder import default_sampling
from quire.engine.client.tokenizer_side import TokenizerSide, rendered
from quire.engine.library.prompts import Message, Prompt, listed, misplaced, misplaced_sampling
from quire.engine.output.answer_parser import answer_reading_of
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.hub.cache import with_local_model


class AsyncLLM:
    """A model to call from an event loop: each call is an async generator of TextDeltas.

    Closing a generator aborts its request. Start it with `await start()` or `async with`; the
    first call starts it otherwise.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: Any) -> None:
        with keywords_in_errors():
            config = with_local_model(engine_config({"model": model, **settings}))
        self._client = EngineClient.in_process(config)
        self._is_ready = False

    @property
    def client(self) -> EngineClient:
        """The engine's face: card, tokenizer, stats, health."""
        return self._client

    async def start(self) -> AsyncLLM:
        """Wait until the model is loaded. Raises SettingError, ModelError or CapacityError."""
        if not self._is_ready:
            with keywords_in_errors():
                await self._client.ready()
            self._is_ready = True
        return self

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        request_id: str | None = None,
        **unknown: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer to a prompt (text or token ids); n > 1 interleaves by `index`.

        terms: how urgent it is (quire.base.scheduling_params).
        """
        if unknown:
            raise misplaced("AsyncLLM.generate", unknown)
        await self.start()
        ids = self._client.tokenizer.encode(prompt) if isinstance(prompt, str) else listed(prompt)
        async with aclosing(self._stream(ids, sampling_params, terms, request_id)) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        request_id: str | None = None,
        **template_settings: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer to a conversation; template_settings as for LLM.chat.

        The text is all the model wrote, marks of reasoning and calls included: read it with
        quire.output_parsers.answer_parser.AnswerParser, by `answer_reading_of`
        (quire.engine.output.answer_parser).
        """
        misplaced_sampling("AsyncLLM.chat", template_settings)
        await self.start()
        text_side = TokenizerSide(tokenizer=self._client.tokenizer, template=self._client.template)
        # A template is a stranger's program, and may take its time.
        text = await asyncio.to_thread(rendered, text_side, messages, template_settings)
        ids = self._client.tokenizer.encode(text, add_special_tokens=False)
        reading = answer_reading_of(text_side, text, template_settings)
        rules = reading.text_rules(text_side.tokenizer)
        stream = self._stream(ids, sampling_params, terms, request_id, rules)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """End a request; its generator yields what is left and ends with "abort"."""
        await self._client.abort(request_id)

    async def close(self) -> None:
        """End the engine; generators still open raise WorkerError."""
        await self._client.close()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _stream(
        self,
        ids: Sequence[int],
        sampling_params: SamplingParams | None,
        terms: SchedulingParams,
        request_id: str | None,
        rules: TextRules = PLAIN_TEXT,
    ) -> AsyncGenerator[TextDelta, None]:
        return self._client.generate(
            ids,
            sampling_params or default_sampling(self._client.card, num_prompt_tokens=len(ids)),
            request_id=request_id or secrets.token_hex(8),
            terms=terms,
            text_rules=rules,
        )
