"""Hostile requests are rejected with an instructive error and do not disturb other streams.

Exponential schemas, expressions and grammars, values of every wrong type in every field, giant
lists, numbers out of range, deep nesting, invalid text, forged heads and paths. test_bad_input.py
has merely wrong input.
"""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.cases import each_case
from tests.drawn import DRAWS_ALL
from tests.serve.healthy_stream import HealthyStream
from tests.serve.running_server import GIVE_UP_S, RunningServer

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ASKED = [{"role": "user", "content": "a"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}
MAX_MESSAGE_CHARS = 3000
# On a machine with many times as much work as cores the limit of time may be reached first.
BEYOND_TIME = "was not compiled within"


def doubling(keyword: str, depth: int) -> dict[str, Any]:
    """Return a schema that doubles in size with each level that is followed."""
    names = {f"a{at}": {keyword: [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(depth)}
    return {"$defs": {**names, f"a{depth}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


LISTED = [f"x{at}" for at in range(4_000)]
# Grammars that do not compile, or not within limits: (form, value, words of the error).
GRAMMARS: dict[str, tuple[str, Any, str]] = {
    "a schema that is itself": ("json", {"$ref": "#"}, "schema cannot be used"),
    "schemas in a ring": (
        "json",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "schema cannot be used",
    ),
    "a schema from another host": ("json", {"$ref": "http://localhost:1/x"}, "cannot be used"),
    "a schema from a file": ("json", {"$ref": "file:///etc/passwd"}, "cannot be used"),
    "alternatives that double": ("json", doubling("oneOf", 30), "oneOf"),
    "16 million comparisons": (
        "json",
        {"enum": LISTED, "not": {"enum": [f"y{at}" for at in range(4_000)]}},
        "not (at #/not)",
    ),
    "a million nulls": (
        "json",
        {"type": "array", "items": {"type": "null"}, "minItems": 10**6},
        "Too many items",
    ),
    "a bound of 39 digits": ("json", {"type": "integer", "minimum": -(10**38)}, "cannot be used"),
    "a range no number fits": ("json", {"type": "number", "multipleOf": 1e-300}, "cannot be used"),
    "types that are none": ("json", {"type": ["string", 7, None]}, "the type 7"),
    "a schema nothing fits": ("json", False, "cannot be used"),
    "an expression of a million": ("regex", "a{1000000}", "cannot be used"),
    "20,000 parentheses": ("regex", "(" * 20_000 + "a" + ")" * 20_000, "cannot be used"),
    "an expression that looks ahead": ("regex", "(?=a)b", "look-around"),
    "an expression that is none": ("regex", "[", "unclosed"),
    "an expression too long": ("regex", "a" * 262_145, "262144"),
    "a rule that is itself": ("grammar", "start: start", "cannot be used"),
    "a rule nobody wrote": ("grammar", "start: nothing", "nothing"),
    "an import of a file": ("grammar", "%import .secret.X\nstart: X", "cannot be used"),
    "a million of a rule": ("grammar", 'start: "a"{1000000}', "Too many items"),
    "rules that double": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"',
        "Too many items",
    ),
    "5,000 groups": ("grammar", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000, "deeply"),
    "3,000 groups of GBNF": ("grammar", "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000, "GBNF"),
    "GBNF that is itself": ("grammar", "root ::= root", "cannot be used"),
    "a grammar of null bytes": ("grammar", "\x00\x01", "cannot be used"),
    "4,097 choices": ("choice", [str(at) for at in range(4_097)], "4096"),
    "a tag without parts": ("structural_tag", {"structures": [], "triggers": []}, "structures"),
}


@each_case("case", GRAMMARS)
def test_a_hostile_grammar_is_rejected(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str
) -> None:
    form, value, words = GRAMMARS[case]
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {form: value}}
    with healthy_stream.beside():
        status, answer = beside_a_healthy_stream.post(COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "structured_outputs"), answer
    message = answer["error"]["message"]
    assert words in message or BEYOND_TIME in message
    assert len(answer["error"]["message"]) < MAX_MESSAGE_CHARS
    assert "backtrace" not in answer["error"]["message"]


# (path, body, field, words of the error)
BODIES: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "messages too many": (CHAT, {"messages": ASKED * 4_097}, "messages", "4096"),
    "tools too many": (
        CHAT,
        {"messages": ASKED, "tools": [FUNCTION] * 257},
        "tools",
        "256",
    ),
    "two tools of one name": (
        CHAT,
        {"messages": ASKED, "tools": [FUNCTION] * 2},
        "tools",
        "its own name",
    ),
    "a choice of tools that is none": (
        CHAT,
        {"messages": ASKED, "tools": [FUNCTION], "tool_choice": {"type": []}},
        "tool_choice",
        "allowed",
    ),
    "a template's text": (
        CHAT,
        {"messages": ASKED, "chat_template": "{{ ''.__class__ }}"},
        "chat_template",
        "program",
    ),
    "messages as a variable": (
        CHAT,
        {"messages": ASKED, "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
        "argument of its own",
    ),
    "documents nobody reads": (
        CHAT,
        {"messages": ASKED, "documents": [{}] * 10_000},
        "documents",
        "does not use",
    ),
    "70 levels": (COMPLETIONS, {"prompt": "a", "metadata": nested(70)}, None, "64 levels"),
    "100,000 biases": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {str(at): 1 for at in range(100_000)}},
        "logit_bias",
        "1024",
    ),
    "a bias for no number": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"\u0661": 1}},
        "logit_bias",
        "token id",
    ),
    "100,000 stop strings": (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 100_000}, "stop", "16"),
    "an empty stop string": (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop", "1 to 1024"),
    "n of 19 digits": (COMPLETIONS, {"prompt": "a", "n": 10**18}, "n", "128"),
    "2,000 choices": (COMPLETIONS, {"prompt": ["a"] * 1_000, "n": 2}, "prompt", "1024"),
    "logprobs of 30 digits": (COMPLETIONS, {"prompt": "a", "logprobs": 10**30}, "logprobs", "20"),
    "five million log-probabilities": (
        COMPLETIONS,
        {"prompt": [[7] * 30_000] * 8, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt_logprobs",
        "4194304",
    ),
    "32,769 allowed ids": (
        COMPLETIONS,
        {"prompt": "a", "allowed_token_ids": [1] * 32_769},
        "allowed_token_ids",
        "32768",
    ),
    "white space as a bad word": (
        COMPLETIONS,
        {"prompt": "a", "bad_words": ["  "]},
        "bad_words",
        "white space",
    ),
    "a salt with a null byte": (
        COMPLETIONS,
        {"prompt": "a", "cache_salt": "\0x"},
        "cache_salt",
        "U+0000",
    ),
    "100,000 unknown fields": (
        COMPLETIONS,
        {"prompt": "a", **{f"k{at}": 1 for at in range(100_000)}},
        "k0",
        "not a field",
    ),
    "a field without a name": (COMPLETIONS, {"prompt": "a", "": 1}, "", "not a field"),
    "more than the context has": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 10**9, "truncate_prompt_tokens": -1},
        "max_tokens",
        "32768",
    ),
    "a deadline beyond all years": (
        COMPLETIONS,
        {"prompt": "a", "deadline_ms": 1e308},
        "deadline_ms",
        "31536000000",
    ),
    "10,000 options of a stream": (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {f"k{at}": True for at in range(10_000)}},
        "stream_options",
        "include_usage",
    ),
    "ids that are halves": ("/detokenize", {"tokens": [1.5]}, "tokens", "306"),
    "a million ids": (GENERATE, {"tokens": [7] * 1_000_000}, "tokens", "32768"),
    "2,049 inputs": ("/v1/embeddings", {"input": ["a"] * 2_049}, "input", "2048"),
    "inputs of every kind": ("/v1/embeddings", {"input": ["a", [7], 7]}, "input", "mixes"),
    "nested inputs": ("/v1/embeddings", {"input": [[[7]]]}, "input", "token ids"),
    "dimensions of 30 digits": (
        "/v1/embeddings",
        {"input": "a", "dimensions": 10**30},
        "dimensions",
        "1 to 60",
    ),
    "a million documents": (
        "/v1/rerank",
        {"query": "a", "documents": ["b"] * 200_000},
        "documents",
        "2048",
    ),
    "a text of eight million bytes": (
        "/v1/embeddings",
        {"input": "a" * 8_000_000},
        "input",
        "32768",
    ),
    "prompt and messages": (
        "/tokenize",
        {"prompt": "a", "messages": ASKED},
        "messages",
        "give one",
    ),
}


@each_case("case", BODIES)
def test_a_hostile_body_is_rejected_by_field_name(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str
) -> None:
    path, body, param, words = BODIES[case]
    with healthy_stream.beside():
        status, answer = beside_a_healthy_stream.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 600


RAW: dict[str, tuple[bytes, str]] = {
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
    "UTF-32 without a mark": ('{"prompt": "a"}'.encode("utf-32-le"), "not JSON"),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "a"}', "not JSON"),
    "two objects": (b'{"prompt": "a"} {"prompt": "b"}', "not JSON"),
    "a comma too many": (b'{"prompt": "a",}', "not JSON"),
    "a comment": (b'{"prompt": "a" /* b */}', "not JSON"),
    "other quotes": (b"{'prompt': 'a'}", "not JSON"),
    "a line break in a text": (b'{"prompt": "a\nb"}', "not JSON"),
    "null bytes around": (b'\x00{"prompt": "a"}\x00', "not JSON"),
    "a key twice, deep inside": (
        b'{"prompt": "a", "stream": true, "stream_options": {"resumable": true, "resumable": 1}}',
        "twice",
    ),
    "a lone surrogate in a key": (rb'{"prompt": "a", "\udc00": 1}', "surrogate"),
    "a lone surrogate deep inside": (
        rb'{"prompt": "a", "structured_outputs": {"choice": ["a", "\ud83d"]}}',
        "surrogate",
    ),
    "UTF-8 longer than it need be": (b'{"prompt": "\xc0\xaf"}', "UTF-8"),
    "beyond Unicode": (b'{"prompt": "\xf4\x90\x80\x80"}', "UTF-8"),
    "41 digits": (b'{"prompt": "a", "seed": ' + b"1" * 41 + b"}", "digits"),
    "an exponent of ten digits": (b'{"prompt": "a", "temperature": 1e9999999999}', "temperature"),
    "a million decimals": (b'{"prompt": "a", "top_p": 1.' + b"1" * 1_000_000 + b"}", "top_p"),
    "65 levels of lists": (b'{"prompt": ' + b"[" * 64 + b"]" * 64 + b"}", "64 levels"),
}


@each_case("case", RAW)
def test_hostile_bytes_are_rejected(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str
) -> None:
    raw, words = RAW[case]
    with healthy_stream.beside():
        status, _, answer = beside_a_healthy_stream.request("POST", COMPLETIONS, raw)
    assert status == 400, answer
    assert words in json.loads(answer)["error"]["message"]


# Each field has every sixth wrong value, others than the fields around it, and every one in
# `make exact`.
EACH = 1 if DRAWS_ALL else 6
# How a template uses these values varies, but they never cause an error.
HINTS = frozenset({"reasoning_effort"})
WRONG: tuple[Any, ...] = (
    None, True, -7, 0.5, 10**39, 1e308, "x", "\0", [], [None], [[]], [True], ["", 1], {},
    {"a": []}, {"type": []}, [{}], [{"type": "x"}],
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "title", "asked"),
    [
        (COMPLETIONS, "CompletionRequest", {"prompt": "a"}),
        (CHAT, "ChatRequest", {"messages": ASKED}),
        (GENERATE, "GenerateRequest", {"tokens": [7]}),
        ("/tokenize", "TokenizeRequest", {"prompt": "a"}),
        ("/detokenize", "DetokenizeRequest", {"tokens": [7]}),
        ("/apply_template", "ApplyTemplateRequest", {"messages": ASKED}),
        ("/v1/embeddings", "EmbeddingsRequest", {"input": "a"}),
        ("/pooling", "PoolingRequest", {"input": [7]}),
        ("/v1/score", "ScoreRequest", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", "RerankRequest", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_value_of_a_wrong_type_is_rejected_by_field_name(
    beside_a_healthy_stream: RunningServer, path: str, title: str, asked: dict[str, Any]
) -> None:
    """Each field with each value that the server's own OpenAPI document does not allow."""
    _, document = beside_a_healthy_stream.get("/openapi.json")
    num_fields = num_refused = 0
    connection = HTTPConnection("127.0.0.1", beside_a_healthy_stream.port, timeout=GIVE_UP_S)
    for field, schema in document["components"]["schemas"][title]["properties"].items():
        if field in HINTS:
            continue
        allowed = Draft202012Validator(schema)
        num_fields += 1
        for value in WRONG[num_fields % EACH :: EACH]:
            if allowed.is_valid(value):
                continue
            connection.request("POST", path, json.dumps({**asked, field: value}))
            response = connection.getresponse()
            status, answer = response.status, json.loads(response.read())
            expected = 404 if field == "model" and isinstance(value, str) else 400
            assert status == expected, (field, value, answer)
            assert answer["error"]["param"] == field, (field, value, answer)
            assert len(answer["error"]["message"]) < 600
            num_refused += 1
    connection.close()
    assert num_refused > 300 // EACH


def head(line: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([line, b"Host: localhost", *headers, b"", b""])


POST = b"POST /v1/completions HTTP/1.1"
HEADS: dict[str, tuple[bytes, set[int]]] = {
    "129 headers": (head(b"GET /health HTTP/1.1", *[b"X: 1"] * 129), {431}),
    "a path of 70,000 letters": (head(b"GET /" + b"a" * 70_000 + b" HTTP/1.1"), {431}),
    "a path that climbs": (head(b"GET /v1/../admin/pause HTTP/1.1"), {404}),
    "a path that climbs in disguise": (head(b"GET /v1/%2e%2e/admin HTTP/1.1"), {404}),
    "two slashes": (head(b"GET //v1/models HTTP/1.1"), {404}),
    "a null byte in a path": (head(b"GET /v1/models/%00 HTTP/1.1"), {404}),
    "another host's address": (head(b"GET http://example.org/admin HTTP/1.1"), {200, 403, 404}),
    "a host that is none": (b"GET /health HTTP/1.1\r\nHost: [\r\n\r\n", {403}),
    "a method nobody knows": (head(b"BREW /v1/models HTTP/1.1"), {400, 405}),
    "a tunnel": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n", {400, 403}),
    "HTTP/2 from the start": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 403, 404, 405}),
    "length and chunks at once": (
        head(POST, b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
        {400},
    ),
    "a length of letters": (head(POST, b"Content-Length: ten") + b"{}", {400}),
    "a length beyond 64 bits": (head(POST, b"Content-Length: 99999999999999999999999"), {400, 413}),
    "a petabyte announced": (head(POST, b"Content-Length: 1000000000000000"), {413}),
    "a chunk beyond 64 bits": (
        head(POST, b"Transfer-Encoding: chunked") + b"fffffffffffffffff\r\n",
        {400},
    ),
    "a line folded": (head(b"GET /health HTTP/1.1", b"X: 1\r\n 2"), {200, 400}),
    "a name with a space": (head(b"GET /health HTTP/1.1", b"X Y: 1"), {400}),
    "bytes as a key": (head(b"GET /v1/models HTTP/1.1", b"Authorization: Bearer \xff\xfe"), {200}),
    "a place in a stream that is none": (
        head(b"GET /v1/requests/x/stream HTTP/1.1", b"Last-Event-ID: " + b"9" * 5_000),
        {404},
    ),
}


@each_case("case", HEADS)
def test_a_hostile_head_is_rejected(
    beside_a_healthy_stream: RunningServer, healthy_stream: HealthyStream, case: str
) -> None:
    raw, statuses = HEADS[case]
    address = ("127.0.0.1", beside_a_healthy_stream.port)
    with (
        healthy_stream.beside(),
        socket.create_connection(address, timeout=GIVE_UP_S) as connection,
    ):
        connection.sendall(raw)
        answer = connection.recv(65536)
    assert int(answer.split()[1]) in statuses, answer
