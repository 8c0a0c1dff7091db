"""Plain HTTP over a Unix socket: its path is known before the server starts.

For servers with a log that cannot be read; a free port would be named there only.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path

from tests.serve.running_server import GIVE_UP_S


class UnixConnection(http.client.HTTPConnection):
    """A connection to the socket at a path."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=GIVE_UP_S)
        self._path = path

    def connect(self) -> None:
        """Connect; called with the first request."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(GIVE_UP_S)
        self.sock.connect(str(self._path))


def at_socket(path: Path, method: str, url: str, body: object = None) -> tuple[int, bytes]:
    """Return status and body of one exchange."""
    connection = UnixConnection(path)
    try:
        connection.request(method, url, None if body is None else json.dumps(body))
        with connection.getresponse() as response:
            return response.status, response.read()
    finally:
        connection.close()
