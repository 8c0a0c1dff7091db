"""Restrict client libraries to loopback connections.

    python -m tests.clients.offline litellm instructor    # connections attempted while importing

VARIABLES disable what the libraries would send or fetch by themselves; they must be set before the
libraries are imported. Attempts that remain are refused and recorded.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import socket
import sys
from typing import Any

VARIABLES = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "NO_PROXY": "127.0.0.1,localhost,::1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "no_proxy": "127.0.0.1,localhost,::1",
}


def is_loopback(host: object) -> bool:
    """Return whether a host, by name or address, is this machine."""
    text = host.decode() if isinstance(host, bytes) else host
    if not isinstance(text, str) or text in ("", "localhost"):
        return text in (None, "", "localhost")
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Wall:
    """While entered, sockets connect to loopback only. refused: other attempts."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def __enter__(self) -> Wall:
        self._kept = (socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo)
        connect, connect_ex, getaddrinfo = self._kept

        def guarded(one: socket.socket, address: Any) -> None:
            self._check(one, address)
            connect(one, address)

        def guarded_ex(one: socket.socket, address: Any) -> int:
            self._check(one, address)
            return connect_ex(one, address)

        def looked_up(host: Any, *args: Any, **options: Any) -> Any:
            self._check_host(host)
            return getaddrinfo(host, *args, **options)

        socket.socket.connect = guarded  # type: ignore[method-assign, assignment]
        socket.socket.connect_ex = guarded_ex  # type: ignore[method-assign, assignment]
        socket.getaddrinfo = looked_up
        return self

    def __exit__(self, *_: object) -> None:
        connect, connect_ex, getaddrinfo = self._kept
        socket.socket.connect = connect  # type: ignore[method-assign]
        socket.socket.connect_ex = connect_ex  # type: ignore[method-assign]
        socket.getaddrinfo = getaddrinfo

    def _check(self, one: socket.socket, address: Any) -> None:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            self._check_host(address[0])

    def _check_host(self, host: object) -> None:
        if not is_loopback(host):
            self.refused.append(str(host))
            raise OSError(f"a test tried to reach {host!r}; only loopback is allowed")


if __name__ == "__main__":
    os.environ.update(VARIABLES)
    with Wall() as wall:
        for name in sys.argv[1:]:
            importlib.import_module(name)
    print(*wall.refused, sep="\n", end="")
