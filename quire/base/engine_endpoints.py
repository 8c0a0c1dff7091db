"""Where each engine of a data-parallel server publishes: at the ports after the first engine's.

As in vLLM: engine K listens at the port plus K, and at an IPC path with `.K` from the second engine
on. Knows no sockets. Always holds: engine 0 is at the endpoint itself.
"""

from __future__ import annotations

import re

LAST_PORT = 65535
_TCP = re.compile(r"(tcp://.*:)(\d+)")


def endpoint_of_engine(endpoint: str, engine: int) -> str:
    """Return the endpoint of an engine. The port may be beyond LAST_PORT: see `port_of`."""
    found = _TCP.fullmatch(endpoint)
    if found is None:
        return f"{endpoint}.{engine}" if engine else endpoint
    return f"{found[1]}{int(found[2]) + engine}"


def port_of(endpoint: str) -> int | None:
    """Return the port of a TCP endpoint; None for another."""
    found = _TCP.fullmatch(endpoint)
    return None if found is None else int(found[2])


def colliding_ports(endpoint: str, other: str | None, num_engines: int) -> tuple[int, int] | None:
    """Return the ports of two endpoints where one engine's would be another engine's of the other
    kind; None where they are far enough apart."""
    first, second = port_of(endpoint), port_of(other or "")
    if first is None or second is None or abs(first - second) >= num_engines:
        return None
    return first, second
