"""Bad input over real sockets is rejected with a reason and does not disturb other streams.

Each case is sent while a stream is in progress; that stream must end with exactly its text when run
alone, and the server must answer afterwards.
"""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from tests.cases import each_case
from tests.data import outside
from tests.drawn import DRAWS_ALL
from tests.serve.healthy_stream import HealthyStream
from tests.serve.running_server import GIVE_UP_S, RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 32768


def deep(depth: int) -> bytes:
    return b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"


def with_prompt(text: bytes) -> bytes:
    return b'{"prompt": ' + text + b"}"


RAW_CASES: dict[str, tuple[bytes, int, str]] = {
    "an empty body": (b"", 400, "empty"),
    "no object": (b"[]", 400, "object"),
    "cut off in the middle": (b'{"prompt": "ab', 400, "not JSON"),
    "invalid UTF-8": (with_prompt(b'"\xff\xfe"'), 400, "UTF-8"),
    "a surrogate in UTF-8": (with_prompt(b'"\xed\xa0\x80"'), 400, "UTF-8"),
    "a lone surrogate": (with_prompt(rb'"\ud800"'), 400, "lone surrogate"),
    "a lone low surrogate in a stop string": (
        rb'{"prompt": "a", "stop": ["\udfff"]}',
        400,
        "lone surrogate",
    ),
    "10,000 levels of lists": (deep(10_000), 400, "nested"),
    "10,000 levels of objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, "nested"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    "Infinity": (b'{"prompt": "a", "top_p": Infinity}', 400, "Infinity"),
    "minus Infinity": (b'{"prompt": "a", "min_p": -Infinity}', 400, "Infinity"),
    "a number of 5,000 digits": (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", 400, "digits"),
    "a key given twice": (b'{"prompt": "a", "prompt": "b"}', 400, "twice"),
    "10 MB": (with_prompt(b'"' + b"x" * 10_000_000 + b'"'), 413, "10000014 bytes"),
    "8 MB of tokens, more values than a body may hold": (
        with_prompt(b"[" + b"1," * 3_900_000 + b"1]"),
        400,
        "1200000 values",
    ),
}


@each_case("case", RAW_CASES)
@each_case("path", [COMPLETIONS, CHAT])
def test_an_unreadable_body_disturbs_no_other_request(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str, path: str
) -> None:
    raw, status, words = RAW_CASES[case]
    with healthy_stream.beside():
        found, _, answer = beside_a_healthy_stream.request("POST", path, raw)
    error = json.loads(answer)["error"]
    assert found == status
    if path == CHAT and error["param"] == "prompt" and "surrogate" not in error["message"]:
        return  # readable, but no chat
    assert words in error["message"]


NUMBERS: tuple[Any, ...] = (
    -1,
    -(10**9),
    10**9,
    10**30,
    float("inf"),
    float("-inf"),
    0.5,
    "7",
    [],
    {},
)
NUMERIC_FIELDS = (
    "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "max_tokens", "min_tokens", "logprobs",
)  # fmt: skip


@each_case("field", NUMERIC_FIELDS)
def test_odd_numbers_are_honoured_or_rejected_by_name(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, field: str
) -> None:
    healthy_stream.start()
    statuses = []
    for value in NUMBERS:
        asked = {"prompt": "a", "max_tokens": 2, field: value}
        raw = json.dumps(asked).replace("Infinity", "1e999").encode()
        status, _, answer = beside_a_healthy_stream.request("POST", COMPLETIONS, raw)
        statuses.append(status)
        if status != 200:
            error = json.loads(answer)["error"]
            assert status == 400, answer
            assert error["param"] == field, error
    healthy_stream.check()
    assert statuses.count(400) >= 6  # at least text, lists and infinities are rejected


CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "an empty list of prompts": (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    "an empty list of ids": (COMPLETIONS, {"prompt": [[]]}, 400, "prompt"),
    "no prompt": (COMPLETIONS, {}, 400, "prompt"),
    "a prompt beyond the context": (
        COMPLETIONS,
        {"prompt": [7] * (CONTEXT + 5)},
        400,
        str(CONTEXT + 5),
    ),
    "prompt and output beyond the context": (
        COMPLETIONS,
        {"prompt": [7] * 100, "max_tokens": CONTEXT},
        400,
        str(CONTEXT),
    ),
    "a text beyond the context": (
        COMPLETIONS,
        {"prompt": "the sea " * 40_000},
        400,
        str(CONTEXT),
    ),
    "a chat beyond the context": (
        CHAT,
        {"messages": [{"role": "user", "content": "the sea " * 40_000}]},
        400,
        str(CONTEXT),
    ),
    "a token id the model does not have": (COMPLETIONS, {"prompt": [307]}, 400, "306"),
    "a negative token id": (COMPLETIONS, {"prompt": [-1]}, 400, "-1"),
    "a stop token the model does not have": (
        COMPLETIONS,
        {"prompt": "a", "stop_token_ids": [307]},
        400,
        "stop_token_ids",
    ),
    "a bias on a token the model does not have": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"307": 1}},
        400,
        "logit_bias",
    ),
    "too many stop strings": (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}, 400, "17"),
    "a stop string too long": (COMPLETIONS, {"prompt": "a", "stop": "x" * 1025}, 400, "stop"),
    "too many stop tokens": (
        COMPLETIONS,
        {"prompt": "a", "stop_token_ids": list(range(65))},
        400,
        "65",
    ),
    "n beyond its limit": (COMPLETIONS, {"prompt": "a", "n": 129}, 400, "128"),
    "logprobs beyond its limit": (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "20"),
    "top_logprobs beyond its limit": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "logprobs": True,
            "top_logprobs": 21,
        },
        400,
        "20",
    ),
    "an unknown field": (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "temperature"),
    "a tool without a function": (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
        400,
        "tools",
    ),
    "a picture": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "text",
    ),
    "another model": (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "other"),
    "a wrong type": (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream"),
}


@each_case("stream", [False, True])
@each_case("case", CASES)
def test_an_unservable_request_disturbs_no_other_request(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str, stream: bool
) -> None:
    path, body, status, words = CASES[case]
    with healthy_stream.beside():
        found, answer = beside_a_healthy_stream.post(path, {"stream": stream, **body})
    assert found == status, answer
    assert words in answer["error"]["message"]


def test_an_empty_text_is_the_begin_token_alone(beside_a_healthy_stream: RunningServer) -> None:
    status, answer = beside_a_healthy_stream.post(COMPLETIONS, {"prompt": "", "max_tokens": 3})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 1


WIRE_CASES: dict[str, bytes] = {
    "no HTTP at all": b"\x00\x01\x02\xff garbage\r\n\r\n",
    "a header of a megabyte": b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n{}",
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}"
    ),
    "a body shorter than its length": (
        b'POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"prompt"'
    ),
    "a broken chunk": (
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n"
    ),
    "a path of odd bytes": b"GET /%ff%00%0d%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@each_case("case", WIRE_CASES)
def test_broken_http_disturbs_no_other_request(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str
) -> None:
    address = ("127.0.0.1", beside_a_healthy_stream.port)
    with (
        healthy_stream.beside(),
        socket.create_connection(address, timeout=GIVE_UP_S) as connection,
    ):
        try:
            connection.sendall(WIRE_CASES[case])
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
        except ConnectionError:
            answer = b""
    assert not answer.startswith(b"HTTP/1.1 5")


def test_expect_100_continue_is_answered(server: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=GIVE_UP_S)
    raw = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Length", str(len(raw)))
    connection.putheader("Expect", "100-continue")
    connection.endheaders(raw)
    assert connection.getresponse().status == 200
    connection.close()


# A synthetic counterpart of the external list: one of each kind of troublesome string.
NAUGHTY = (
    "", " ", "\t\r\n\x0b\x0c", "\x00", "\x01\x02\x7f\x9f", "undefined", "null", "true", "NaN",
    "1e309", "-0", "0x0", "999999999999999999999999", "1/0", "\ufeff", "\u200b\u200d\u2060",
    "\u202etext\u202c", "Z\u0351\u036b\u0343a\u036c\u0348l\u0310g\u034do\u0358",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "田中さんにあげて下さい", "مرحبا", "'; DROP TABLE users; --", "<script>alert(0)</script>",
    "{{ 7 * 7 }}", "{% for x in ().__class__.__mro__ %}{% endfor %}", "${jndi:ldap://x}",
    "../../etc/passwd",
    "%s%s%n", "$(touch /tmp/x)", "`id`", "\\x00\\u0000", "\"", "'", "\\", "data: [DONE]\n\n",
    "\r\n\r\n",
    "<|end|>", "<|begin|><|system|>", "\uffff\ufffe", "\ufffd", "a" * 5_000, "\U0010ffff",
)  # fmt: skip


def survive(server: RunningServer, texts: list[str]) -> None:
    """Send each text as prompt, message, stop string, model and field; none causes an error."""
    greedy = {"temperature": 0, "max_tokens": 1}
    for at in range(0, len(texts), 16):
        part = texts[at : at + 16]
        status, answer = server.post(COMPLETIONS, {"prompt": part, **greedy})
        assert status == 200, (part, answer)
        assert len(answer["choices"]) == len(part)
        stops = [text for text in part if 0 < len(text) <= 1024]
        status, answer = server.post(COMPLETIONS, {"prompt": "a", "stop": stops, **greedy})
        assert status == 200, (part, answer)
    for text in texts:
        messages = [{"role": "user", "content": text, "name": text}]
        status, answer = server.post(CHAT, {"messages": messages, **greedy})
        assert status == 200, (text, answer)
        status, answer = server.post(COMPLETIONS, {"prompt": "a", "model": text or "x"})
        assert status == 404, (text, answer)
        status, answer = server.post(COMPLETIONS, {"prompt": "a", f"odd {text}": 1})
        assert status == 400, (text, answer)


@pytest.mark.parametrize("part", range(4))
def test_naughty_strings_are_handled_as_text(
    beside_a_healthy_stream: RunningServer, part: int
) -> None:
    survive(beside_a_healthy_stream, list(NAUGHTY[part::4]))


def test_external_naughty_strings_are_handled_as_text(
    beside_a_healthy_stream: RunningServer,
) -> None:
    texts = json.loads(outside("hostile/naughty-strings.json").read_text())
    assert len(texts) > 400
    survive(beside_a_healthy_stream, texts if DRAWS_ALL else texts[::6])
