"""grpc.health.v1.Health: whether the server and its services answer.

Needs no key. Always holds: the number of watchers is bounded, and they end with the server.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from quire.api.rpc.calls import Context
from quire.api.rpc.messages import health_v1 as messages

if TYPE_CHECKING:
    from quire.api.server_state import ServerState

SERVICE = "grpc.health.v1.Health"
# A watcher learns of a change within this time.
_POLL_S = 0.5
# Watchers beyond this number are refused, as each is an open stream.
MAX_WATCHERS = 64


class HealthService:
    """The service. names: of the services that it knows, beside "" for all."""

    def __init__(self, server_state: ServerState, names: tuple[str, ...]) -> None:
        self._server_state = server_state
        self._names = frozenset(("", SERVICE, *names))
        self._num_watchers = 0

    def methods(self) -> grpc.GenericRpcHandler:
        """Return gRPC's entry of its methods."""
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=messages.HealthCheckRequest.FromString,
            response_serializer=messages.HealthCheckResponse.SerializeToString,
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=messages.HealthCheckRequest.FromString,
            response_serializer=messages.HealthCheckResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Check": check, "Watch": watch})

    async def _check(self, asked: Any, context: Context) -> Any:
        if asked.service not in self._names:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service {asked.service[:64]!r} is not served here"
            )
        return messages.HealthCheckResponse(status=self._status(asked.service))

    async def _watch(self, asked: Any, context: Context) -> None:
        if self._num_watchers >= MAX_WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} clients watch the health"
            )
        self._num_watchers += 1
        try:
            last = None
            while not self._server_state.lifecycle.grace_over.done():
                status = self._status(asked.service)
                if status != last:
                    await context.write(messages.HealthCheckResponse(status=status))
                    last = status
                await asyncio.sleep(_POLL_S)
        finally:
            self._num_watchers -= 1

    def _status(self, service: str) -> int:
        statuses = messages.HealthCheckResponse
        if service not in self._names:
            return int(statuses.SERVICE_UNKNOWN)
        is_serving = self._server_state.health().ok
        return int(statuses.SERVING if is_serving else statuses.NOT_SERVING)
