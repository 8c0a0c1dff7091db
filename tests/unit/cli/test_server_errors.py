"""What the subcommands report of a server that does not answer, refuses a key or speaks no TLS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.base.server_url import default_key
from quire.obs.recording import RecordedRequest, RecordingHeader, encode_line
from tests.unit.cli.command import quire_main

COMMANDS = {
    "chat": ("chat", "--url", "URL"),
    "why": ("why", "x", "--url", "URL"),
    "record": ("record", "URL", "new.jsonl"),
    "replay": ("replay", "old.jsonl", "--url", "URL"),
    "doctor": ("doctor", "URL", "--seconds", "0.01"),
    "bench": ("bench", "serve", "URL", "--rates", "1", "--seconds", "1"),
}
HEADER = RecordingHeader(
    quire_recording=1, created="", model="box", fingerprint="", block_tokens=16, content=False
)
REQUEST = RecordedRequest(
    arrival_ms=0.0, prompt_tokens=1, output_tokens=(1,), finish_reasons=("length",)
)


class _Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_version = self.path == "/version"
        self.send_response(200 if is_version else 401)
        self.end_headers()
        self.wfile.write(b'{"name": "quire"}' if is_version else b'{"error": {"message": "no"}}')

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The host and port of a server that knows no key."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refuses)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recording, and no key in the environment."""
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "old.jsonl").write_bytes(encode_line(HEADER) + encode_line(REQUEST))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _error_of(name: str, url: str, *words: str) -> str:
    done = quire_main(*(url if word == "URL" else word for word in COMMANDS[name]), *words)
    assert done.returncode == (2 if "(the server's words: " in done.stderr else 1)
    return done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_with_keys_is_answered_with_the_flag(
    name: str, address: str, folder: Path
) -> None:
    variable = "QUIRE_API_KEY"
    said = _error_of(name, f"http://{address}")
    assert f"needs a key: give one with --api-key, or in {variable}" in said
    said = _error_of(name, f"http://{address}/v1", "--api-key", "wrong")
    assert "does not know the key that was sent; give one of the server's keys with --api" in said
    assert "wrong" not in said


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_reads_the_key_from_the_same_variables(
    name: str, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    assert "does not know the key that was sent" in _error_of(name, f"http://{address}")
    assert default_key({"OPENAI_API_KEY": "b", "QUIRE_API_KEY": "a"}) == "a"
    assert default_key({"OPENAI_API_KEY": "b", "QUIRE_API_KEY": ""}) == "b"
    assert not default_key({})


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_that_is_not_there_is_named_without_its_password(name: str, folder: Path) -> None:
    said = _error_of(name, "http://user:secret@127.0.0.1:1")
    assert "at http://127.0.0.1:1" in said
    assert "start one with" in said
    assert "secret" not in said
    assert "Errno" not in said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_server_without_tls_is_answered_with_http(name: str, address: str, folder: Path) -> None:
    said = _error_of(name, f"https://{address}")
    assert "does not speak TLS" in said
    assert "write http:// instead\n" in said.replace("; give its address with --url", "")


@pytest.mark.parametrize("text", ["acme/tiny", "old.jsonl"])
def test_doctor_names_the_subcommand_for_models(text: str, folder: Path) -> None:
    done = quire_main("doctor", text)
    assert done.returncode == 2
    assert f"is answered by quire plan {text}\n" in done.stderr
