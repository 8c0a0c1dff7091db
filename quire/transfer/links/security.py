"""LinkSecurity: the shared key of connections, and TLS below it where it is asked for.

With a certificate the handing side serves TLS only; with authorities the fetching side connects by
TLS only and checks the other side's certificate and host, and the handing side asks for a
certificate too. The key is proved in any case. Knows files and sockets, no message. Always holds: a
side that was given TLS never goes on without it.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.user_path import user_path

# A handshake that takes longer is taken for a side that speaks no TLS.
TLS_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """key: of proofs (handshake.py). serving, connecting: TLS of either side; None: none."""

    key: bytes
    serving: ssl.SSLContext | None = None
    connecting: ssl.SSLContext | None = None

    def served(self, connection: socket.socket) -> socket.socket:
        """Return an accepted connection, secured. Raises OSError."""
        if self.serving is None:
            return connection
        connection.settimeout(TLS_S)
        first = connection.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionAbortedError("the other side has closed the connection")
        if first != _TLS_HANDSHAKE:
            raise ssl.SSLError(
                "the fetching engine speaks no TLS; give it --kv-transfer-tls-ca with the "
                "authority of this engine's certificate"
            )
        return _wrapped(self.serving, connection, server_side=True)

    def connected(self, connection: socket.socket, host: str) -> socket.socket:
        """Return a connection to `host`, secured. Raises OSError."""
        if self.connecting is None:
            return connection
        connection.settimeout(TLS_S)
        try:
            return _wrapped(self.connecting, connection, host=host)
        except ssl.SSLCertVerificationError as error:
            raise ssl.SSLError(
                f"the certificate of the engine at {host} is not accepted: {error.verify_message}; "
                "its --kv-transfer-tls-cert must name this host and be signed by an authority in "
                "--kv-transfer-tls-ca"
            ) from error
        except (ssl.SSLError, TimeoutError) as error:
            raise ssl.SSLError(
                f"no TLS with the engine at {host} ({error}); give it --kv-transfer-tls-cert, or "
                "leave --kv-transfer-tls-ca out here"
            ) from error


_TLS_HANDSHAKE = b"\x16"  # the type of a TLS connection's first record


def serving_context(certificate: str, key: str | None, authorities: str | None) -> ssl.SSLContext:
    """Return TLS of the handing side; it asks for certificates of `authorities`, if given.

    Raises SettingError where a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_certificate(context, certificate, key)
    if authorities is not None:
        _load_authorities(context, authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def connecting_context(
    authorities: str, certificate: str | None, key: str | None
) -> ssl.SSLContext:
    """Return TLS of the fetching side; it shows `certificate`, if given. Raises SettingError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and host
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load_authorities(context, authorities)
    if certificate is not None:
        _load_certificate(context, certificate, key)
    return context


def _wrapped(
    context: ssl.SSLContext,
    connection: socket.socket,
    *,
    server_side: bool = False,
    host: str | None = None,
) -> ssl.SSLSocket:
    wrapped = context.wrap_socket(
        connection, server_side=server_side, do_handshake_on_connect=False, server_hostname=host
    )
    try:
        wrapped.settimeout(TLS_S)
        wrapped.do_handshake()
    except OSError:
        with suppress(OSError):
            wrapped.close()  # the given socket is detached: nothing else closes it
        raise
    return wrapped


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    given = certificate if key is None else key
    _readable("kv_transfer_tls_cert", certificate)
    _readable("kv_transfer_tls_key" if key is not None else "kv_transfer_tls_cert", given)
    try:
        # Without the callback a key with a password would be asked for at the terminal.
        context.load_cert_chain(user_path(certificate), user_path(given), password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise SettingError(
            f"kv_transfer_tls_cert {certificate} with the private key in {given} cannot be used "
            f"({error}); a PEM file with the certificate chain and one with its key, without a "
            "password, are expected"
        ) from error


def _load_authorities(context: ssl.SSLContext, authorities: str) -> None:
    _readable("kv_transfer_tls_ca", authorities)
    try:
        context.load_verify_locations(cafile=user_path(authorities))
    except (ssl.SSLError, OSError) as error:
        raise SettingError(
            f"kv_transfer_tls_ca {authorities} cannot be used ({error}); a PEM file with the "
            "certificates of the authorities that sign the other engines' is expected"
        ) from error


def _readable(name: str, path: str) -> None:
    try:
        with Path(user_path(path)).open("rb"):
            pass
    except OSError as error:
        raise SettingError(
            f"{name} {path} cannot be read ({error.strerror}); a PEM file is expected"
        ) from error


def _no_password() -> str:
    raise ValueError("the private key has a password")
