"""POST /v1/responses/input_tokens: the number of tokens of a response's prompt.

The context length is enforced with truncation: auto only, which drops items to fit it; otherwise a
client can find out by how much a prompt exceeds it.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.request_context import RequestContext, open_request
from quire.api.generation.text_bounds import check_text_bytes
from quire.api.http.request_io import disconnect_of, run_until_disconnect
from quire.api.openai.responses.conversation_input import read_input
from quire.api.openai.responses.conversations import Conversations
from quire.api.openai.responses.fields import INPUT_TOKENS
from quire.api.openai.responses.prompt import PromptMaker
from quire.api.openai.responses.request import (
    as_named_here,
    check_text,
    sampling_fields,
    truncates,
)
from quire.api.openai.responses.store import ResponseStore
from quire.api.openai.responses.tool_fields import tool_offer
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter


class InputTokensRoute:
    """The route."""

    def __init__(
        self, server_state: ServerState, store: ResponseStore, conversations: Conversations
    ) -> None:
        self._server_state = server_state
        self._store, self._conversations = store, conversations

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        context = await open_request(
            self._server_state, request, honoured=INPUT_TOKENS, id_prefix="count_"
        )
        num_tokens = await run_until_disconnect(
            self._counted(context, request.state.key),
            disconnect_of(request.scope, request.receive),
            over=self._server_state.lifecycle.grace_over,
            deadline=context.deadline,
        )
        counted = {"object": "response.input_tokens", "input_tokens": num_tokens}
        body = msgspec.json.encode(counted)
        return Response(body, headers=context.headers(), media_type="application/json")

    async def _counted(self, context: RequestContext, key: bytes) -> int:
        given = context.given
        try:
            check_text(given, context)
            sampling_fields(given)  # which checks the format
            maker = PromptMaker(context, tool_offer(given), None)
            found = await read_input(self._store, self._conversations, key, given)
            if truncates(given):
                return len((await maker.make(found.items)).token_ids)
            text = (await maker.conversation(found.items)).text
        except InvalidParameter as error:
            raise as_named_here(error, given) from error
        check_text_bytes(context.engine, text, param="input")
        encode = context.engine.tokenizer.encode
        ids = await context.run_in_thread(encode, text, add_special_tokens=maker.adds_special)
        return len(ids)
