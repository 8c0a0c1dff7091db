"""The gRPC server beside the HTTP server: its port, TLS, services and end.

Shares the event loop, the keys and the registry of requests with the HTTP server. Imported only
with --grpc-port. Always holds: it accepts calls once the engine is ready, and ends with the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from quire.api.http.dialect import Dialect
from quire.api.rpc import generation, health, kserve
from quire.api.rpc.calls import Calls, Read
from quire.base.errors import SettingError

if TYPE_CHECKING:
    from quire.api.server_state import ServerState

# A message has names and texts that a JSON body has not; beyond this it is refused unread.
_EXTRA_BYTES = 64 * 1024
# Time for open calls to write their last message when the server stops.
_LAST_MESSAGES_S = 1.0


class RpcServer:
    """Made in the event loop. read: checks the fields of a completion, as `dialect` has them."""

    def __init__(self, server_state: ServerState, read: Read, dialect: Dialect) -> None:
        config = server_state.config
        self._config = config
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", config.max_body_bytes + _EXTRA_BYTES),
                ("grpc.so_reuseport", 0),
            ]
        )
        calls = Calls(server_state, read, dialect)
        names = (generation.SERVICE, kserve.SERVICE)
        self._server.add_generic_rpc_handlers(
            (
                generation.GenerationService(calls).methods(),
                kserve.KServeService(calls).methods(),
                health.HealthService(server_state, names).methods(),
            )
        )
        self.port = self._listen()

    def _listen(self) -> int:
        """Bind the port; return it. Raises SettingError."""
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if config.tls_cert is None:
                return int(self._server.add_insecure_port(address))
            chain = Path(config.tls_cert).read_bytes()
            key = Path(config.tls_key or config.tls_cert).read_bytes()
            credentials = grpc.ssl_server_credentials([(key, chain)])
            return int(self._server.add_secure_port(address, credentials))
        except (RuntimeError, OSError) as error:
            raise SettingError(
                f"grpc_port {config.grpc_port} on {config.host} cannot be used: {error}; stop what "
                "listens there, or give another port (0 takes a free one)"
            ) from error

    async def start(self) -> None:
        """Accept calls."""
        await self._server.start()

    async def close(self) -> None:
        """End all calls."""
        await self._server.stop(_LAST_MESSAGES_S)
