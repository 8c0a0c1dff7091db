"""Rendezvous of ranks on several machines: all connect to rank 0, which sends the addresses of all,
and then to each other.

Rank 0 listens at an address that all know; a rank above 0 listens at the address by which it
reaches rank 0. Before a rank is admitted, the key, the number of ranks and the version of the
package are compared. Knows no program and no process. Always holds: a connection without the key
is closed and changes nothing; the wait for ranks is limited, and its error names those missing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from quire.base.errors import SettingError, WorkerError
from quire.comm.framed_socket import FramedSocket, WrongKey

# The limit for a connection to prove the key and send its rank.
_HANDSHAKE_S = 10.0
_MAX_HELLO_BYTES = 1 << 16
_RETRY_S = 0.1
# The end of a process that has died may arrive after its successor: a child that it was about to
# start holds its connections until it runs a program of its own.
_LATE_END_S = 2.0
_MAX_HANDSHAKES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Where rank 0 listens, and what ranks must agree on. timeout_s: of the wait for all ranks."""

    host: str
    port: int
    world_size: int
    key: bytes = field(repr=False)
    version: str
    timeout_s: float


class RankConnections:
    """The connections of one rank to all others."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.sockets: dict[int, FramedSocket] = {}

    def descriptors(self) -> list[int]:
        """Return the descriptors by rank, -1 for this one; they belong to the caller."""
        return [
            self.sockets[rank].detach() if rank in self.sockets else -1
            for rank in range(self.world_size)
        ]

    def close(self) -> None:
        """Close all connections."""
        for one in self.sockets.values():
            one.close()
        self.sockets.clear()


class Listener:
    """Takes connections of ranks at an address. port: 0 takes a free one."""

    def __init__(self, host: str, port: int) -> None:
        found: OSError | None = None
        for family, kind, protocol, _, address in _addresses(host, port):
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.bind(address)
                self._socket.listen(_MAX_HANDSHAKES)
            except OSError as error:
                self._socket.close()
                found = error
            else:
                self.port = int(self._socket.getsockname()[1])
                return
        reason = "the name has no address" if found is None else found.strerror
        raise SettingError(
            f"rank 0 cannot listen at {host}:{port} ({reason}); the address must be one of this "
            "machine, by which the others reach it, and the port free: set MASTER_ADDR and "
            "MASTER_PORT"
        )

    def accept(self, timeout_s: float) -> socket.socket | None:
        """Return the next connection, or None after a time without any."""
        self._socket.settimeout(max(timeout_s, 0.001))
        try:
            return self._socket.accept()[0]
        except TimeoutError:
            return None

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()


def meet_as_rank_zero(
    point: MeetingPoint, listener: Listener, *, lost: Callable[[], str] = str
) -> RankConnections:
    """Wait for all other ranks and return the connections to them.

    lost: returns why a rank cannot come, where that is known, which ends the wait. Raises
    WorkerError where a rank does not come in time, or is of another version or number of ranks.
    """
    rendezvous = _Rendezvous(point, 0, listener, min_rank=1)
    try:
        rendezvous.wait(range(1, point.world_size), lost=lost)
        found = rendezvous.connections
        table = {
            str(rank): [one.host, rendezvous.ports[rank]] for rank, one in found.sockets.items()
        }
        for one in found.sockets.values():
            one.send_fields({"addresses": table})
        return found
    except OSError as error:
        rendezvous.end()
        raise WorkerError(
            f"a rank ended before all had connected ({error}); its own log says why"
        ) from error
    except WorkerError as error:
        rendezvous.end(str(error))
        raise
    finally:
        rendezvous.close()


def meet_rank_zero(point: MeetingPoint, rank: int) -> RankConnections:
    """Connect rank `rank`, above 0, with all others. Raises WorkerError."""
    deadline = time.monotonic() + point.timeout_s
    own = RankConnections(rank, point.world_size)
    rendezvous: _Rendezvous | None = None
    try:
        zero = _connect(point, point.host, point.port, 0, deadline)
        own.sockets[0] = zero
        listener = Listener(zero.own_host, 0)
        rendezvous = _Rendezvous(point, rank, listener, min_rank=rank + 1)
        _introduce(zero, point, rank, listener.port)
        # Rank 0 may have begun to wait later; its error names the missing ranks.
        zero.set_timeout(point.timeout_s + _HANDSHAKE_S)
        table = _answered(zero)["addresses"]
        for other in range(1, rank):
            host, port = table[str(other)]
            own.sockets[other] = _connect(point, host, port, other, deadline)
            _introduce(own.sockets[other], point, rank, 0)
        rendezvous.wait(range(rank + 1, point.world_size))
        own.sockets |= rendezvous.connections.sockets
    except (OSError, WorkerError, KeyError, ValueError) as error:
        own.close()
        if rendezvous is not None:
            rendezvous.end()
        if isinstance(error, WorkerError):
            raise
        raise WorkerError(
            f"rank {rank} has lost its connection during the start ({error}); the log of rank 0 "
            "says why"
        ) from error
    finally:
        if rendezvous is not None:
            rendezvous.close()
    for one in own.sockets.values():
        one.set_timeout(None)
    return own


class _Rendezvous:
    """The ranks that have connected to a listener. Each handshake has a thread of its own, so that
    a slow or hostile connection delays no other."""

    def __init__(
        self, point: MeetingPoint, rank: int, listener: Listener, *, min_rank: int
    ) -> None:
        self._point, self._rank, self._listener = point, rank, listener
        self._min_rank = min_rank
        self.connections = RankConnections(rank, point.world_size)
        self.ports: dict[int, int] = {}
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._wrong_key_hosts: list[str] = []
        self._refused = ""
        self._is_closed = False

    def wait(self, ranks: range, *, lost: Callable[[], str] = str) -> None:
        """Take connections until all of `ranks` are there, and none has left again. Raises
        WorkerError."""
        deadline, known = time.monotonic() + self._point.timeout_s, self.connections.sockets
        while True:
            with self._lock:
                missing = [rank for rank in ranks if rank not in known or known[rank].is_closed]
                if self._refused:
                    raise WorkerError(self._refused)
            if not missing:
                return
            if why := lost():
                raise WorkerError(why)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise WorkerError(self._missing_text(missing))
            connection = self._listener.accept(min(left_s, _RETRY_S))
            if connection is not None and self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            elif connection is not None:
                connection.close()

    def close(self) -> None:
        """Take no more ranks."""
        with self._lock:
            self._is_closed = True
        self._listener.close()

    def end(self, why: str = "") -> None:
        """Take no more ranks, and close the connections of those that have come. why: sent to
        them."""
        self.close()  # first, so that no rank is admitted behind these
        for one in self.connections.sockets.values() if why else ():
            with contextlib.suppress(OSError):
                one.send_fields({"refused": why})
        self.connections.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            one = FramedSocket(connection)
            one.set_timeout(_HANDSHAKE_S)
            try:
                one.prove(self._point.key, is_server=True)
                hello = one.receive_fields(max_bytes=_MAX_HELLO_BYTES)
                refused = self._register(one, hello)
            except WrongKey:
                with self._lock:
                    self._wrong_key_hosts.append(one.host)
                refused = "the key differs"
            if refused:
                one.close()
        except (OSError, ValueError, KeyError, TypeError):  # gone, or no rank
            connection.close()
        finally:
            self._handshakes.release()

    def _register(self, one: FramedSocket, hello: dict[str, object]) -> str:
        """Return why a rank with the right key is refused, or an empty text."""
        rank, point = hello["rank"], self._point
        if not isinstance(rank, int) or not isinstance(hello["port"], int):
            raise TypeError("a rank is a number")
        refused = ""
        if hello["version"] != point.version:
            refused = (
                f"rank {rank} ({one.host}) is of version {hello['version']} and rank "
                f"{self._rank} of {point.version}; install one version everywhere"
            )
        elif hello["world_size"] != point.world_size or rank >= point.world_size:
            refused = (
                f"rank {rank} ({one.host}) expects {hello['world_size']} ranks and rank "
                f"{self._rank} expects {point.world_size}; start all of them with one command line"
            )
        with self._lock:
            before = self.connections.sockets.get(rank)
        if before is not None:
            before.closes_within(_LATE_END_S)
        with self._lock:
            before = self.connections.sockets.get(rank)
            is_taken = rank < self._min_rank or (before is not None and not before.is_closed)
            if not refused and not is_taken and not self._is_closed:
                one.set_timeout(None)
                one.send_fields({"welcome": rank})
                if before is not None:
                    before.close()
                self.ports[rank] = hello["port"]
                self.connections.sockets[rank] = one
                return ""
            self._refused = self._refused or refused
        if not refused:
            refused = (
                f"there is a rank {rank} already; each needs a RANK of its own"
                if is_taken
                else f"rank {rank} came too late; the log of rank {self._rank} says why"
            )
        one.send_fields({"refused": refused})
        return refused

    def _missing_text(self, missing: list[int]) -> str:
        listed = ", ".join(map(str, missing))
        wrong_keys = ""
        if self._wrong_key_hosts:
            hosts = ", ".join(sorted(set(self._wrong_key_hosts)))
            wrong_keys = f"; connections with another key came from {hosts}"
        return (
            f"of {self._point.world_size} ranks, {'ranks' if len(missing) > 1 else 'rank'} "
            f"{listed} did not connect to rank {self._rank} at port {self._listener.port} within "
            f"{self._point.timeout_s:g} s{wrong_keys}; look at their logs, and whether they reach "
            "this address"
        )


def _introduce(one: FramedSocket, point: MeetingPoint, rank: int, port: int) -> None:
    """Say which rank this is. Raises WorkerError where the other end refuses it."""
    one.send_fields(
        {"rank": rank, "world_size": point.world_size, "version": point.version, "port": port}
    )
    _answered(one)


def _answered(one: FramedSocket) -> dict[str, dict[str, tuple[str, int]]]:
    fields = one.receive_fields()
    if "refused" in fields:
        raise WorkerError(f"refused by the other end: {fields['refused']}")
    return fields


def _connect(
    point: MeetingPoint, host: str, port: int, other: int, deadline: float
) -> FramedSocket:
    """Connect to a rank, which may not listen yet. Raises WorkerError."""
    found: OSError | None = None
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(left_s, 5.0))
        except OSError as error:
            found = error
            time.sleep(min(_RETRY_S, left_s))
            continue
        try:
            one = FramedSocket(connection)
            one.set_timeout(_HANDSHAKE_S)
            one.prove(point.key, is_server=False)
            return one
        except WrongKey:
            connection.close()
            raise WorkerError(
                f"what listens at {host}:{port} is not rank {other} of this model, or has another "
                "key: give all ranks the same key, and a free MASTER_PORT"
            ) from None
        except OSError as error:  # busy, or ending
            connection.close()
            found = error
            time.sleep(min(_RETRY_S, left_s))
    raise WorkerError(
        f"rank {other} could not be reached at {host}:{port} within {point.timeout_s:g} s "
        f"({found}); start rank {other}, or correct MASTER_ADDR and MASTER_PORT"
    )


def _addresses(
    host: str, port: int
) -> Iterator[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[object, ...]]]:
    try:
        yield from socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingError(
            f"the address {host} of rank 0 cannot be looked up ({error.strerror}); set MASTER_ADDR "
            "to a name or number of its machine"
        ) from error
