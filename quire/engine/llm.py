"""LLM and AsyncLLM: the engine inside a Python program, in one process.

    llm = LLM("path/to/model", max_num_seqs=32)
    for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
        print(answer.text)

Both run the engine in a thread of this process: LLM waits until all is done (and may be
interrupted), AsyncLLM streams into an event loop. Both use the classes the server uses, so they
give the server's tokens.
"""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from numbers import Integral
from types import TracebackType
from typing import Any, TypeVar, cast

from quire.base.cache_use import CacheUse
from quire.base.clock import Clock
from quire.base.errors import InvalidParameter, OverloadedError
from quire.base.gguf_open import gguf_read_once
from quire.base.records import FinishReason, Request
from quire.base.sampling_params import MAX_N, SamplingParams
from quire.base.show import show
from quire.base.terms import DEFAULT_TERMS, Terms
from quire.config.flags import engine_config
from quire.config.groups import EngineConfig
from quire.dialects.said import Answer as Reply
from quire.engine.client import EngineClient
from quire.engine.hearing import Hearing, hearing_of
from quire.engine.host import EngineThread
from quire.engine.messages import (
    Abort,
    Failed,
    Fault,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Stop,
    Submit,
    error_of,
)
from quire.engine.output import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.ranking import Ranking
from quire.engine.requests import default_sampling, make_requests
from quire.engine.streams import OpenStreams
from quire.engine.text_side import TextSide, load_text_side, rendered
from quire.engine.token_text import TokenText
from quire.text.tokenizer import Tokenizer

_Kind = TypeVar("_Kind")

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished stream. logprobs are parallel to token_ids, empty if not asked for.
    With SamplingParams.logprob_token_ids each of them has `listed`.

    stop_reason: the stop string or the caller's stop token id, if one ended it. cache_use: where
    cached_tokens were found, and why no more, if Terms.return_cached_tokens_details asked. error:
    why, where finish_reason is "error". score: of a beam, by which the completions of an answer are
    ordered. message: of LLM.chat, what the text says: `reasoning`, `content`, and `calls` of tools,
    each with its `name` and `arguments` (the text of a JSON object, where the model wrote one).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenText, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int | None
    cached_tokens: int
    cache_use: CacheUse | None = None
    error: str | None = None
    score: float | None = None
    message: Reply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one prompt: `outputs` has SamplingParams.n completions, by index.

    prompt_logprobs: parallel to prompt_ids, None first; empty unless SamplingParams asks for
    prompt_logprobs. They are made when they are read. The properties are those of the first
    completion.
    """

    prompt: str | None
    prompt_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    prompt_logprobs: Sequence[TokenText | None] = ()

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenText, ...]:
        """Log-probabilities of the first completion."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason


class LLM:
    """A model to call. `settings` are the server's flags with underscores (max_num_seqs=8).

    model: its folder; empty for the model in the box. Raises SettingError, ModelError or
    CapacityError. Not to be called from several threads at once. `memory_text` is the sum that
    led to the size of the KV cache.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: Any) -> None:
        config = engine_config({"model": os.fspath(model), **settings})
        self._clock = Clock()
        self._inbox: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._engine = EngineThread(_with_room_for_any_request(config), self._inbox.put)
        self._fault: Fault | None = None
        self._streams: OpenStreams[_Job] = OpenStreams()
        try:
            with gguf_read_once():  # by the engine's thread too
                self._text = load_text_side(config.model)
                ready = self._until_ready()
        except BaseException:
            self._engine.end()
            raise
        self.card = ready.card
        # Enough to fill a step and to have the next ones ready.
        self._most_streams = min(
            2 * config.scheduler.max_num_seqs, config.scheduler.max_queued_requests
        )
        self.memory_text = "\n".join(ready.notes)

    @property
    def default_sampling(self) -> SamplingParams:
        """Sampling parameters with the model's generation defaults."""
        return default_sampling(self.card)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
        progress: bool | None = None,
    ) -> list[Answer]:
        """Answers to the prompts, in their order. A prompt is text or a list of token ids.

        sampling_params: one for all, or one each; None takes the model's defaults. To score texts
        and generate nothing: SamplingParams(prompt_logprobs=0, max_tokens=0), and read each
        answer's prompt_logprobs. terms: how urgent it is (quire.base.terms), one for all or one
        each. progress: a bar on standard error; None shows one on a terminal where there are
        several prompts.
        Raises RequestError before anything runs where a prompt or a parameter cannot be served.
        """
        return self._generate(
            _prompts(prompts), sampling_params, terms, progress, special_tokens=True
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
        progress: bool | None = None,
        **template_settings: Any,
    ) -> list[Answer]:
        """Answers to one conversation or to several; terms as for generate.

        template_settings: tools, documents, add_generation_prompt, continue_final_message,
        chat_template (the name of one of the model's templates), and variables of the template,
        by their names or in chat_template_kwargs. What the template does not know is refused.
        Each completion's `message` is its text read as the server reads it; the text has all the
        model wrote, marks of reasoning and calls included.
        Raises InvalidParameter, and TokenizerError without a usable template.
        """
        one = isinstance(messages, str) or (len(messages) > 0 and isinstance(messages[0], Mapping))
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        texts = [rendered(self._text, messages, template_settings) for messages in conversations]
        hearings = [hearing_of(self._text, text, template_settings) for text in texts]
        return self._generate(
            texts, sampling_params, terms, progress, special_tokens=False, hearings=hearings
        )

    def close(self) -> None:
        """Free the engine's threads and memory."""
        self._engine.end()
        self._fault = self._fault or Fault(kind="WorkerError", message="the LLM was closed")

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # a constructor that raised may not have got so far
            self._engine.send(Stop())

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        terms: Terms | Sequence[Terms] | None,
        progress: bool | None,
        *,
        special_tokens: bool,
        hearings: Sequence[Hearing] | None = None,
    ) -> list[Answer]:
        all_ids = [self._ids(prompt, special_tokens=special_tokens) for prompt in prompts]
        samplings = self._samplings(sampling_params, all_ids)
        given = DEFAULT_TERMS if terms is None else terms
        each = _one_each("terms", Terms, given, len(prompts))
        jobs = [
            _Job(
                prompt if isinstance(prompt, str) else None,
                make_requests(
                    self.card,
                    ids,
                    sampling,
                    request_id=self._streams.fresh_id("llm"),
                    arrival_ms=self._clock.now_ms(),
                    terms=of_prompt,
                    encoder=self._text.tokenizer,
                ),
                sampling,
                hearing,
            )
            for prompt, ids, sampling, of_prompt, hearing in zip(
                prompts,
                all_ids,
                samplings,
                each,
                [None] * len(prompts) if hearings is None else hearings,
                strict=True,
            )
        ]
        shown = progress if progress is not None else len(jobs) > 1 and sys.stderr.isatty()
        if not shown:
            for _ in self._finished(jobs):
                pass
        else:
            from rich.progress import track  # only where a bar is drawn

            for _ in track(self._finished(jobs), "generating", total=len(jobs)):
                pass
        return [job.answer() for job in jobs]

    def _until_ready(self) -> Ready:
        while True:
            message = self._inbox.get()
            if isinstance(message, Ready):
                return message
            if isinstance(message, Failed):
                raise error_of(message.fault)

    def _finished(self, jobs: Sequence[_Job]) -> Iterator[_Job]:
        """Run all jobs; yields each as it ends. Few more are handed in than can run at once."""
        waiting, streams = deque(jobs), self._streams
        try:
            while waiting or streams:
                while waiting and self._has_room_for(waiting[0]):
                    job = waiting.popleft()
                    tokenizer = self._text.tokenizer
                    streams.open(tokenizer, job.requests, job, job.text_rules(tokenizer))
                    self._engine.send(Submit(requests=job.requests))
                for job, delta in self._said(self._next_message()):
                    job.take(delta)
                    if job.is_done:
                        yield job
        finally:
            left = streams.close(request.request_id for job in jobs for request in job.requests)
            if left:
                self._engine.send(Abort(request_ids=left))

    def _said(self, message: FromEngine) -> list[tuple[_Job, TextDelta]]:
        """What a message says to whom. Raises where a request cannot be served at all; one that
        cannot be served in time ends with an error, and the others go on."""
        if isinstance(message, Outputs):
            said, past_end = self._streams.take(message)
            if past_end:
                self._engine.send(Abort(request_ids=past_end))
            return said
        if isinstance(message, Refused):
            error = error_of(message.fault)
            if isinstance(error, OverloadedError):
                return self._streams.refuse(message.request_ids, str(error))
            if self._streams.end(message.request_ids):
                raise error
        return []

    def _has_room_for(self, job: _Job) -> bool:
        """Whether to hand it in now; one that is larger than the room goes alone."""
        num_open = len(self._streams)
        return not num_open or num_open + len(job.requests) <= self._most_streams

    def _next_message(self) -> FromEngine:
        if self._fault is not None:
            raise error_of(self._fault)
        message = self._inbox.get()
        if isinstance(message, Failed):
            self._fault = message.fault
            raise error_of(message.fault)
        return message

    def _ids(self, prompt: Prompt, *, special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._text.tokenizer.encode(prompt, add_special_tokens=special_tokens)

    def _samplings(
        self,
        given: SamplingParams | Sequence[SamplingParams] | None,
        all_ids: Sequence[Sequence[int]],
    ) -> Sequence[SamplingParams]:
        if given is None:
            return [default_sampling(self.card, num_prompt_tokens=len(ids)) for ids in all_ids]
        return _one_each("sampling_params", SamplingParams, given, len(all_ids))


class AsyncLLM:
    """A model to call from an event loop: each call is an async generator of TextDeltas.

    Closing a generator aborts its request. Start it with `await start()` or `async with`; the
    first call starts it otherwise.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: Any) -> None:
        config = engine_config({"model": os.fspath(model), **settings})
        self._client = EngineClient.in_process(config)
        self._is_ready = False

    @property
    def client(self) -> EngineClient:
        """The engine's face: card, tokenizer, stats, health."""
        return self._client

    async def start(self) -> AsyncLLM:
        """Wait until the model is loaded. Raises SettingError, ModelError or CapacityError."""
        if not self._is_ready:
            await self._client.ready()
            self._is_ready = True
        return self

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        terms: Terms = DEFAULT_TERMS,
        request_id: str | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer to a prompt (text or token ids); n > 1 interleaves by `index`.

        terms: how urgent it is (quire.base.terms).
        """
        await self.start()
        ids = self._client.tokenizer.encode(prompt) if isinstance(prompt, str) else _listed(prompt)
        async with aclosing(self._stream(ids, sampling_params, terms, request_id)) as deltas:
            async for delta in deltas:
                yield delta

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        terms: Terms = DEFAULT_TERMS,
        request_id: str | None = None,
        **template_settings: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the answer to a conversation; template_settings as for LLM.chat.

        The text is all the model wrote, marks of reasoning and calls included: read it with
        quire.dialects.answer.AnswerParser, by `hearing_of` (quire.engine.hearing).
        """
        await self.start()
        text_side = TextSide(tokenizer=self._client.tokenizer, template=self._client.template)
        # A template is a stranger's program, and may take its time.
        text = await asyncio.to_thread(rendered, text_side, messages, template_settings)
        ids = self._client.tokenizer.encode(text, add_special_tokens=False)
        hearing = hearing_of(text_side, text, template_settings)
        rules = hearing.text_rules(text_side.tokenizer)
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
        terms: Terms,
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


class _Job:
    """One prompt on its way: its streams and what they said so far."""

    def __init__(
        self,
        prompt: str | None,
        requests: tuple[Request, ...],
        sampling: SamplingParams,
        hearing: Hearing | None,
    ) -> None:
        self.requests = requests
        self._prompt = prompt
        self._hearing = hearing
        self._ranking = Ranking(sampling, 0) if sampling.is_ranked else None
        self._deltas: tuple[list[TextDelta], ...] = tuple([] for _ in range(sampling.n))
        self._num_open = len(requests)
        self._prompt_logprobs: Sequence[TokenText | None] = ()

    @property
    def is_done(self) -> bool:
        """Whether all streams have ended."""
        return self._num_open == 0

    def text_rules(self, tokenizer: Tokenizer) -> TextRules:
        """What has to be seen of its answers."""
        return PLAIN_TEXT if self._hearing is None else self._hearing.text_rules(tokenizer)

    def take(self, delta: TextDelta) -> None:
        """Keep what a stream said."""
        for one in (delta,) if self._ranking is None else self._ranking.take(delta):
            self._deltas[one.index].append(one)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._num_open -= 1

    def answer(self) -> Answer:
        """All of it, once no stream is open."""
        return Answer(
            prompt=self._prompt,
            prompt_ids=tuple(self.requests[0].prompt_ids.tolist()),
            outputs=tuple(_completion(deltas, self._hearing) for deltas in self._deltas),
            prompt_logprobs=self._prompt_logprobs,
        )


def _with_room_for_any_request(config: EngineConfig) -> EngineConfig:
    """LLM itself counts what waits, and a request larger than that goes alone: none is refused."""
    room = max(config.scheduler.max_queued_requests, MAX_N)
    return replace(config, scheduler=replace(config.scheduler, max_queued_requests=room))


def _completion(deltas: Sequence[TextDelta], hearing: Hearing | None) -> Completion:
    last = deltas[-1]
    assert last.finish_reason is not None, "a finished stream says why"
    text = "".join(delta.text for delta in deltas)
    return Completion(
        index=last.index,
        text=text,
        token_ids=tuple(id_ for delta in deltas for id_ in delta.token_ids),
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        seed=last.seed,
        cached_tokens=last.cached_tokens,
        cache_use=last.cache_use,
        error=last.error,
        score=last.score,
        message=None if hearing is None else hearing.message(text),
    )


def _one_each(name: str, kind: type[_Kind], given: object, num_prompts: int) -> Sequence[_Kind]:
    """What was given for all prompts or for each, for each."""
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise InvalidParameter(
            f"{name} is {show(given)}; a {kind.__name__} for all prompts or a list of one each is "
            "allowed",
            param=name,
        )
    if len(given) != num_prompts:
        raise InvalidParameter(
            f"{len(given)} {name} for {num_prompts} prompts; give one for all or one each",
            param=name,
        )
    return given


def _prompts(given: object) -> Sequence[Prompt]:
    """One prompt or several, as several."""
    if isinstance(given, str):
        return [given]
    entries = list(_listed(given))
    if entries and isinstance(entries[0], Integral):
        return [cast("Sequence[int]", given)]
    return [_prompt(entry) for entry in entries]


def _prompt(given: object) -> Prompt:
    return given if isinstance(given, str) else _listed(given)


def _listed(given: object) -> Sequence[Any]:
    """A list of whatever, or an array. Raises InvalidParameter for what a prompt cannot be."""
    is_listed = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if not is_listed or isinstance(given, str | bytes | bytearray | Mapping):
        raise InvalidParameter(
            f"prompt is {show(given)}; a text, a list of token ids, or a list of these is allowed",
            param="prompt",
        )
    return cast("Sequence[Any]", given)
