"""EndpointSlices: the addresses of a Service, put together from its slices as they change.

Reads objects of discovery.k8s.io/v1 and knows no HTTP. An endpoint counts while it is ready and not
terminating; its health is the prober's to check. Always holds: an object that cannot be read
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from quire.base.errors import InvalidParameter
from quire.base.server_url import ServerUrl
from quire.router.discovery import replica_url


class _Conditions(Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(Struct):
    addresses: list[str] = []
    conditions: _Conditions = field(default_factory=_Conditions)


class _Port(Struct):
    name: str | None = None
    port: int | None = None


class Metadata(Struct):
    """What identifies an object, and the version of what was read."""

    name: str = ""
    resource_version: str = field(name="resourceVersion", default="")
    go_on: str = field(name="continue", default="")


class EndpointSlice(Struct):
    """One slice."""

    metadata: Metadata = field(default_factory=Metadata)
    address_type: str = field(name="addressType", default="IPv4")
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class SliceList(Struct):
    """The answer to a list request."""

    metadata: Metadata = field(default_factory=Metadata)
    items: list[EndpointSlice] = []


class WatchEvent(Struct):
    """One line of a watch. raw: the object, of a kind that depends on the type."""

    kind: str = field(name="type")
    raw: msgspec.Raw = field(name="object")


class EndpointSlices:
    """port: the name of the port; "" for the only one. is_secure: replicas speak TLS."""

    def __init__(self, port: str, *, is_secure: bool) -> None:
        self._port = port
        self._scheme = "https" if is_secure else "http"
        self._slices: dict[str, EndpointSlice] = {}

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Take a whole list."""
        self._slices = {one.metadata.name: one for one in slices}

    def apply(self, kind: str, changed: EndpointSlice) -> None:
        """Take one change."""
        if kind == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[changed.metadata.name] = changed

    def urls(self) -> tuple[ServerUrl, ...]:
        """Return the addresses of ready endpoints, each once."""
        found: dict[str, ServerUrl] = {}
        for _, one in sorted(self._slices.items()):
            port = self._port_of(one)
            for endpoint in (one.endpoints or ()) if port else ():
                if endpoint.conditions.ready is False or endpoint.conditions.terminating:
                    continue
                # All addresses of an endpoint are of one server; clients use the first.
                for address in endpoint.addresses[:1]:
                    host = f"[{address}]" if one.address_type == "IPv6" else address
                    try:
                        url = replica_url(f"{self._scheme}://{host}:{port}")
                    except InvalidParameter:
                        continue
                    found.setdefault(url.shown, url)
        return tuple(found.values())

    def missing_port(self) -> str:
        """Return why slices have no usable port; "" where they have one."""
        without = [one for one in self._slices.values() if one.endpoints and not self._port_of(one)]
        if not without:
            return ""
        names = ", ".join(repr(port.name) for port in without[0].ports or ()) or "none"
        wanted = f"no port named {self._port!r}" if self._port else "several ports"
        return f"the endpoints have {wanted} (there are: {names}); give one of them as port"

    def _port_of(self, one: EndpointSlice) -> int | None:
        ports = one.ports or []
        if not self._port:
            return ports[0].port if len(ports) == 1 else None
        return next((port.port for port in ports if port.name == self._port), None)
