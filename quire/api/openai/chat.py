"""POST /v1/chat/completions: messages, rendered by the model's own template, answered.

conversations.py checks and renders what is asked; spoken.py reads reasoning and tool calls out of
answers. With continue_final_message an answer is what comes after the last message's words, without
them. Without max_tokens (or max_completion_tokens) an answer may take the rest of the context.
Always holds: reasoning, content and calls are all the model said, but for the marks between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.choice_streams import Choice, Prompt, Usage
from quire.api.generation.conversation import rendered
from quire.api.generation.fields import CHAT, flag
from quire.api.generation.generate import (
    Envelope,
    GenerationJob,
    GenerationRequest,
    generate,
    usage_json,
)
from quire.api.generation.output_constraints import output_grammar
from quire.api.generation.prompts import encode, most_tokens
from quire.api.generation.sampling_fields import limited, sampling_of
from quire.api.generation.tools import offer_of
from quire.api.openai.chat_output import ChatOutputParser, ChoiceOutputParser
from quire.api.openai.logprobs import chat_logprobs, check_told, prompt_logprobs
from quire.api.server_state import ServerState
from quire.api.streaming.sse import speeds_json
from quire.base.errors import InvalidParameter
from quire.base.parameter_checks import whole
from quire.base.sampling_params import MAX_TOP_LOGPROBS
from quire.base.show import show
from quire.engine.client.request_builder import default_sampling
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText
from quire.output_parsers.registry import select_parsers
from quire.output_parsers.tools import Tools


class ChatRoute:
    """The route."""

    def __init__(self, serving: ServerState) -> None:
        self._serving = serving

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        return await generate(
            self._serving, request, honoured=CHAT, prefix="chatcmpl", read=read_job
        )


async def read_job(asked: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    given, engine = asked.given, asked.engine
    wants_logprobs = flag(given, "logprobs")
    num_top = _num_top(given, wants_logprobs=wants_logprobs)
    fields = {**given, **_max_tokens(given)}
    sampling = sampling_of(fields, engine.default_sampling(), logprobs=num_top)
    offer = offer_of(given)
    conversation = await rendered(asked.request, offer)
    text = conversation.text
    reading = select_parsers(
        conversation.template,
        tool_parser=asked.config.tool_call_parser,
        reasoning_parser=asked.config.reasoning_parser,
    )
    held, reading = output_grammar(
        sampling.structured_outputs, offer, reading, conversation, engine.tokenizer
    )
    sampling = replace(sampling, structured_outputs=held)
    may_call = conversation.shows_tools and reading.tools is not None
    listener = ChatOutputParser(
        reading,
        Tools(offer.schemas) if may_call else None,
        prompt=text,
        request_id=asked.envelope.id,
        tells_reasoning=flag(given, "include_reasoning", default=True),
    )
    adds_special = flag(given, "add_special_tokens")
    token_ids = await encode(
        asked.request,
        text,
        add_special_tokens=adds_special,
        least_output=int(sampling.max_tokens != 0),
        keep_tokens=most_tokens(given, engine, sampling.max_tokens),
        param="messages",
    )
    if sampling.prompt_logprobs is not None:
        num_told = len(token_ids) * (1 + sampling.prompt_logprobs)
        check_told(num_told, param="prompt_logprobs")
    room_tokens = engine.card.max_model_len - len(token_ids)
    default = default_sampling(engine.card, num_prompt_tokens=len(token_ids)).max_tokens
    chosen = limited(
        sampling,
        default_tokens=room_tokens if default is None else default,
        room_tokens=room_tokens,
        cap_tokens=asked.config.max_output_tokens,
    )
    writer = ChatWriter(
        asked.envelope,
        listener,
        wants_logprobs=wants_logprobs,
        num_prompt_top=chosen.prompt_logprobs,
        told_ids=token_ids if flag(given, "return_token_ids") else None,
        include_usage=asked.include_usage,
    )
    prompt = Prompt(
        token_ids=token_ids, sampling=chosen, text_rules=listener.text_rules(engine.tokenizer)
    )
    return GenerationJob(prompts=[prompt], writer=writer)


class ChatWriter:
    """`chat.completion` objects and `chat.completion.chunk` objects. For one answer.

    told_ids: of the prompt, where ids are told.
    """

    def __init__(
        self,
        envelope: Envelope,
        listener: ChatOutputParser,
        *,
        wants_logprobs: bool,
        num_prompt_top: int | None,
        told_ids: Sequence[int] | None,
        include_usage: bool,
    ) -> None:
        self._envelope = envelope
        self._wants_logprobs = wants_logprobs
        self._num_prompt_top = num_prompt_top
        self._told_ids = told_ids
        self._include_usage = include_usage
        self._listener = listener
        self._heard: dict[int, ChoiceOutputParser] = {}

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        written = [self._choice(index, choice) for index, choice in enumerate(choices[0])]
        return {
            **self._frame("chat.completion"),
            "choices": written,
            "usage": self.usage(usage),
            **speeds_json(usage),
            **self._of_prompt(choices[0][0].prompt_logprobs, begins=True),
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The role before a choice's first text, the text, and the finish reason after its last."""
        heard = self._heard.get(delta.index)
        if heard is None:
            begins = not self._heard
            heard = self._heard[delta.index] = self._listener.choice(delta.index)
            role = {"role": "assistant", "content": "", "refusal": None}
            told = self._of_prompt(delta.prompt_logprobs, begins=begins)
            yield {**self._chunk(delta.index, role), **told}
        ends = delta.finish_reason is not None
        said = heard.deltas(delta.text, delta.token_chars, ends=ends)
        logprobs = self._logprobs(delta.logprobs) if delta.text or delta.logprobs else None
        ids = self._ids(delta.token_ids)
        for part in said or ([{"content": ""}] if delta.logprobs or ids.get("token_ids") else []):
            yield self._chunk(delta.index, part, logprobs=logprobs, **ids)
            logprobs, ids = None, self._ids(())
        if delta.finish_reason is not None:
            yield self._chunk(
                delta.index,
                {},
                finish_reason=heard.finish_reason(delta.finish_reason),
                stop_reason=delta.stop_reason,
                seed=delta.seed,
                **self._ids(()),
            )

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """The chunk of more text of a choice that has begun; None where others tell more, or the
        text is read for reasoning or calls."""
        if self._listener.listens or self._wants_logprobs or self._told_ids is not None:
            return None
        return self._chunk(index, {"content": text})

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """Return the last chunk, with usage and timings where they were asked for."""
        included = {"usage": self.usage(usage)} if self._include_usage else {}
        told = {**included, **speeds_json(usage)}
        return {**self._frame("chat.completion.chunk"), "choices": [], **told} if told else None

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        heard = self._heard[index] = self._listener.choice(index)
        return {
            "index": index,
            "message": heard.message(choice.text, choice.token_chars),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": heard.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
            **self._ids(choice.token_ids),
        }

    def frame(self) -> dict[str, Any]:
        """Return the fields that every chunk has, without its choices."""
        return self._frame("chat.completion.chunk")

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the counts so far; with tokens of reasoning where answers are parsed for it."""
        if not self._listener.listens:
            return usage_json(usage)
        reasoned = sum(heard.reasoning_tokens for heard in self._heard.values())
        return usage_json(usage, reasoning_tokens=reasoned)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **more,
        }
        chunk = {**self._frame("chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _frame(self, kind: str) -> dict[str, Any]:
        envelope = self._envelope
        return {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created_s,
            "model": envelope.model,
            "system_fingerprint": envelope.fingerprint,
        }

    def _of_prompt(self, tokens: Sequence[TokenText | None], *, begins: bool) -> dict[str, Any]:
        """What is told of the prompt: once, beside the choices, where it was asked for.

        begins: nothing was told of this answer before.
        """
        told: dict[str, Any] = {}
        if begins and self._told_ids is not None:
            told["prompt_token_ids"] = self._told_ids
        if tokens and self._num_prompt_top is not None:
            told["prompt_logprobs"] = prompt_logprobs(tokens, self._num_prompt_top)
        return told

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The ids of an answer's tokens, where they are told."""
        return {} if self._told_ids is None else {"token_ids": token_ids}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return chat_logprobs(tokens) if self._wants_logprobs else None


def _max_tokens(given: Mapping[str, Any]) -> dict[str, Any]:
    """max_tokens under its newer name; both may be given if they agree."""
    newer = given.get("max_completion_tokens")
    if newer is None:
        return {}
    if given.get("max_tokens", newer) != newer:
        raise InvalidParameter(
            f"max_completion_tokens is {show(newer)} and max_tokens is "
            f"{show(given['max_tokens'])}; they mean the same: give one",
            param="max_completion_tokens",
        )
    least = 0 if "prompt_logprobs" in given else 1
    return {"max_tokens": whole("max_completion_tokens", newer, least, 2**31 - 1)}


def _num_top(given: Mapping[str, Any], *, wants_logprobs: bool) -> int | None:
    """How many alternatives a token gets; None for no log-probabilities at all."""
    num_top = given.get("top_logprobs")
    if num_top is None:
        return 0 if wants_logprobs else None
    whole = isinstance(num_top, int) and not isinstance(num_top, bool)
    if not whole or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise InvalidParameter(
            f"top_logprobs is {show(num_top)}; a whole number from 0 to {MAX_TOP_LOGPROBS} is "
            "allowed",
            param="top_logprobs",
        )
    if not wants_logprobs and num_top > 0:
        raise InvalidParameter(
            f"top_logprobs is {num_top} without logprobs: true; add it", param="top_logprobs"
        )
    return num_top if wants_logprobs else None
