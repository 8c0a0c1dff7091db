"""Settings of the exchange of KV blocks between engines (disaggregated prefill and decode).

Only single values are checked here; the key file is read when the engine starts, in the process
that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from ipaddress import ip_address, ip_network
from typing import Literal

from quire.base.errors import SettingError
from quire.config.key_file import MIN_KEY_BYTES
from quire.config.settings import at_least, one_of, setting

ROLES = ("prefill", "decode", "both")
BACKENDS = ("auto", "tcp", "shm", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Exchange of KV blocks between engines."""

    role: Literal["prefill", "decode", "both"] = setting(
        "both",
        "with --kv-transfer-key-file: prefill computes prompts and hands their KV blocks over, "
        "decode fetches them, both does either; an engine of any role serves all other requests",
    )
    kv_transfer_key_file: str | None = setting(
        None,
        "exchange KV blocks with engines that have the same key: a file that only its owner can "
        f"read, with at least {MIN_KEY_BYTES} random bytes; default: no exchange",
    )
    kv_transfer_host: str = setting(
        "127.0.0.1", "address at which blocks are handed over; decode engines must reach it"
    )
    kv_transfer_port: int = setting(
        0, "port at which blocks are handed over; 0 takes a free one and prints it"
    )
    kv_transfer_bytes: int = setting(
        512 * 1024**2,
        "memory of the buffer for blocks to or from other engines, as in 2GiB; what does not fit "
        "is computed by the decode engine",
        flag="kv-transfer-size",
    )
    kv_transfer_backend: Literal["auto", "tcp", "shm", "nixl"] = setting(
        "auto",
        "how the bytes travel: tcp; shm, shared memory of two engines on one machine; auto, shm "
        "where the other engine's memory can be mapped, else tcp; nixl, the NIXL library (RDMA; "
        "quire-llm[nixl])",
    )
    kv_transfer_tls_cert: str | None = setting(
        None,
        "PEM file with this engine's certificate chain: blocks are handed over by TLS, and the "
        "certificate is shown where the engine fetches; default: no TLS",
    )
    kv_transfer_tls_key: str | None = setting(
        None,
        "PEM file with the certificate's private key; default: the file of --kv-transfer-tls-cert",
    )
    kv_transfer_tls_ca: str | None = setting(
        None,
        "PEM file with the authorities that sign the other engines' certificates: blocks are "
        "fetched by TLS, and handed over to engines with such a certificate only",
    )
    kv_transfer_timeout_s: float = setting(
        60.0,
        "seconds that a decode engine waits for the next block before it computes the prompt, and "
        "that a prefill engine keeps blocks that are not fetched",
        flag="kv-transfer-timeout",
    )
    kv_transfer_peer: tuple[str, ...] = setting(
        (),
        "prefill engine (HOST:PORT of its transfer port) that computes long prompts for this "
        "engine; may be repeated; HOST alone, or a network as in 10.0.0.0/8, only allows requests "
        "to name it as remote_host",
    )
    kv_transfer_fetch: Literal["cost", "always", "never"] = setting(
        "cost",
        "when prompts are computed by a --kv-transfer-peer: cost, if that is predicted to delay "
        "all requests less than computing them here, by the load of both; always; never",
    )

    def __post_init__(self) -> None:
        one_of("role", self.role, ROLES)
        one_of("kv_transfer_backend", self.kv_transfer_backend, BACKENDS)
        one_of("kv_transfer_fetch", self.kv_transfer_fetch, ("cost", "always", "never"))
        at_least("kv_transfer_bytes", self.kv_transfer_bytes, 1)
        at_least("kv_transfer_timeout_s", self.kv_transfer_timeout_s, 0.1)
        object.__setattr__(self, "kv_transfer_peer", tuple(self.kv_transfer_peer))
        if not 0 <= self.kv_transfer_port <= 65535:
            raise SettingError(
                f"kv_transfer_port is {self.kv_transfer_port}; a number from 0 to 65535 is allowed"
            )
        if self.kv_transfer_key_file is None:
            self._check_off()
            return
        if self.kv_transfer_key_file == "":
            raise SettingError("kv_transfer_key_file is empty; give a file, or leave it out")
        if is_wildcard(self.kv_transfer_host):
            raise SettingError(
                f"kv_transfer_host is {self.kv_transfer_host}; decode engines connect to "
                "this address: give that of the network card by which they reach this machine"
            )
        for peer in self.kv_transfer_peer:
            peer_address(peer)
        self._check_tls()
        if self.kv_transfer_peer and self.role == "prefill":
            raise SettingError(
                "kv_transfer_peer is given and role is prefill, which fetches no blocks; leave it "
                "out, or set role to decode or both"
            )

    @property
    def is_on(self) -> bool:
        """Return whether blocks are exchanged."""
        return self.kv_transfer_key_file is not None

    @property
    def hands_over(self) -> bool:
        """Return whether this engine hands blocks over."""
        return self.is_on and self.role != "decode"

    @property
    def fetches(self) -> bool:
        """Return whether this engine fetches blocks."""
        return self.is_on and self.role != "prefill"

    def _check_tls(self) -> None:
        """Raise SettingError where one direction would go without the TLS of the other."""
        cert, authorities = self.kv_transfer_tls_cert, self.kv_transfer_tls_ca
        for name in ("kv_transfer_tls_cert", "kv_transfer_tls_key", "kv_transfer_tls_ca"):
            if getattr(self, name) == "":
                raise SettingError(f"{name} is empty; give a file, or leave it out")
        if self.kv_transfer_tls_key is not None and cert is None:
            raise SettingError(
                "kv_transfer_tls_key is given without kv_transfer_tls_cert; give the certificate "
                "too"
            )
        if self.hands_over and authorities is not None and cert is None:
            raise SettingError(
                f"kv_transfer_tls_ca is given and role is {self.role}, which hands blocks over, "
                "but there is no certificate to do so by TLS; add kv_transfer_tls_cert, or leave "
                "it out"
            )
        if self.fetches and cert is not None and authorities is None:
            raise SettingError(
                f"kv_transfer_tls_cert is given and role is {self.role}, which fetches blocks, but "
                "there are no authorities to do so by TLS; add kv_transfer_tls_ca, or leave it out"
            )

    def _check_off(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if given:
            raise SettingError(
                f"{given[0]} is {getattr(self, given[0])}, and no blocks are exchanged without a "
                "shared key; add kv_transfer_key_file, or leave it out"
            )


def peer_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST, HOST:PORT, [IPV6]:PORT or a network; no port is 0.

    Raises SettingError.
    """
    if "/" in text:
        return _network(text), 0
    host, port = text, "0"
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        port = rest.removeprefix(":") if rest else "0"
        is_whole = bool(closed) and (not rest or rest.startswith(":"))
    else:
        if text.count(":") == 1:
            host, port = text.split(":")
        is_whole = True
    if not is_whole or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingError(
            f"kv_transfer_peer is {text!r}; HOST:PORT is expected, as in 10.0.0.7:7777 or "
            "[fd00::7]:7777"
        )
    return host, int(port)


def _network(text: str) -> str:
    """Return a network as in 10.0.0.0/8. Raises SettingError."""
    try:
        return str(ip_network(text))
    except ValueError as error:
        raise SettingError(
            f"kv_transfer_peer is {text!r}, which is no network ({error}); 10.0.0.0/8 or fd00::/8 "
            "is expected, or HOST:PORT"
        ) from error


def is_wildcard(host: str) -> bool:
    """Return whether a host stands for all addresses of a machine."""
    try:
        return host == "" or ip_address(host).is_unspecified
    except ValueError:
        return False
