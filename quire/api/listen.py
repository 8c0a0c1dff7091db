"""The socket to listen on: checked and taken before anything is loaded.

Standard library only, so that a wrong port is told at once. Always holds: an address beyond
loopback is taken only with a key or by explicit word; what is returned already listens, so nobody
else can take it while the model loads.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl

from quire.base.errors import SettingError
from quire.config.groups import ServerConfig

_BACKLOG = 2048


def listen(config: ServerConfig, *, has_tenants: bool = False) -> socket.socket:
    """A listening socket at the configured address. Raises SettingError saying what to do.

    has_tenants: callers are known by keys of a tenants file.
    """
    has_keys = bool(config.api_key) or has_tenants
    if not has_keys and not config.insecure and not is_loopback(config.host):
        raise SettingError(
            f"host {config.host} is reachable from other machines and no key is set; give one "
            "with --api-key or a file of --tenants, or --insecure to let anybody in, or listen on "
            "127.0.0.1"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise SettingError(
            f"host {config.host!r} cannot be resolved ({error.strerror}); give an address of this "
            "machine, as 127.0.0.1"
        ) from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise SettingError(_why(error, config)) from error
    listening.setblocking(False)
    return listening


def check_tls(config: ServerConfig) -> None:
    """Read certificate and key as the server will. Raises SettingError saying what is wrong."""
    if config.tls_cert is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise SettingError(
            f"the certificate {config.tls_cert} cannot be used ({error}); give PEM files that "
            "belong together, the key without a password (--tls-cert, --tls-key)"
        ) from error


def _no_password() -> str:
    raise ValueError("the key has a password")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_of(listening: socket.socket, *, scheme: str = "http") -> str:
    """The address as a URL, with the port that was taken."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _why(error: OSError, config: ServerConfig) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {config.port} on {config.host} is in use; stop what listens there, or give "
            "another with --port (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {config.port} may not be taken by this user; give one from 1024 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{config.host} is not an address of this machine; give one of its own with --host"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot listen on {config.host} port {config.port}: {reason}"
