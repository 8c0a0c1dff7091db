"""quire.v1.Generation: an answer as a stream of messages, a delta each.

Knows no tensors. Always holds: the messages of a choice joined are its answer over HTTP.
"""

from __future__ import annotations

from typing import Any

import grpc
import msgspec

from quire.api.generation.usage import Usage
from quire.api.http.auth import Caller
from quire.api.rpc.calls import Calls, Context, WholeMessages
from quire.api.rpc.messages import quire_v1 as messages
from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.engine.output.output_stream import TextDelta

SERVICE = "quire.v1.Generation"
_PATH = f"/{SERVICE}/Generate"
_OPTIONAL = ("max_tokens", "temperature", "top_p", "top_k", "seed")


class GenerationService:
    """The service."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def methods(self) -> grpc.GenericRpcHandler:
        """Return gRPC's entry of its method."""
        method = grpc.unary_stream_rpc_method_handler(
            self._generate,
            request_deserializer=messages.GenerateRequest.FromString,
            response_serializer=messages.GenerateResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Generate": method})

    async def _generate(self, asked: Any, context: Context) -> None:
        context = WholeMessages(context)

        async def work(caller: Caller) -> None:
            async def take(id_: str, delta: TextDelta) -> None:
                await context.write(_message(id_, delta))

            id_, usage = await self._calls.generate(caller, _PATH, fields_of(asked), take)
            await context.write(messages.GenerateResponse(id=id_, usage=_usage(usage)))

        await self._calls.answered(context, _PATH, work)


def fields_of(asked: Any) -> dict[str, Any]:
    """Return the fields of a completion. Raises InvalidParameter."""
    fields: dict[str, Any] = {}
    if asked.fields_json:
        try:
            fields = msgspec.json.decode(asked.fields_json, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidParameter(
                f"fields_json is {show(asked.fields_json)}; a JSON object is allowed: {error}",
                param="fields_json",
            ) from error
    own: dict[str, Any] = {name: getattr(asked, name) for name in _OPTIONAL if asked.HasField(name)}
    if asked.model:
        own["model"] = asked.model
    if asked.stop:
        own["stop"] = list(asked.stop)
    match asked.WhichOneof("input"):
        case "prompt":
            own["prompt"] = asked.prompt
        case "token_ids":
            own["prompt"] = list(asked.token_ids.ids)
        case _:
            raise InvalidParameter(
                "neither prompt nor token_ids is given; give one of them", param="prompt"
            )
    for name in own.keys() & fields.keys():
        raise InvalidParameter(
            f"{name} is given in fields_json too; leave it out there", param="fields_json"
        )
    return {**fields, **own}


def _message(id_: str, delta: TextDelta) -> Any:
    return messages.GenerateResponse(
        id=id_,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=str(delta.finish_reason or ""),
    )


def _usage(usage: Usage) -> Any:
    return messages.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )
