"""A TCP link between two sides that changes or cuts what one of them sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Gets bytes, and how many came before on that connection; returns what to pass on, None to cut.
Change = Callable[[bytes, int], bytes | None]


def flipping(at: int) -> Change:
    """Return a change that flips one bit of byte `at`."""

    def flip(piece: bytes, num_before: int) -> bytes:
        place = at - num_before
        if not 0 <= place < len(piece):
            return piece
        return piece[:place] + bytes([piece[place] ^ 4]) + piece[place + 1 :]

    return flip


def cutting(after: int) -> Change:
    """Return a change that ends the connection instead of passing on byte `after`."""

    def cut(piece: bytes, num_before: int) -> bytes | None:
        return None if num_before + len(piece) > after else piece

    return cut


@contextmanager
def flawed_link(port: int, change: Change) -> Iterator[int]:
    """Yield a port of this machine that leads to `port`; `change` gets what comes from there."""
    listening = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        num_bytes = 0
        with suppress(OSError):
            while piece := source.recv(65536):
                passed = change(piece, num_bytes) if is_answer else piece
                num_bytes += len(piece)
                if passed is None:
                    break
                sink.sendall(passed)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def begin(target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        threads.append(thread)
        thread.start()

    def accept() -> None:
        with suppress(OSError):
            while True:
                ends.append(near := listening.accept()[0])
                ends.append(far := socket.create_connection(("127.0.0.1", port)))
                begin(pump, near, far, False)
                begin(pump, far, near, True)

    begin(accept)
    try:
        yield listening.getsockname()[1]
    finally:
        for end in (listening, *ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in list(threads):
            thread.join(10.0)
        for end in (listening, *ends):
            end.close()
