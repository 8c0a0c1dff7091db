"""quire record: the file ends with a whole line, and a silent server ends the recording."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from quire.base.errors import WorkerError
from quire.cli import record
from quire.obs import recording
from tests.unit.cli.command import quire_main

HEADER = b'{"quire_recording":1}\n'


class Server(HTTPServer):
    """Sends one line of a recording, then nothing until `goes_on` is set, then what `last` is."""

    def __init__(self, last: bytes) -> None:
        self.last, self.goes_on = last, threading.Event()
        super().__init__(("127.0.0.1", 0), _RecordRoute)


class _RecordRoute(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(HEADER), HEADER))
        self.server.goes_on.wait()
        self.wfile.write(self.server.last)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.goes_on.set()
        server.shutdown()
        thread.join()


def recorded(server: Server, file: Path) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_port}"
    done = quire_main("record", url, str(file))
    return done.returncode, done.stderr


@pytest.mark.parametrize("server", [b""], indirect=True)
def test_a_server_that_sends_nothing_ends_the_recording(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "IDLE_S", 2.0)
    code, said = recorded(server, tmp_path / "new")
    assert code == 1
    assert "has sent nothing for 2 s" in said
    assert (tmp_path / "new").read_bytes() == HEADER


@pytest.mark.parametrize(
    ("server", "code"), [(b"0\r\n\r\n", 0), (b"", 1), (b"9\r\n{", 1)], indirect=["server"]
)
def test_a_recording_that_is_broken_off_is_not_a_complete_one(
    server: Server, code: int, tmp_path: Path
) -> None:
    server.goes_on.set()
    found, said = recorded(server, tmp_path / "new")
    assert found == code
    assert ("broke the recording off" in said) == bool(code)
    assert (tmp_path / "new").read_bytes() == HEADER


class _SmallDisk(io.FileIO):
    """Takes a few bytes a call, and no more than `room` in all."""

    room = 30

    def write(self, content: bytes, /) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(content[: min(7, self.room)])
        self.room -= written
        return written


def test_the_file_ends_with_a_whole_line_when_the_disk_is_full(tmp_path: Path) -> None:
    path, written = tmp_path / "new", record._Written()
    with _SmallDisk(path, "w") as file:
        record._write(file, b"x" * 19, written)
        with pytest.raises(WorkerError, match="No space left on device; make room"):
            record._write(file, b"y" * 19, written)
    assert path.read_bytes() == b"x" * 19 + b"\n"
    assert (written.num_lines, written.num_bytes) == (1, 20)
