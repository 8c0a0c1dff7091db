"""Requests with an offer of another protocol are read as those without one."""

from __future__ import annotations

import pytest
from httptools import HttpParserError

from quire.base.plain_http_parser import PlainHttpParser

OFFERS = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\n",
]
BODIES = [
    b"\r\n",
    b"Content-Length: 0\r\n\r\n",
    b"Content-Length: 5\r\n\r\nGET /",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\n0\r\nx: y\r\n\r\n",
]


class Requests:
    """The requests that were read: their targets, headers and bodies."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.ended: list[tuple[bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.num_heads = 0
        self._url = self._body = b""
        self.parser = PlainHttpParser(self)

    def on_message_begin(self) -> None:
        self.headers, self._url, self._body = [], b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.num_heads += 1
        assert self.parser.get_http_version() == "1.1"
        assert self.parser.get_method() == b"POST"
        assert self.parser.should_keep_alive()
        assert not self.parser.should_upgrade()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.ended.append((self._url, self.headers, self._body))


def requests_in(raw: bytes, size: int) -> Requests:
    found = Requests()
    for at in range(0, len(raw), size):
        found.parser.feed_data(raw[at : at + size])
    return found


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_bodies_behind_offers_are_read(offer: bytes, size: int) -> None:
    """Also of requests that come together, and in any pieces."""
    heads = [b"POST /%d HTTP/1.1\r\nHost: a\r\n" % at for at in range(3 * len(BODIES))]
    bodies = BODIES * 3
    plain = b"".join(head + body for head, body in zip(heads, bodies, strict=True))
    offered = b"".join(
        head + offer * (at % 3 != 2) + body
        for at, (head, body) in enumerate(zip(heads, bodies, strict=True))
    )
    found, wanted = requests_in(offered, size), requests_in(plain, size)
    names = {line.partition(b":")[0].lower() for line in offer.splitlines()}
    shown = [
        (url, [header for header in headers if header[0] not in names], body)
        for url, headers, body in found.ended
    ]
    assert shown == wanted.ended
    assert found.num_heads == wanted.num_heads == len(heads)


def test_many_offers_that_come_together_are_read() -> None:
    raw = (b"POST / HTTP/1.1\r\n" + OFFERS[0] + b"Content-Length: 1\r\n\r\nx") * 3000
    found = requests_in(raw, len(raw))
    assert [body for _, _, body in found.ended] == [b"x"] * 3000


@pytest.mark.parametrize(
    "rest", [b"Transfer-Encoding: chunked\r\n\r\nno number\r\n", b"Content-Length: x\r\n\r\n"]
)
def test_a_body_that_cannot_be_read_is_an_error(rest: bytes) -> None:
    with pytest.raises(HttpParserError):
        requests_in(b"POST / HTTP/1.1\r\n" + OFFERS[0] + rest, 10_000)
