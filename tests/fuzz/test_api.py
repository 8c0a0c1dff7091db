"""Requests that schemathesis makes of /openapi.json, sent to a live server with a small model.

For each route: bodies that fit the document, bodies that break it in one place, every bound from
both sides; always the same requests. No answer may be a server's fault or say what the document
does not; what breaks the document must be refused; and after each the server is healthy.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from jsonschema import Draft202012Validator
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig
from starlette.routing import Route

from quire.api.openapi.document import document
from quire.api.openapi.field_schemas import Known
from quire.api.openapi.operations import OPERATIONS
from quire.base.sampling_params import SamplingParams
from tests.serve.running_server import ROOT, RunningServer

pytestmark = pytest.mark.fuzz

BOX = ROOT / "quire" / "models" / "box"
NUM_EXAMPLES = 30
MAX_TOKENS = 2
# A request of a thousand prompts takes its time on a busy machine; only what never ends fails.
PATIENCE_S = 300.0
# The first two would hold or refuse all that comes after them; the others are further names.
LEFT_OUT = (
    *("POST /admin/pause", "POST /admin/drain"),
    *("POST /apply-template", "POST /reset_prefix_cache", "POST /flush_cache"),
)
ANSWERS = ("/v1/completions", "/v1/chat/completions", "/generate")
# Of the fields that may be left out none to so many are kept: with all at once nearly every request
# is refused for two that do not go together, and nothing reaches the engine.
MAX_OPTIONAL = 5
# A promise that cannot be kept is refused, and a deadline that passes ends its request.
HONEST = {(503, "deadline_missed"), (504, "timeout")}
CHECKS_MADE = [
    *("status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("negative_data_rejection", "unsupported_method", "allow_header_conformance"),
]
load_all_checks()


def own_document() -> dict[str, Any]:
    """What the server below says of itself, known before it runs; a test holds both together."""
    routes = []
    for operation in OPERATIONS:
        method, _, path = operation.partition(" ")
        routes.append(Route(path, own_document, methods=[method]))
    known = Known(
        models=("box",),
        vocab_size=2048,
        context_tokens=512,
        max_output_tokens=MAX_TOKENS,
        defaults=SamplingParams(temperature=0.5, top_p=0.9),
    )
    return document(routes, known, lambda path: False)


DOCUMENT = own_document()
API = schemathesis.openapi.from_dict(
    {
        **DOCUMENT,
        "paths": {
            path: {
                method: operation
                for method, operation in methods.items()
                if f"{method.upper()} {path}" not in LEFT_OUT
            }
            for path, methods in DOCUMENT["paths"].items()
            if any(f"{method.upper()} {path}" not in LEFT_OUT for method in methods)
        },
    },
    config=SchemathesisConfig(seed=1),
)


class Live:
    """The server, and what it answered so far: (path, status) by how often."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.answered: Counter[tuple[str, int]] = Counter()

    def check_healthy(self) -> None:
        status, health = self.server.get("/health")
        assert (status, health["state"]) == (200, "ready"), health


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    flags = ("--max-output-tokens", str(MAX_TOKENS), "--threads", "1", "--max-num-seqs", "16")
    with RunningServer(BOX, *flags) as server:
        yield Live(server)


def test_the_document_is_the_one_the_server_has(live: Live) -> None:
    assert live.server.get("/openapi.json")[1] == json.loads(json.dumps(DOCUMENT))


@API.parametrize()
@settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_gets_what_the_document_does_not_say(case: Any, live: Live) -> None:
    if case.meta.generation.mode.is_positive and isinstance(case.body, dict):
        case.body = fewer(case.body, case.operation.path)
    response = case.call(base_url=live.server.url, timeout=PATIENCE_S)
    live.answered[case.operation.path, response.status_code] += 1
    if response.status_code >= 500 and case.operation.path != "/health":
        code = response.json()["error"]["code"]
        assert (response.status_code, code) in HONEST, response.text
    is_stream = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
    if is_stream:
        check_events(response.text, case.operation.path)
    made = [name for name in CHECKS_MADE if not is_stream or name != "response_schema_conformance"]
    case.validate_response(response, checks=CHECKS.get_by_names(made))
    live.check_healthy()


def test_of_what_was_asked_enough_was_answered(live: Live) -> None:
    """Else the requests would only have shown how things are refused."""
    for path in ANSWERS:
        assert live.answered[path, 200] >= 5, live.answered
        assert live.answered[path, 400] >= 100, live.answered


def fewer(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The body with some of its optional fields, chosen by what it holds."""
    operation = next(op for name, op in OPERATIONS.items() if name.endswith(f" {path}"))
    optional = [field for field in body if field not in operation.needed]
    salt = json.dumps(body, sort_keys=True)

    def place(field: str) -> str:
        return hashlib.sha256(f"{field}{salt}".encode()).hexdigest()

    num_kept = int(place(""), 16) % (MAX_OPTIONAL + 1)
    kept = set(sorted(optional, key=place)[:num_kept])
    return {field: body[field] for field in body if field in operation.needed or field in kept}


def check_events(text: str, path: str) -> None:
    """Each event is a chunk as the document says, or an error; the last says so."""
    events = [event.split("\n")[-1] for event in text.split("\n\n") if event.startswith("id: ")]
    assert events
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    for event in events:
        if event == "data: [DONE]":
            continue
        told = json.loads(event.removeprefix("data: "))
        schema = (
            {"$ref": "#/components/schemas/Error"} if "error" in told else content["x-quire-event"]
        )
        Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(told)
    assert events[-1] == "data: [DONE]" or '"error"' in events[-1]
