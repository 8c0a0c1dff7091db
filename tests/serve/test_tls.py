"""HTTPS over real sockets, and certificates that cannot be used."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quire.api.admin.reload import reload_certificate
from quire.api.http import tls
from quire.api.http.sockets import check_tls
from quire.base.errors import SettingError
from quire.config.server_config import ServerConfig
from tests.serve.running_server import GIVE_UP_S
from tests.serve.scripted_server import ScriptedServer
from tests.unit.api.fake_engine import Site


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a self-signed certificate of localhost, and its key."""
    return made_in(tmp_path_factory.mktemp("tls"))


def made_in(folder: Path) -> tuple[str, str]:
    """Write a new certificate and its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=GIVE_UP_S)
    return cert, key


def test_a_client_that_trusts_the_certificate_is_answered(files: tuple[str, str]) -> None:
    cert, key = files
    context = ssl.create_default_context(cafile=cert)
    with ScriptedServer("{{ messages }}", [["a", "b"]], tls_cert=cert, tls_key=key) as server:
        port = urlsplit(server.url).port
        caller = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=GIVE_UP_S)
        try:
            caller.request("POST", "/v1/completions", json.dumps({"prompt": "a", "stream": True}))
            assert caller.getresponse().read().endswith(b"data: [DONE]\n\n")
        finally:
            caller.close()
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
        try:
            plain.request("GET", "/version")
            response = plain.getresponse()
            assert response.status == 400
            assert "use https:// in the address" in json.loads(response.read())["error"]["message"]
        finally:
            plain.close()


def test_a_handshake_has_a_time_limit(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIME_S", 0.05)
    cert, key = files
    with ScriptedServer("{{ messages }}", [["a"]], tls_cert=cert, tls_key=key) as server:
        address = ("127.0.0.1", urlsplit(server.url).port)
        with socket.create_connection(address, timeout=GIVE_UP_S) as connection:
            assert connection.recv(1) == b""


def test_unusable_files_are_reported_with_a_reason(files: tuple[str, str], tmp_path: Path) -> None:
    cert, key = files
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    check_tls(ServerConfig(tls_cert=cert, tls_key=key))
    for one, other in ((str(rubbish), key), (cert, str(rubbish)), (cert, None), ("/no", key)):
        with pytest.raises(SettingError, match="cannot be used"):
            check_tls(ServerConfig(tls_cert=one, tls_key=other))
    with pytest.raises(SettingError, match="without tls_cert"):
        ServerConfig(tls_key=key)


def shown_by(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a server with this context presents."""
    to_server, to_caller = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    caller_context.check_hostname, caller_context.verify_mode = False, ssl.CERT_NONE
    server = context.wrap_bio(to_server, to_caller, server_side=True)
    caller = caller_context.wrap_bio(to_caller, to_server)
    for side in (caller, server, caller, server):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return caller.getpeercert(binary_form=True) or b""


def test_a_reloaded_certificate_is_presented_if_it_is_usable(tmp_path: Path) -> None:
    cert, key = made_in(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    first = shown_by(context)

    async def read_again() -> str:
        site = Site(tls_cert=cert, tls_key=key)
        await reload_certificate(site.server_state, [context])
        return site.log.getvalue()

    made_in(tmp_path)
    assert "the certificate was reloaded" in asyncio.run(read_again())
    second = shown_by(context)
    assert first != second != b""
    Path(key).write_text("rubbish")
    assert "is not used" in asyncio.run(read_again())
    assert shown_by(context) == second
