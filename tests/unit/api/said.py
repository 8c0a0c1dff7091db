"""A response as sent, checked against the description of its route in /openapi.json.

Every exchange of these tests passes here, so an answer with a field or a status that the document
lacks fails a test.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from starlette.routing import Route

from quire.api.http.auth import is_open
from quire.api.openapi.document import document
from quire.api.openapi.field_schemas import Known
from quire.api.openapi.operation import ERRORS
from quire.api.openapi.operations import OPERATIONS
from quire.base.http_apis import api_of, served_path

EVENTS, JSON, LINES = "text/event-stream", "application/json", "application/x-ndjson"


@dataclass(slots=True)
class Reply:
    """A response as it was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def lines(self) -> list[Any]:
        """The objects of a stream with one in each line, beside comments."""
        assert self.body.endswith(b"\n")
        lines = self.body.splitlines()
        return [json.loads(line) for line in lines if not line.startswith(b":")]

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; "[DONE]" as text."""
        events = [event for event in self.body.decode().split("\n\n") if event]
        lines = [event.split("\n") for event in events if not event.startswith(":")]
        named = [line[0] for line in lines if len(line) > 1]
        assert all(each.startswith(("id: ", "event: ")) for each in named), lines
        assert all(len(line) <= 2 for line in lines), lines
        assert all(line[-1].startswith("data: ") for line in lines), lines
        data = [line[-1].removeprefix("data: ") for line in lines]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


@cache
def full_document() -> dict[str, Any]:
    """Return the document of a server with keys, which has every possible response."""
    routes = []
    for operation in OPERATIONS:
        method, _, path = operation.partition(" ")
        routes.append(Route(path, full_document, methods=[method]))
    return document(routes, Known(), lambda path: not is_open(path))


def check_said(method: str, path: str, reply: Reply) -> None:
    """Fail if the document does not describe this response."""
    if method == "OPTIONS" and reply.status == 204:  # a preflight
        return
    if reply.status == 304:  # a file of the web page that the browser has
        return
    responses = _responses(method, served_path(path))
    error = ERRORS[api_of(served_path(path))]
    if responses is None or _is_not_served(reply):
        assert reply.status in (401, 403, 404, 405, 500), reply
        validator(error).validate(reply.json)
        return
    assert str(reply.status) in responses, (path, reply.status, reply.body[:300])
    media = reply.headers["content-type"].partition(";")[0]
    content = responses[str(reply.status)]["content"][media]
    if media == JSON:
        validator(_name(content["schema"])).validate(reply.json)
    elif media in (EVENTS, LINES) and "x-quire-event" in content:
        for event in reply.events if media == EVENTS else reply.lines:
            if event != "[DONE]":
                kind = error if "error" in event else _name(content["x-quire-event"])
                validator(kind).validate(event)


def _is_not_served(reply: Reply) -> bool:
    """Return whether nothing is served at the path, or not with this method."""
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    if reply.status not in codes:
        return False
    error = reply.json["error"]
    code = error.get("code") if isinstance(error, dict) else None
    words = ("nothing is served", "is not allowed at")
    said = error if isinstance(error, str) else error["message"]
    is_plain = not isinstance(code, str) and any(each in said for each in words)
    return code == codes[reply.status] or is_plain


@cache
def validator(name: str) -> Draft202012Validator:
    """Return the validator of one of the document's schemas."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": full_document()["components"]}
    return Draft202012Validator(schema)


@cache
def _responses(method: str, path: str) -> Any:
    # Names of models have slashes, so the most specific path is tried first.
    for known, operations in sorted(full_document()["paths"].items(), key=lambda one: -len(one[0])):
        pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(known))
        if re.fullmatch(pattern, path) and method.lower() in operations:
            return operations[method.lower()]["responses"]
    return None


def _name(schema: dict[str, str]) -> str:
    return schema["$ref"].rpartition("/")[2]
