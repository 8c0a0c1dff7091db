"""inference.GRPCInferenceService: the KServe v2 protocol over the served model.

ModelInfer continues one prompt; its parameters are fields of POST /v1/completions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from quire.api.generation.request_context import unknown_model
from quire.api.http.auth import Caller
from quire.api.rpc import tensors
from quire.api.rpc.calls import Calls, Context
from quire.api.rpc.messages import kserve_v2 as messages
from quire.base.errors import InvalidParameter, UnknownModel
from quire.base.show import show
from quire.base.version import installed_version
from quire.engine.output.output_stream import TextDelta

SERVICE = "inference.GRPCInferenceService"
_PLATFORM = "quire"
# Beside the model's state these say nothing, so that monitors need no key.
_OPEN = ("ServerLive", "ServerReady")


class KServeService:
    """The service."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._server_state = calls.server_state

    def methods(self) -> grpc.GenericRpcHandler:
        """Return gRPC's entry of its methods."""
        works: dict[str, Callable[[Any, Context, Caller], Awaitable[Any]]] = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        entries = {name: self._method(name, work) for name, work in works.items()}
        entries["ServerLive"] = _unary("ServerLive", self._live)
        entries["ServerReady"] = _unary("ServerReady", self._ready)
        return grpc.method_handlers_generic_handler(SERVICE, entries)

    def _method(
        self, name: str, work: Callable[[Any, Context, Caller], Awaitable[Any]]
    ) -> grpc.RpcMethodHandler:
        path = f"/{SERVICE}/{name}"

        async def answer(asked: Any, context: Context) -> Any:
            return await self._calls.answered(
                context, path, lambda caller: work(asked, context, caller)
            )

        return _unary(name, answer)

    async def _live(self, asked: Any, context: Context) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def _ready(self, asked: Any, context: Context) -> Any:
        return messages.ServerReadyResponse(ready=self._server_state.health().ok)

    async def _model_ready(self, asked: Any, context: Context, caller: Caller) -> Any:
        self._check_model(asked.name, asked.version)
        return messages.ModelReadyResponse(ready=self._server_state.health().ok)

    async def _server_metadata(self, asked: Any, context: Context, caller: Caller) -> Any:
        return messages.ServerMetadataResponse(name="quire", version=installed_version())

    async def _model_metadata(self, asked: Any, context: Context, caller: Caller) -> Any:
        self._check_model(asked.name, asked.version)
        answer = messages.ModelMetadataResponse(name=asked.name, platform=_PLATFORM)
        for name, kind, shape in (
            (tensors.TEXT_INPUT, "BYTES", 1),
            (tensors.IDS_INPUT, "INT32", -1),
        ):
            answer.inputs.add(name=name, datatype=kind, shape=[shape])
        for name in tensors.OUTPUTS:
            is_ids = name == tensors.IDS_OUTPUT
            answer.outputs.add(
                name=name, datatype="INT32" if is_ids else "BYTES", shape=[-1 if is_ids else 1]
            )
        return answer

    async def _infer(self, asked: Any, context: Context, caller: Caller) -> Any:
        self._check_model(asked.model_name, asked.model_version)
        tensors.check_outputs(asked)
        fields = tensors.fields_of(asked)
        if fields.get("n", 1) != 1:
            raise InvalidParameter("n is given; the outputs have one answer", param="n")
        fields |= {"model": asked.model_name, "prompt": tensors.prompt_of(asked)}
        texts, ids, reasons = list[str](), list[int](), list[str]()

        async def take(id_: str, delta: TextDelta) -> None:
            texts.append(delta.text)
            ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                reasons.append(str(delta.finish_reason))

        path = f"/{SERVICE}/ModelInfer"
        id_, _ = await self._calls.generate(caller, path, fields, take)
        return tensors.answer_of(
            asked,
            model=asked.model_name,
            request_id=id_,
            text="".join(texts),
            token_ids=ids,
            finish_reason=reasons[0],
        )

    def _check_model(self, name: str, version: str) -> None:
        card = self._server_state.engine().card
        if name not in card.names:
            raise unknown_model(name, card, param="name")
        if version:
            raise UnknownModel(
                f"model {show(name)} has no version {show(version)}; leave the version out",
                param="version",
            )


def _unary(name: str, answer: Callable[[Any, Context], Awaitable[Any]]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=getattr(messages, f"{name}Request").FromString,
        response_serializer=getattr(messages, f"{name}Response").SerializeToString,
    )
