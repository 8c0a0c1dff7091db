"""POST /v1/messages/count_tokens: the number of tokens that a message's prompt has.

The context length is not enforced, so that a client can find out by how much a prompt exceeds it.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.anthropic.fields import COUNT_TOKENS, QUERY_PARAMS
from quire.api.anthropic.request import as_named_here, read_prompt
from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext, open_request
from quire.api.generation.text_bounds import check_text_bytes
from quire.api.http.request_io import disconnect_of, run_until_disconnect
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter


class CountTokensRoute:
    """The route."""

    def __init__(self, server_state: ServerState) -> None:
        self._server_state = server_state

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        context = await open_request(
            self._server_state,
            request,
            honoured=COUNT_TOKENS,
            id_prefix="count_",
            query_params=QUERY_PARAMS,
        )
        num_tokens = await run_until_disconnect(
            _counted(context),
            disconnect_of(request.scope, request.receive),
            over=self._server_state.lifecycle.grace_over,
            deadline=context.deadline,
        )
        body = msgspec.json.encode({"input_tokens": num_tokens})
        return Response(body, headers=context.headers(), media_type="application/json")


async def _counted(context: RequestContext) -> int:
    try:
        text = (await read_prompt(context)).conversation.text
        adds_special = flag(context.given, "add_special_tokens")
    except InvalidParameter as error:
        raise as_named_here(error, context.given) from error
    check_text_bytes(context.engine, text, param="messages")
    encode = context.engine.tokenizer.encode
    return len(await context.run_in_thread(encode, text, add_special_tokens=adds_special))
