"""POST /v1/chat/completions: render messages with the model's template and answer them.

chat_output.py parses reasoning and tool calls out of answers; a chat without either does not use
it. With continue_final_message an answer continues the last message without repeating it. Without
max_tokens (or max_completion_tokens) an answer may use the rest of the context. Always holds:
reasoning, content and calls are all of the model's text except the markers between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.api.generation.answer_json import (
    check_prompt_numbers,
    prompt_logprobs,
    refuse_streamed_prompt,
    speeds_json,
    usage_json,
)
from quire.api.generation.chat_output import ChatOutputParser, ChoiceOutputParser
from quire.api.generation.choice_streams import Choice, Prompt
from quire.api.generation.conversation import conversation_fields, parsing_of, rendered
from quire.api.generation.fields import CHAT, flag, sampling_of
from quire.api.generation.generate import (
    ChunkWriter,
    Envelope,
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    StreamOptions,
)
from quire.api.generation.request_context import encode
from quire.api.generation.thinking_budget import budget_of
from quire.api.generation.tools import TOOL_FIELDS, offer_of
from quire.api.generation.truncation import TRUNCATION, kept_tokens
from quire.api.generation.usage import Usage
from quire.api.openai import chat_fields
from quire.api.openai.chat_output import (
    NOT_SAID,
    delta_of,
    echoed_text,
    finish_reason_of,
    message_of,
)
from quire.api.openai.dialect import OPENAI
from quire.api.openai.logprobs import chat_logprobs
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.engine.client.request_builder import default_max_tokens
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta
from quire.engine.output.token_text import TokenText

# Attributes of a whole answer that clients read, whether they were requested or not.
NOT_OF_ALL: Mapping[str, None] = {"prompt_logprobs": None, "kv_transfer_params": None}


async def read_job(request: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    given, engine = request.given, request.engine
    num_top = None if chat_fields.LOGPROBS.isdisjoint(given) else chat_fields.num_top_of(given)
    fields = given
    if "max_completion_tokens" in given or given.get("max_tokens") == chat_fields.NO_LIMIT:
        fields = {**given, **chat_fields.max_tokens_of(given)}
    sampling = sampling_of(
        fields, engine.default_sampling(), logprobs=num_top, tokenizer=engine.tokenizer
    )
    offer = None if TOOL_FIELDS.isdisjoint(given) else offer_of(given)
    asked = conversation_fields(request.context, offer)
    conversation = await rendered(request.context, asked)
    sampling, parser = parsing_of(
        request.context,
        offer,
        conversation,
        sampling,
        includes_reasoning=flag(given, "include_reasoning", default=True),
        budget=budget_of(given) if "thinking_token_budget" in given else None,
    )
    token_ids = await encode(
        request.context,
        conversation.text,
        add_special_tokens=flag(given, "add_special_tokens"),
        min_output=int(sampling.max_tokens != 0),
        keep_tokens=(
            kept_tokens(given, engine, sampling.max_tokens) if TRUNCATION & given.keys() else None
        ),
        param="messages",
    )
    if sampling.prompt_logprobs is not None:
        refuse_streamed_prompt(sampling.prompt_logprobs, stream=flag(given, "stream"))
        num_numbers = len(token_ids) * (1 + max(sampling.prompt_logprobs, 0))
        check_prompt_numbers(num_numbers, param="prompt_logprobs")
    default = default_max_tokens(engine.card, len(token_ids))
    sampling = request.limited(sampling, len(token_ids), default_tokens=default)
    returned = chat_fields.ReturnedFields(
        logprobs=num_top is not None,
        all_logprobs=sampling.logprobs == ALL_LOGPROBS,
        num_prompt_top=sampling.prompt_logprobs,
        prompt_ids=token_ids if flag(given, "return_token_ids") else None,
        names_ids=flag(given, "return_tokens_as_token_ids"),
        num_choices=sampling.n,
        labels={} if chat_fields.LABELS.isdisjoint(given) else chat_fields.echoed_fields(given),
        echo=echoed_text(asked.messages) if flag(given, "echo") else "",
    )
    text_rules = PLAIN_TEXT if parser is None else parser.text_rules(engine.tokenizer)
    prompt = Prompt(token_ids=token_ids, sampling=sampling, text_rules=text_rules)
    writer = ChatWriter(request.envelope, parser, returned, request.stream_options)
    return GenerationJob(prompts=[prompt], writer=writer)


ROUTE = GenerationRoute(honoured=CHAT, id_prefix="chatcmpl-", read=read_job, dialect=OPENAI)


class ChatWriter(ChunkWriter):
    """Write one answer as a `chat.completion` or as `chat.completion.chunk` objects.

    parser: None if answers have neither reasoning nor calls.
    """

    def __init__(
        self,
        envelope: Envelope,
        parser: ChatOutputParser | None,
        returned: chat_fields.ReturnedFields,
        options: StreamOptions,
    ) -> None:
        labels = {name: returned.labels[name] for name in returned.labels if name != "metadata"}
        super().__init__({**envelope.frame("chat.completion.chunk"), **labels}, options)
        self._envelope = envelope
        self._parser = parser
        self._returned = returned
        self._begun: dict[int, ChoiceOutputParser | None] = {}

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        written = [self._choice(index, choice) for index, choice in enumerate(choices[0])]
        return {
            **self._envelope.frame("chat.completion"),
            **self._returned.labels,
            "choices": written,
            "usage": self._usage(usage),
            **speeds_json(usage),
            **NOT_OF_ALL,
            **self._prompt_fields(choices[0][0].prompt_logprobs, begins=True),
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the roles of all choices before the first text, the text, last the reason."""
        if not self._begun:
            yield from self._begin(delta)
        elif delta.prompt_logprobs:
            more = self._prompt_fields(delta.prompt_logprobs, begins=False)
            yield {**self._chunk(delta.index, {}), **more}
        parser, reason = self._begun[delta.index], delta.finish_reason
        if parser is None:
            parts = [{"content": delta.text}] if delta.text else []
        else:
            pieces = parser.pieces(delta.text, delta.token_chars, ends=reason is not None)
            parts = [delta_of(piece, parser) for piece in pieces]
        logprobs = self._logprobs(delta.logprobs) if delta.text or delta.logprobs else None
        ids = self._ids(delta.token_ids)
        for part in parts or ([{"content": ""}] if delta.logprobs or ids.get("token_ids") else []):
            yield self._chunk(delta.index, part, logprobs=logprobs, **ids)
            logprobs, ids = None, self._ids(())
        if reason is not None:
            yield self._chunk(
                delta.index,
                {},
                finish_reason=reason if parser is None else finish_reason_of(reason, parser),
                stop_reason=delta.stop_reason,
                seed=delta.seed,
                **self._ids(()),
            )

    def _begin(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the first chunk of each choice in their order, which OpenAI's client relies on."""
        seed = {} if self._returned.prompt_ids is None else dict[str, Any](seed=delta.seed)
        more = self._prompt_fields(delta.prompt_logprobs, begins=True)
        for index in range(self._returned.num_choices):
            self._begun[index] = None if self._parser is None else self._parser.choice(index)
            role = {"role": "assistant", "content": "", "refusal": None}
            yield {**self._chunk(index, role, **seed), **more}
            if self._returned.echo:
                yield self._chunk(index, {"content": self._returned.echo})
            more = {}

    def of_text(self, prompt: int, index: int, text: str) -> dict[str, Any] | None:
        """Return the chunk of more text; None if chunks have more fields, or text is parsed."""
        returned = self._returned
        if self._parser is not None or returned.logprobs or returned.prompt_ids is not None:
            return None
        return self._chunk(index, {"content": text})

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, **NOT_SAID}
        reason: str | None = choice.finish_reason
        if self._parser is not None:
            parser = self._begun[index] = self._parser.choice(index)
            message = message_of(parser.whole(choice.text, choice.token_chars), parser)
            reason = finish_reason_of(choice.finish_reason, parser)
        if self._returned.echo:
            message["content"] = self._returned.echo + (message["content"] or "")
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs, parted=self._returned.all_logprobs),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            "seed": choice.seed,
            **self._ids(choice.token_ids),
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return the counts so far, with reasoning tokens if answers are parsed for reasoning."""
        if self._parser is None:
            return usage_json(usage)
        parsers = [parser for parser in self._begun.values() if parser is not None]
        return usage_json(usage, reasoning_tokens=sum(one.reasoning_tokens for one in parsers))

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
        chunk = {**self._frame, "choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _prompt_fields(self, tokens: Sequence[TokenText | None], *, begins: bool) -> dict[str, Any]:
        """Return the requested fields of the prompt, which an answer has once.

        begins: this is the first chunk, or the whole answer.
        """
        returned, fields = self._returned, dict[str, Any]()
        if begins and returned.prompt_ids is not None:
            fields["prompt_token_ids"] = returned.prompt_ids
        if tokens and returned.num_prompt_top is not None:
            fields["prompt_logprobs"] = prompt_logprobs(tokens, returned.num_prompt_top)
        return fields

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {} if self._returned.prompt_ids is None else {"token_ids": token_ids}

    def _logprobs(
        self, tokens: Sequence[TokenText], *, parted: bool = False
    ) -> dict[str, Any] | None:
        if not self._returned.logprobs:
            return None
        return chat_logprobs(tokens, names_ids=self._returned.names_ids, parted=parted)
