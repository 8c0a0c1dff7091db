"""POST /v1/messages: answer a conversation in the form of Anthropic's Messages API.

The prompt, the parameters and so the tokens are those of the same chat at /v1/chat/completions.
max_tokens may exceed the room of the context: the answer then ends where the context is full, with
the stop reason "model_context_window_exceeded". With max_tokens: 0 only the prompt is computed, so
that it is cached.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.anthropic.cache_breakpoints import pins_of
from quire.api.anthropic.count_tokens import CountTokensRoute
from quire.api.anthropic.dialect import ANTHROPIC
from quire.api.anthropic.fields import MESSAGES, QUERY_PARAMS
from quire.api.anthropic.message_writer import BATCH, STANDARD, MessageWriter
from quire.api.anthropic.request import (
    as_named_here,
    budget_of,
    check_metadata,
    hides_thinking,
    read_prompt,
    sampling_fields,
    wants_logprobs,
)
from quire.api.generation.choice_streams import Prompt
from quire.api.generation.conversation import parsing_of
from quire.api.generation.fields import flag, sampling_of
from quire.api.generation.generate import (
    BACKGROUND,
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    generate,
)
from quire.api.generation.request_context import encode
from quire.api.server_state import ServerState
from quire.base.rare_records import CachePin
from quire.engine.output.output_stream import PLAIN_TEXT

CALL_PREFIX = "toolu_"


def messages_routes(server_state: ServerState) -> list[Route]:
    """Return the routes of this API."""
    messages, count = MessagesRoute(server_state), CountTokensRoute(server_state)
    return [
        Route("/v1/messages", messages.post, methods=["POST"]),
        Route("/v1/messages/count_tokens", count.post, methods=["POST"]),
    ]


class MessagesRoute:
    """The route."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state
        self._route, self._batch_route = (
            GenerationRoute(
                honoured=MESSAGES,
                id_prefix="msg_",
                read=partial(read_job, tier=tier),
                dialect=ANTHROPIC,
                query_params=QUERY_PARAMS,
                as_named_here=as_named_here,
            )
            for tier in (STANDARD, BATCH)
        )

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        route = self._batch_route if BACKGROUND in request.scope else self._route
        return await generate(self._server_state, request, route)


async def read_job(request: GenerationRequest, *, tier: str) -> GenerationJob:
    """Check all fields. tier: of the usage. Raises RequestError naming the field."""
    given, engine = request.given, request.engine
    check_metadata(given)
    sampling = sampling_of(
        sampling_fields(given),
        engine.default_sampling(),
        logprobs=0 if wants_logprobs(given) else None,
        tokenizer=engine.tokenizer,
    )
    prompt = await read_prompt(request.context)
    sampling, parser = parsing_of(
        request.context,
        prompt.offer,
        prompt.conversation,
        sampling,
        includes_reasoning=flag(given, "include_reasoning", default=True),
        call_prefix=CALL_PREFIX,
        budget=budget_of(given),
    )
    token_ids = await encode(
        request.context,
        prompt.conversation.text,
        add_special_tokens=flag(given, "add_special_tokens"),
        min_output=int(sampling.max_tokens != 0),
        param="messages",
    )
    sampling = request.limited(sampling, len(token_ids), default_tokens=None)
    room_tokens = engine.card.max_model_len - len(token_ids)
    asked_tokens = sampling.max_tokens or room_tokens
    fills_context = asked_tokens > room_tokens >= sampling.min_tokens
    if fills_context:
        sampling = replace(sampling, max_tokens=room_tokens)
    text_rules = PLAIN_TEXT if parser is None else parser.text_rules(engine.tokenizer)
    writer = MessageWriter(
        request.envelope,
        parser,
        fills_context=fills_context,
        hides_thinking=hides_thinking(given),
        tier=tier,
    )
    points, conversation = prompt.breakpoints, prompt.conversation
    pins: tuple[CachePin, ...] = ()
    if points:
        pins = await pins_of(request.context, prompt.fields, conversation, points, token_ids)
    return GenerationJob(
        prompts=[Prompt(token_ids=token_ids, sampling=sampling, text_rules=text_rules)],
        writer=writer,
        cache_pins=pins,
    )
