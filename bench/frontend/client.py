"""A lightweight client in its own process: python -m bench.frontend.client < JSON

Opens `streams` connections at once, sends `rounds` equal requests on each, one after the other, and
stores the bytes of the answers; they are parsed at the end. It uses only sockets and epoll, so that
it costs little beside the server. Prints one JSON object: seconds, and for each answer the number
of events, whether it ended correctly, and a digest of its text.
"""

from __future__ import annotations

import hashlib
import json
import select
import socket
import sys
import time
from collections import Counter
from typing import Any

_READ_BYTES = 1 << 18
_GIVE_UP_S = 120.0


class Stream:
    """One connection and its received bytes."""

    def __init__(self, address: tuple[str, int], request: bytes, rounds: int) -> None:
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.answers: list[bytes] = []
        self._request, self._left = request, rounds
        self._parts: list[bytes] = []
        self._body_from = self._length = -1

    def ask(self) -> None:
        """Send the next request."""
        self._left -= 1
        self._parts, self._length, self._body_from = [], -1, -1
        self.socket.sendall(self._request)  # small: it fits the socket's buffer

    def read(self) -> bool:
        """Read available bytes; return True when all answers have arrived."""
        part = self.socket.recv(_READ_BYTES)
        if not part:
            came = b"".join(self._parts)
            raise SystemExit(f"the server closed a connection after {came[:300]!r}")
        self._parts.append(part)
        if not self._is_whole(part):
            return False
        self.answers.append(b"".join(self._parts))
        if self._left == 0:
            return True
        self.ask()
        return False

    def _is_whole(self, part: bytes) -> bool:
        if self._body_from < 0:
            raw = b"".join(self._parts)
            end = raw.find(b"\r\n\r\n")
            if end < 0:
                return False
            self._body_from = end + 4
            self._length = _length_of(raw[:end])
        if self._length >= 0:
            return sum(map(len, self._parts)) >= self._body_from + self._length
        tail = part if len(part) >= 7 else b"".join(self._parts[-8:])
        return tail.endswith(b"\r\n0\r\n\r\n")


def _length_of(head: bytes) -> int:
    """Return the content-length of an answer; -1 if it is chunked."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return -1


def text_of(answer: bytes) -> tuple[str, int]:
    """Return the text and the number of events with text; raise ValueError for an invalid
    answer.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(f"not answered: {answer[:300]!r}")
    if _length_of(head) >= 0:
        choices = json.loads(body).get("choices", [])
        return "".join(choice["text"] for choice in choices), 0
    payload, at = [], 0
    while size := int(body[at : (line := body.index(b"\r\n", at))], 16):
        payload.append(body[line + 2 : line + 2 + size])
        at = line + 4 + size
    lines = b"".join(payload).split(b"\n")
    payloads = [line[6:] for line in lines if line.startswith(b"data: ")]
    if not payloads or payloads[-1] != b"[DONE]":
        raise ValueError(f"the stream did not end well: {payloads[-1:]!r}")
    if payloads[0][:1] == b"x":  # from the floor server
        return "", len(payloads) - 1
    texts = []
    for event in map(json.loads, payloads[:-1]):
        if "error" in event:
            raise ValueError(f"an error in the stream: {event['error']!r}")
        choice = event["choices"][0] if event["choices"] else {}
        texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(texts), sum(map(bool, texts))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Drive the server as described in the module docstring."""
    address = (asked["host"], asked["port"])
    body = json.dumps(asked["body"]).encode()
    request = (
        f"POST {asked['path']} HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    streams = [Stream(address, request, asked["rounds"]) for _ in range(asked["streams"])]
    poll = select.epoll()
    for stream in streams:
        poll.register(stream.socket, select.EPOLLIN)
    by_number = {stream.socket.fileno(): stream for stream in streams}
    begun_s = time.perf_counter()
    for stream in streams:
        stream.ask()
    num_open = len(streams)
    while num_open:
        found = poll.poll(_GIVE_UP_S)
        if not found:
            raise SystemExit(f"nothing came for {_GIVE_UP_S:g} s; {num_open} streams are open")
        for number, _ in found:
            if by_number[number].read():
                poll.unregister(number)
                num_open -= 1
    seconds = time.perf_counter() - begun_s
    texts = [text_of(answer) for stream in streams for answer in stream.answers]
    return {
        "seconds": seconds,
        "answers": len(texts),
        "events": dict(Counter(str(events) for _, events in texts)),
        "digests": dict(Counter(hashlib.sha256(text.encode()).hexdigest() for text, _ in texts)),
        "bytes": sum(len(answer) for stream in streams for answer in stream.answers),
    }


if __name__ == "__main__":
    print(json.dumps(run(json.load(sys.stdin))))
