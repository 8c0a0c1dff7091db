"""LLM: the engine inside a Python program, in one process.

    llm = LLM("path/to/model", max_num_seqs=32)
    for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=50)):
        print(answer.text)

The engine runs in a thread of this process; calls wait until all is done, and may be interrupted.
It uses the classes the server uses, so it gives the server's tokens.
"""

from __future__ import annotations

import os
import queue
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from quire.base.clock import Clock
from quire.base.errors import InvalidParameter, OverloadedError
from quire.base.gguf_open import gguf_read_once
from quire.base.sampling_checks import MAX_N
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.config.flags import engine_config, in_keywords, keywords_in_errors
from quire.config.groups import EngineConfig
from quire.engine.client.open_streams import OpenStreams
from quire.engine.client.pooling_checks import pooling_of
from quire.engine.client.request_builder import default_sampling, make_requests
from quire.engine.client.thread_link import EngineThread
from quire.engine.client.tokenizer_side import load_tokenizer_side, rendered
from quire.engine.library.answers import Answer, Embedding, GenerateCall, check_any_succeeded
from quire.engine.library.prompts import (
    Message,
    Prompt,
    misplaced,
    misplaced_sampling,
    one_each,
    prompts_of,
)
from quire.engine.output.answer_parser import AnswerReading, answer_reading_of
from quire.engine.output.embedding import checked_dimensions, pooling_params, prompt_text
from quire.engine.output.output_stream import TextDelta
from quire.engine.process.messages import (
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
from quire.hub.cache import with_local_model

# Methods that vLLM's class has.
_INSTEAD = {
    "beam_search": "use generate with SamplingParams(use_beam_search=True, best_of=...)",
    "score": "compare vectors of embed; for log-probabilities of texts use generate with "
    "SamplingParams(prompt_logprobs=0, max_tokens=0)",
    "get_default_sampling_params": "use default_sampling",
    "encode": "use embed",
    "classify": "classifiers are not supported; use generate with logprob_token_ids",
}


class LLM:
    """A model to call. `settings` are the server's flags with underscores (max_num_seqs=8).

    model: its directory; empty for the built-in model. Raises SettingError, ModelError or
    CapacityError. Not to be called from several threads at once. `memory_text` is the sum that
    led to the size of the KV cache.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **settings: Any) -> None:
        with keywords_in_errors():
            self._start(with_local_model(engine_config({"model": model, **settings})))

    def _start(self, config: EngineConfig) -> None:
        config.check_one_engine()
        self._clock = Clock()
        self._inbox: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self._engine = EngineThread(_with_room_for_any_request(config), self._inbox.put)
        self._fault: Fault | None = None
        self._streams: OpenStreams[GenerateCall] = OpenStreams()
        try:
            with gguf_read_once():  # by the engine's thread too
                self._text = load_tokenizer_side(config.model)
                ready = self._until_ready()
        except BaseException:
            self._engine.end()
            raise
        self.card = ready.card
        # Enough to fill a step and to have the next ones ready.
        self._max_streams = min(
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
        terms: SchedulingParams | Sequence[SchedulingParams] | None = None,
        progress: bool | None = None,
        **unknown: Any,
    ) -> list[Answer]:
        """Answers to the prompts, in their order. A prompt is text or a list of token ids.

        sampling_params: one for all, or one each; None takes the model's defaults. To score texts
        and generate nothing: SamplingParams(prompt_logprobs=0, max_tokens=0), and read each
        answer's prompt_logprobs. terms: how urgent it is (quire.base.scheduling_params), one for
        all or one each. progress: a bar on standard error; None shows one on a terminal where
        there are several prompts.
        Raises RequestError before anything runs where a prompt or a parameter cannot be served.
        A prompt that fails later has its reason in `outputs[0].error`, with finish_reason "error";
        raises StepRowError where all fail without a token.
        """
        if unknown:
            raise misplaced("LLM.generate", unknown)
        return self._generate(
            prompts_of(prompts), sampling_params, terms, progress, special_tokens=True
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: SchedulingParams | Sequence[SchedulingParams] | None = None,
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
        misplaced_sampling("LLM.chat", template_settings)
        one = isinstance(messages, str) or (len(messages) > 0 and isinstance(messages[0], Mapping))
        conversations = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        texts = [rendered(self._text, messages, template_settings) for messages in conversations]
        readings = [answer_reading_of(self._text, text, template_settings) for text in texts]
        return self._generate(
            texts, sampling_params, terms, progress, special_tokens=False, readings=readings
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        terms: SchedulingParams | Sequence[SchedulingParams] | None = None,
        progress: bool | None = None,
    ) -> list[Embedding]:
        """Return vectors of the prompts, in their order. A prompt is text or a list of token ids.

        dimensions: keep the first so many numbers, where the model allows it. prompt_name: of the
        model's prompts, which precedes each text; None: its default, "": none. Raises RequestError
        where the model makes no embeddings, or a prompt or an argument cannot be served.
        """
        try:
            pooling = pooling_of(self.card)
            size = checked_dimensions(dimensions, pooling, self.card.name)
        except InvalidParameter as error:  # it names the server's flags
            raise InvalidParameter(in_keywords(str(error)), param=error.param) from None
        before = prompt_text(prompt_name, pooling)
        texts = [before + one if isinstance(one, str) else one for one in prompts_of(prompts)]
        jobs = self._jobs(texts, pooling_params(pooling), terms, special_tokens=True)
        self._run(jobs, progress, "embedding")
        return [job.embedding(pooling, size) for job in jobs]

    def close(self) -> None:
        """Free the engine's threads and memory."""
        self._engine.end()
        self._fault = self._fault or Fault(
            kind="WorkerError", message="the LLM was closed; make a new one"
        )

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # a constructor that raised may not have got so far
            self._engine.send(Stop())

    if not TYPE_CHECKING:  # a type checker knows all methods

        def __getattr__(self, name: str) -> NoReturn:
            """Name what there is where a method of vLLM's LLM is looked for."""
            advice = _INSTEAD.get(name, "it has generate, chat and embed")
            raise AttributeError(f"LLM has no attribute {name!r}; {advice}")

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
        terms: SchedulingParams | Sequence[SchedulingParams] | None,
        progress: bool | None,
        *,
        special_tokens: bool,
        readings: Sequence[AnswerReading] | None = None,
    ) -> list[Answer]:
        jobs = self._jobs(
            prompts, sampling_params, terms, special_tokens=special_tokens, readings=readings
        )
        self._run(jobs, progress, "generating")
        answers = [job.answer() for job in jobs]
        check_any_succeeded(answers)
        return answers

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        terms: SchedulingParams | Sequence[SchedulingParams] | None,
        *,
        special_tokens: bool,
        readings: Sequence[AnswerReading] | None = None,
    ) -> list[GenerateCall]:
        """Return a call for each prompt. Raises RequestError."""
        all_ids = [self._ids(prompt, special_tokens=special_tokens) for prompt in prompts]
        samplings = self._samplings(sampling_params, all_ids)
        given = DEFAULT_SCHEDULING if terms is None else terms
        each = one_each("terms", SchedulingParams, given, len(prompts))
        return [
            GenerateCall(
                prompt if isinstance(prompt, str) else None,
                make_requests(
                    self.card,
                    ids,
                    sampling,
                    request_id=self._streams.fresh_id("llm"),
                    arrival_ms=self._clock.now_ms(),
                    terms=of_prompt,
                    encoder=self._text.tokenizer,
                    shown_ids=reading.text_rules(self._text.tokenizer).shown_ids if reading else (),
                ),
                sampling,
                reading,
            )
            for prompt, ids, sampling, of_prompt, reading in zip(
                prompts,
                all_ids,
                samplings,
                each,
                [None] * len(prompts) if readings is None else readings,
                strict=True,
            )
        ]

    def _run(self, jobs: Sequence[GenerateCall], progress: bool | None, doing: str) -> None:
        """Run all jobs, with a bar where that is wanted."""
        shown = progress if progress is not None else len(jobs) > 1 and sys.stderr.isatty()
        if not shown:
            for _ in self._finished(jobs):
                pass
        else:
            from rich.progress import track  # only where a bar is drawn

            for _ in track(self._finished(jobs), doing, total=len(jobs)):
                pass

    def _until_ready(self) -> Ready:
        while True:
            message = self._inbox.get()
            if isinstance(message, Ready):
                return message
            if isinstance(message, Failed):
                raise error_of(message.fault)

    def _finished(self, jobs: Sequence[GenerateCall]) -> Iterator[GenerateCall]:
        """Run all jobs; yields each as it ends. Few more are handed in than can run at once."""
        waiting, streams = deque(jobs), self._streams
        try:
            while waiting or streams:
                while waiting and self._has_room_for(waiting[0]):
                    job = waiting.popleft()
                    tokenizer = self._text.tokenizer
                    streams.open(tokenizer, job.requests, job, job.text_rules(tokenizer))
                    self._engine.send(Submit(requests=job.requests))
                for job, delta in self._deltas_of(self._next_message()):
                    job.take(delta)
                    if job.is_done:
                        yield job
        finally:
            left = streams.close(request.request_id for job in jobs for request in job.requests)
            if left:
                self._engine.send(Abort(request_ids=left))

    def _deltas_of(self, message: FromEngine) -> list[tuple[GenerateCall, TextDelta]]:
        """Return each call's deltas of a message.

        Raises where a request cannot be served at all; one that cannot be served in time ends with
        an error delta, and the others go on.
        """
        if isinstance(message, Outputs):
            deltas, past_end = self._streams.take(message)
            if past_end:
                self._engine.send(Abort(request_ids=past_end))
            return deltas
        if isinstance(message, Refused):
            error = error_of(message.fault)
            if isinstance(error, OverloadedError):
                return self._streams.refuse(message.request_ids, str(error))
            if self._streams.end(message.request_ids):
                raise error
        return []

    def _has_room_for(self, job: GenerateCall) -> bool:
        """Return whether to hand it in now; one that is larger than the room goes alone."""
        num_open = len(self._streams)
        return not num_open or num_open + len(job.requests) <= self._max_streams

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
        return one_each("sampling_params", SamplingParams, given, len(all_ids))


def _with_room_for_any_request(config: EngineConfig) -> EngineConfig:
    """LLM itself counts what waits, and a request larger than that goes alone: none is refused."""
    room = max(config.scheduler.max_queued_requests, MAX_N)
    return replace(config, scheduler=replace(config.scheduler, max_queued_requests=room))
