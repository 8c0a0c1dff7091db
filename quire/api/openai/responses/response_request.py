"""One request for a response: its fields as a generation job, and the response to be stored.

Always holds: nothing is stored of a request that failed before its answer was complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.choice_streams import ChoiceStreams, Prompt
from quire.api.generation.conversation import parsing_of
from quire.api.generation.fields import flag, sampling_of
from quire.api.generation.generate import GenerationJob, GenerationRequest
from quire.api.generation.thinking_budget import budget_of
from quire.api.http.errors import SHAPES, Aborted
from quire.api.openai.metadata import checked_metadata
from quire.api.openai.responses.background import (
    BackgroundEvents,
    BackgroundResponse,
    QueuedResponse,
)
from quire.api.openai.responses.conversation_input import read_input
from quire.api.openai.responses.conversations import Conversations
from quire.api.openai.responses.dialect import ResponsesDialect
from quire.api.openai.responses.fields import ENCRYPTED, LOGPROBS
from quire.api.openai.responses.input_items import Item
from quire.api.openai.responses.namespaces import names_of
from quire.api.openai.responses.prompt import PromptMaker
from quire.api.openai.responses.request import (
    check_continuation,
    check_stream_options,
    check_text,
    echoed_fields,
    included,
    includes_reasoning,
    num_top,
    reasoning_of,
    sampling_fields,
    text_of,
)
from quire.api.openai.responses.response_writer import ResponseWriter
from quire.api.openai.responses.store import ResponseStore, StoredResponse, StoreError
from quire.api.openai.responses.stored_items import with_ids, without_encrypted_content
from quire.api.openai.responses.tool_fields import tool_offer, tools_of
from quire.api.server_state import ServerState
from quire.api.streaming.resumable_stream import FollowStream
from quire.base.errors import InvalidParameter, OverloadedError, RequestError
from quire.base.sampling_params import SamplingParams
from quire.engine.client.request_builder import default_max_tokens
from quire.engine.output.output_stream import PLAIN_TEXT


class ResponseRequest:
    """See the top of this file. The response is stored under the key of `request`."""

    def __init__(
        self,
        server_state: ServerState,
        store: ResponseStore,
        conversations: Conversations,
        request: Request,
    ) -> None:
        self.dialect = ResponsesDialect(self.fail)
        self.is_background = False
        self._server_state = server_state
        self._store, self._conversations = store, conversations
        self._request = request
        self._key: bytes = request.state.key
        self._writer: ResponseWriter | None = None
        self._items: list[Item] = []  # of its own input
        self._stores = self._keeps_encrypted_content = False
        self._conversation_id: str | None = None  # until its items are added

    def fail(self, error: dict[str, Any]) -> dict[str, Any] | None:
        """Return the response after the error that ended its stream."""
        if self._writer is None:
            return None
        if self.is_background and error["code"] == SHAPES[Aborted].code:
            self._writer.cancel()
            return None
        return self._writer.fail(error)

    async def save(self) -> None:
        """Store the response if it has ended, or is a background response.

        A failure is logged: the client has the answer.
        """
        if self._writer is None:
            return
        response = self._writer.snapshot() if self.is_background else self._writer.final
        if response is None:
            return
        if not self._keeps_encrypted_content:
            response = {**response, "output": without_encrypted_content(response["output"])}
        await self._add_to_conversation(response)
        if not self._stores:
            return
        stored = StoredResponse(
            id=response["id"],
            previous=response["previous_response_id"],
            response=msgspec.json.encode(response),
            items=msgspec.json.encode(with_ids(response["id"], self._items)),
        )
        try:
            await self._store.save(self._key, stored)
        except StoreError as error:
            self._server_state.log.error(
                "response not stored", request=response["id"], reason=str(error)
            )

    async def _add_to_conversation(self, response: dict[str, Any]) -> None:
        """Add the input and the output of a complete response to its conversation, once."""
        id_ = self._conversation_id
        if id_ is None or response["status"] not in ("completed", "incomplete"):
            return
        self._conversation_id = None
        added = [*with_ids(response["id"], self._items), *response["output"]]
        try:
            await self._conversations.add(self._key, id_, added)
        except (StoreError, RequestError) as error:
            self._server_state.log.error(
                "response not added to its conversation",
                request=response["id"],
                conversation=id_,
                reason=str(error),
            )

    def _stored(self, given: Mapping[str, Any]) -> bool:
        """Return whether the response is stored."""
        stores = flag(given, "store", default=self._store.is_on)
        if stores and not self._store.is_on:
            raise InvalidParameter(
                "store is true, and this server stores no responses (--responses-store-size 0); "
                "leave it out, and send the whole conversation as input",
                param="store",
            )
        if flag(given, "background") and not stores:
            raise InvalidParameter(
                "background is true, and the response is not stored; background responses are "
                "found by their id: leave store out, or leave background out",
                param="background",
            )
        return stores

    async def read(self, request: GenerationRequest) -> GenerationJob:
        """Check all fields. Raises RequestError naming the field."""
        given, engine, context = request.given, request.engine, request.context
        check_stream_options(given)
        check_continuation(given)
        check_text(given, context)
        include = included(given)
        sampling = sampling_of(
            sampling_fields(given),
            engine.default_sampling(),
            logprobs=num_top(given, include),
            tokenizer=engine.tokenizer,
        )
        offer = tool_offer(given)
        self._stores = self._stored(given)
        self.is_background = flag(given, "background")
        found = await read_input(self._store, self._conversations, self._key, given)
        self._items, self._conversation_id = found.own, found.conversation_id
        prompt = await PromptMaker(context, offer, sampling.max_tokens).make(found.items)
        shown = None if self._conversation_id is None else {"id": self._conversation_id}
        frame = {
            **_frame(request, sampling),
            **tools_of(given, offer),
            **echoed_fields(getattr(self._request.state, "body", given)),
            "store": self._stores,
            "conversation": shown,
        }
        sampling, parser = parsing_of(
            context,
            offer,
            prompt.conversation,
            sampling,
            includes_reasoning=includes_reasoning(given),
            budget=budget_of(given),
        )
        num_tokens = len(prompt.token_ids)
        default = default_max_tokens(engine.card, num_tokens)
        sampling = request.limited(sampling, num_tokens, default_tokens=default)
        text_rules = PLAIN_TEXT if parser is None else parser.text_rules(engine.tokenizer)
        self._keeps_encrypted_content = ENCRYPTED in include
        self._writer = ResponseWriter(
            frame,
            parser,
            logprobs=LOGPROBS in include,
            # The response to a POST has it unasked, as OpenAI's has.
            seals=self._keeps_encrypted_content or not self.is_background,
            namespaces=names_of(given),
        )
        return GenerationJob(
            prompts=[Prompt(token_ids=prompt.token_ids, sampling=sampling, text_rules=text_rules)],
            writer=self._writer,
            respond=self._continued(request) if self.is_background else None,
        )

    def _continued(self, request: GenerationRequest) -> Callable[[ChoiceStreams], Response]:
        """Return what begins the background response, and returns what its client gets."""
        server_state, writer = self._server_state, self._writer
        assert writer is not None, "called with a writer"

        def respond(answers: ChoiceStreams) -> Response:
            if not server_state.resumable_streams.has_room():
                raise OverloadedError(
                    "there are as many background responses and resumable streams as have room "
                    "(--resume-memory); try again, or leave background out",
                    retry_after_s=1.0,
                )
            open_ = self._request.state.open_request
            events = BackgroundEvents(server_state, answers, writer, self.dialect, open_.id)
            background = BackgroundResponse(
                server_state, events, request.context.deadline, open_, self.save
            )
            server_state.resumable_streams.add(background)
            headers = request.context.headers()
            if open_.is_stream:
                return FollowStream(server_state, background, headers)
            return QueuedResponse(background, headers)

        return respond


def _frame(request: GenerationRequest, sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of the response that are known before the answer."""
    given = request.given
    return {
        "id": request.envelope.id,
        "object": "response",
        "created_at": request.envelope.created_s,
        "completed_at": None,
        "background": flag(given, "background"),
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": checked_metadata(given.get("metadata", {})),
        "model": request.envelope.model,
        "previous_response_id": given.get("previous_response_id"),
        "reasoning": reasoning_of(given, None),
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": text_of(given),
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": sampling.top_p,
        "truncation": given.get("truncation", "disabled"),
        "usage": None,
        "seed": None,
    }
