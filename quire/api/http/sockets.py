"""Create the listening sockets before the model is loaded.

A wrong port fails at once, and no other process can take the address while the model loads. Always
holds: an address beyond loopback is bound only with a key or with --insecure; a file is removed
only if it is a socket without a listener, or this server's own.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.api.http.origins import is_loopback
from quire.base.errors import SettingError
from quire.base.user_path import user_path
from quire.config.server_config import ServerConfig

_BACKLOG = 2048


def listen(config: ServerConfig, *, has_tenants: bool = False) -> socket.socket:
    """Return a listening socket at the configured address. Raises SettingError.

    has_tenants: there are keys of a tenants file.
    """
    has_keys = bool(config.api_key) or has_tenants
    if config.uds is not None:
        return _listen_at_path(user_path(config.uds), has_keys=has_keys)
    if not has_keys and not config.insecure and not is_loopback(config.host):
        _resolved(config.host, config.port)  # a wrong address needs no key but a right one
        raise SettingError(
            f"host {config.host} is reachable from other machines and no key is set; give one "
            "with --api-key, --api-key-file or a file of --tenants, or --insecure to accept every "
            "request, or listen on 127.0.0.1"
        )
    return _listen_at(
        config.host, config.port, flag="--port", is_of_admins=config.port == config.admin_port
    )


def listen_for_admins(config: ServerConfig) -> socket.socket | None:
    """Return the loopback socket of --admin-port; None if it is not set."""
    if config.admin_port is None:
        return None
    return _listen_at("127.0.0.1", config.admin_port, flag="--admin-port")


class SocketFile:
    """The file of a listening Unix socket; nothing for other sockets."""

    def __init__(self, listening: socket.socket) -> None:
        is_unix = listening.family == socket.AF_UNIX
        self._path: str | None = listening.getsockname() if is_unix else None
        self._inode = None if self._path is None else _inode_of(self._path)

    def remove(self) -> None:
        """Remove the file, unless another socket has replaced it."""
        if self._path is None:
            return
        with suppress(FileNotFoundError):
            if _inode_of(self._path) == self._inode:
                os.unlink(self._path)


def _resolved(host: str, port: int) -> tuple[int, int, int, Any]:
    """Return the family, kind, protocol and address to bind. Raises SettingError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise SettingError(
            f"host {host!r} cannot be resolved ({reason}); give an address of this machine, as "
            "127.0.0.1"
        ) from error
    return family, kind, protocol, address


def _listen_at(host: str, port: int, *, flag: str, is_of_admins: bool = False) -> socket.socket:
    """Return a socket. is_of_admins: this server's socket for admins is at that port already."""
    family, kind, protocol, address = _resolved(host, port)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        if is_of_admins and port and error.errno == errno.EADDRINUSE:
            raise SettingError(
                f"port and admin_port are both {port}; give admin_port another port, or leave it "
                "out: admin routes are then at the main port, for local clients or with an admin "
                "key"
            ) from error
        raise SettingError(_why(error, host, port, flag)) from error
    listening.setblocking(False)
    return listening


def _listen_at_path(path: Path, *, has_keys: bool) -> socket.socket:
    """Return a Unix socket. Its file has the mode of the umask; without a key, others than owner
    and group get no access."""
    try:
        _clear(path)
        listening = _bound(path, hides=0 if has_keys else 0o007)
    except OSError as error:
        raise SettingError(
            f"uds {path}: no socket can be made there ({error.strerror or error}); give a path of "
            "at most 107 bytes in a directory that this user may write to"
        ) from error
    listening.setblocking(False)
    return listening


def _bound(path: Path, *, hides: int) -> socket.socket:
    """Return a socket that listens at `path`. hides: bits that its mode does not have."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # No other thread runs yet; a mode set after binding would come too late.
    umask = os.umask(0)
    os.umask(umask | hides)
    try:
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(umask)
    return listening


def _clear(path: Path) -> None:
    """Remove a socket without a listener. Raises SettingError for any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingError(
            f"uds {path}: there is a file that is no socket; move it away, or give another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.setblocking(False)
        try:
            asked.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its backlog is full
            pass
    raise SettingError(
        f"uds {path} is in use; stop what listens there, or give another path with --uds"
    )


def _inode_of(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def check_tls(config: ServerConfig) -> None:
    """Load certificate and key as the server will. Raises SettingError."""
    if config.tls_cert is not None:
        tls_context(config)


def tls_context(config: ServerConfig) -> ssl.SSLContext:
    """Return the context of HTTPS. Raises SettingError if the files cannot be used."""
    assert config.tls_cert is not None, "the caller checks that a certificate is set"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise SettingError(
            f"the certificate {config.tls_cert} cannot be used ({_tls_reason(config, error)}); "
            "give PEM files that belong together, the key without a password (--tls-cert, "
            "--tls-key)"
        ) from error
    return context


def _tls_reason(config: ServerConfig, error: Exception) -> str:
    """Return why the files cannot be used; OpenSSL says "PEM lib" of most."""
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        path = error.filename or config.tls_cert
        return f"{path}: {error.strerror}"
    for path, mark in ((config.tls_cert, "CERTIFICATE"), (config.tls_key, "PRIVATE KEY")):
        if path is not None and mark.encode() not in Path(path).read_bytes()[: 1 << 20]:
            return f"{path} has no line -----BEGIN {mark}-----"
    return str(error)


def _no_password() -> str:
    raise ValueError("the key has a password")


def url_of(listening: socket.socket, *, scheme: str = "http") -> str:
    """Return the address as a URL, with the port that was bound."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _why(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is in use; stop what listens there, or give another with "
            f"{flag} (0 takes a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} may not be taken by this user; give one from 1024 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; give one of its own with --host"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot listen on {host} port {port}: {reason}"
