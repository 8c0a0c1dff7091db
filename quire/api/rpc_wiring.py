"""Open the gRPC server that --grpc-port asks for.

gRPC is an optional dependency. Always holds: without the flag nothing of it is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from quire.base.errors import SettingError
from quire.base.log import Log

if TYPE_CHECKING:
    from quire.api.rpc.server import RpcServer
    from quire.api.server_state import ServerState

_NEEDED = ("grpc", "google.protobuf")


def check_rpc() -> None:
    """Raise SettingError if gRPC is not installed."""
    for name in _NEEDED:
        try:
            is_there = find_spec(name) is not None
        except ModuleNotFoundError:  # the package above it
            is_there = False
        if not is_there:
            raise SettingError(
                f"grpc_port is given, and the package {name} is not installed; "
                "pip install 'quire-llm[grpc]', or leave grpc_port out"
            )


def open_rpc(server_state: ServerState, log: Log) -> RpcServer | None:
    """Return the gRPC server, which listens but accepts no calls; None without --grpc-port.

    Raises SettingError. Called in the event loop.
    """
    if server_state.config.grpc_port is None:
        return None
    check_rpc()
    # Only if it is used.
    from quire.api.openai.completions import read_job
    from quire.api.openai.dialect import OPENAI
    from quire.api.rpc.server import RpcServer

    server = RpcServer(server_state, read_job, OPENAI)
    log.event("gRPC listens", host=server_state.config.host, port=server.port)
    return server
