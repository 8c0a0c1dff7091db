"""Every route of /openapi.json rejects the hostile corpus in its own form of errors.

The routes are read from the server's document, so that a new one cannot be left out. A server with
batches and embeddings serves them all; a stream that runs meanwhile is not disturbed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator

from tests.drawn import each_third, examples
from tests.serve.healthy_stream import HealthyStream
from tests.serve.running_server import GIVE_UP_S, RunningServer
from tests.serve.test_hostile import HINTS, RAW, WRONG

MAX_ERROR_CHARS = 4_000
# These refuse or delay all later requests, or are read until their client leaves.
LEFT_OUT = {"/admin/pause", "/admin/drain", "/admin/record", "/health/beats"}
# In place of an id, a name or a file in a path.
NAMES = ("%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..", "%00", "a" * 5_000, quote("名前"), "%ff%fe", "x")
QUERIES = ("?x=1", "?limit=-1", "?after=%00", "?" + "a=1&" * 2_000, "?order=sideways")


class Document:
    """The document of a server, and its answers, checked."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.document = server.get("/openapi.json")[1]
        self.model = server.get("/v1/models")[1]["data"][0]["id"]
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=GIVE_UP_S)

    def operations(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield (method, path, description) of each route that may be asked."""
        for path, methods in self.document["paths"].items():
            for method, operation in methods.items():
                if path not in LEFT_OUT:
                    yield method.upper(), path, operation

    def filled(self, path: str) -> str:
        """Return a path with the served model in it, so that a request comes to its fields."""
        return path.replace("{model}", quote(self.model, safe=""))

    def body_of(self, operation: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return the title and the example of a JSON body; None for a route without one."""
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            return None
        return content["schema"]["$ref"].rpartition("/")[2], content["example"]

    def send(self, method: str, path: str, raw: bytes | None = None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"} if raw is not None else {}
        self._connection.request(method, path, raw, headers)
        with self._connection.getresponse() as response:
            return response.status, response.read()

    def close(self) -> None:
        self._connection.close()

    def check_refused(
        self, operation: dict[str, Any], answer: tuple[int, bytes], allowed: set[int]
    ) -> Any:
        """Check that an answer is a documented error of the route; return it."""
        status, raw = answer
        assert status in allowed, answer
        assert len(raw) < MAX_ERROR_CHARS, answer
        content = operation["responses"][str(status)]["content"]["application/json"]
        error = json.loads(raw)
        schema = {**content["schema"], "components": self.document["components"]}
        Draft202012Validator(schema).validate(error)
        return error


@pytest.fixture(scope="module")
def site(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Document]:
    store = tmp_path_factory.mktemp("store") / "batches.sqlite"
    flags = ("--batch-store", str(store), "--threads", "1", "--max-num-seqs", "8")
    flags += ("--convert", "embed", "--stall-seconds", "600")
    with RunningServer(tiny, *flags) as server:
        stream = HealthyStream(server)
        stream.start()
        document = Document(server)
        yield document
        document.close()
        stream.check()
        stream.finish()


def test_each_route_with_a_body_rejects_hostile_bytes(site: Document) -> None:
    num_routes = 0
    for method, path, operation in site.operations():
        if site.body_of(operation) is None:
            continue
        num_routes += 1
        at = site.filled(path)
        allowed = {400, 413, 404} if "{" in at else {400, 413}
        at = at.replace("{", "").replace("}", "")
        for case, (raw, _) in RAW.items():
            answer = site.send(method, at, raw)
            error = site.check_refused(operation, answer, allowed)
            assert "Traceback" not in str(error), (path, case)
    assert num_routes > 25


def test_a_refused_upload_is_read_to_its_end(site: Document) -> None:
    """A client that writes its whole form before it reads gets the error, not a reset."""
    head = b'--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    file = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form = head + file + b"x" * 24_000_000 + b"\r\n--X--\r\n"
    connection = HTTPConnection("127.0.0.1", site.server.port, timeout=GIVE_UP_S)
    connection.request(
        "POST", "/v1/files", form, {"content-type": "multipart/form-data; boundary=X"}
    )
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert (response.status, error["param"]) == (400, "purpose")


def test_each_route_rejects_hostile_names_and_queries(site: Document) -> None:
    num_paths = num_queries = 0
    for method, path, operation in site.operations():
        if "{" in path:
            for name in NAMES:
                at = f"{path.partition('{')[0]}{name}{path.partition('}')[2]}"
                at = at.replace("{item_id}", name)
                status, raw = site.send(method, at, b"{}" if method in ("POST", "PUT") else None)
                assert status in (400, 404, 405, 414, 431), (method, at[:80], status)
                assert len(raw) < MAX_ERROR_CHARS + len(at)
                num_paths += 1
        elif method == "GET" and path not in ("/", "/docs", "/openapi.json"):
            for query in QUERIES:
                answer = site.send(method, path + query)
                if answer[0] != 200:  # it reads no parameters, or the value is allowed
                    site.check_refused(operation, answer, {400, 404})
                    num_queries += 1
    assert num_paths > 100
    assert num_queries > 40


def test_each_field_of_each_route_rejects_a_wrong_value(site: Document) -> None:
    """One value for each field, that its schema does not allow; test_hostile.py has more of them.

    A third of the fields of each route, and all in `make exact`.
    """
    schemas, num_refused = site.document["components"]["schemas"], 0
    for method, path, operation in site.operations():
        body, at = site.body_of(operation), site.filled(path)
        if body is None or "{" in at:
            continue
        title, example = body
        for field, schema in each_third(schemas[title].get("properties", {}).items(), path):
            allowed = Draft202012Validator({**schema, "components": site.document["components"]})
            wrong = [value for value in WRONG if not allowed.is_valid(value)]
            if field in HINTS or not wrong:
                continue
            value = wrong[zlib.crc32(f"{path}{field}".encode()) % len(wrong)]
            answer = site.send(method, at, json.dumps({**example, field: value}).encode())
            assert answer[0] != 200, (path, field, value)
            error = site.check_refused(operation, answer, {400, 404})
            assert answer[0] == 400 or field == "model" or "id" in field, (path, field, value)
            assert "Traceback" not in str(error)
            num_refused += 1
    assert num_refused > examples(1_300)
