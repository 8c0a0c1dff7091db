"""Build the OpenAPI 3.1 document of a server.

Built from the routes of the application, the table of fields, the bounds of the checks and the
table of errors. Always holds: every served route is in the document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from starlette.routing import BaseRoute, Route

from quire.api.anthropic.dialect import status_of
from quire.api.http.errors import HEAD_TOO_LARGE, SHAPES, ErrorShape, ForeignPage
from quire.api.openapi.answer_schemas import answer_schemas
from quire.api.openapi.field_schemas import Known, Schema, body_schema
from quire.api.openapi.operation import ERRORS, JSON, Operation
from quire.api.openapi.operations import OPERATIONS, PATH_WORDS
from quire.base.errors import NotAuthorized, QuireError, RequestError
from quire.base.http_apis import ANTHROPIC, api_of
from quire.base.version import installed_version

_PATH_NAME = re.compile(r"\{(\w+)(?::\w+)?\}")
_ABOUT = (
    "A field that would change the answer is honoured or refused by name, never ignored; null "
    "means not given. The same request with the same seed gets the same answer, bit for bit, "
    "whatever else is running."
)
# Statuses of errors, for APIs with others than OpenAI's.
_STATUSES: Mapping[str, Callable[[int], int]] = {ANTHROPIC: status_of}
# Errors of any route.
_ANYWHERE: tuple[type[QuireError], ...] = (RequestError, ForeignPage, QuireError)


def document(
    routes: Iterable[BaseRoute],
    known: Known,
    needs_key: Callable[[str], bool],
    *,
    root_path: str = "",
) -> dict[str, Any]:
    """Return the document of these routes. needs_key: whether a path needs a key. root_path: the
    prefix of all paths.

    Raises KeyError for a route that operations.py does not know.
    """
    paths: dict[str, dict[str, Any]] = {}
    schemas = answer_schemas()
    for method, path in served(routes):
        operation = OPERATIONS[f"{method} {path}"]
        if operation.body is not None:
            form = operation.fields_form
            schemas[operation.title] = body_schema(
                operation.body, operation.needed, known, own=form.rows(known), words=form.words
            )
        elif operation.plain is not None:
            schemas[operation.title] = operation.plain
        paths.setdefault(path, {})[method.lower()] = _operation(
            method, path, operation, needs_key=needs_key(path)
        )
    components: dict[str, Any] = {"schemas": schemas}
    if any(needs_key(path) for path in paths):
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": installed_version(), "description": _ABOUT},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": components,
    }


def served(routes: Iterable[BaseRoute]) -> list[tuple[str, str]]:
    """Return (method, path) of each route, as OpenAPI writes paths. HEAD is omitted beside GET."""
    return [
        (method, _PATH_NAME.sub(r"{\1}", route.path))
        for route in routes
        if isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


def _operation(method: str, path: str, operation: Operation, *, needs_key: bool) -> Schema:
    name = f"{method}{path}".lower().replace("/", "-")
    written: Schema = {
        "operationId": re.sub(r"[{}]", "", name),
        "summary": operation.says,
        "tags": [operation.tag],
        "responses": _responses(api_of(path), operation, needs_key=needs_key),
    }
    parameters = [*_in_path(path), *operation.others]
    if parameters:
        written["parameters"] = parameters
    if operation.title:
        content = {"schema": _ref(operation.title), "example": dict(operation.example)}
        written["requestBody"] = {"required": True, "content": {operation.body_media: content}}
    if needs_key:
        written["security"] = [{"key": []}]
    return written


def _in_path(path: str) -> list[Schema]:
    found = []
    for name in _PATH_NAME.findall(path):
        words, schema = PATH_WORDS[name]
        found.append(
            {"name": name, "in": "path", "required": True, "description": words, "schema": schema}
        )
    return found


def _responses(api: str, operation: Operation, *, needs_key: bool) -> Schema:
    responses: Schema = {"200": {"description": "Answered.", "content": _content_of(operation)}}
    own = (NotAuthorized,) if needs_key else ()
    shapes = [SHAPES[kind] for kind in (*_ANYWHERE, *own, *operation.errors)]
    if api in _STATUSES:
        shapes = [replace(shape, status=_STATUSES[api](shape.status)) for shape in shapes]
    for status, codes in sorted(_by_status([*shapes, HEAD_TOO_LARGE]).items()):
        responses[str(status)] = {
            "description": f"Refused or failed; code {' or '.join(codes)}.",
            "x-quire-codes": codes,
            "content": {JSON: {"schema": _ref(ERRORS[api])}},
        }
    if operation.unhealthy:
        responses["503"] = {"description": "Not healthy.", "content": _content_of(operation)}
    return responses


def _content_of(operation: Operation) -> Schema:
    content: Schema = {}
    if operation.answer:
        content[JSON] = {"schema": _ref(operation.answer)}
    if operation.event:
        content[operation.stream_media] = {
            "schema": {"type": "string"},
            "x-quire-event": _ref(operation.event),
        }
    media = (operation.media.partition(";")[0], *operation.also)
    return content or {each: {"schema": {"type": "string"}} for each in media}


def _by_status(shapes: Iterable[ErrorShape]) -> Mapping[int, list[str]]:
    found: dict[int, list[str]] = {}
    for shape in shapes:
        codes = found.setdefault(shape.status, [])
        code = "null" if shape.code is None else shape.code
        if code not in codes:
            codes.append(code)
    return found


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
