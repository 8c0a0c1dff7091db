"""Each error of the tree maps to one status, one type and one code."""

from __future__ import annotations

import json

from quire.api.app import DIALECTS
from quire.api.http.dialect import Dialect, error_response
from quire.api.http.errors import (
    SHAPES,
    Aborted,
    MethodNotAllowed,
    ReadElsewhere,
    report_of,
    shape_of,
)
from quire.api.openai.dialect import OPENAI
from quire.base import errors
from quire.base.errors import (
    ContextTooLong,
    InvalidParameter,
    NotAuthorized,
    OverloadedError,
    QuireError,
    SettingError,
    ShuttingDown,
)
from tests.cases import each_case

TREE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, QuireError)
]


@each_case("kind", TREE, ids=lambda kind: kind.__name__)
def test_each_error_has_a_status_of_the_responsible_side(kind: type[QuireError]) -> None:
    status = shape_of(kind("words")).status
    # A tenant that reaches its own limit gets a status of the client's side.
    callers_fault = issubclass(kind, errors.RequestError | errors.TenantLimit)
    assert 400 <= status < 500 if callers_fault else 500 <= status < 600


def test_every_class_that_reaches_clients_has_its_own_row() -> None:
    told_apart = [kind for kind in TREE if not issubclass(kind, errors.ModelError)]
    assert set(told_apart) <= set(SHAPES)


def test_a_class_without_a_row_takes_its_nearest_ancestors() -> None:
    class OddLength(ContextTooLong):
        pass

    assert shape_of(OddLength("words")).code == "context_length_exceeded"


def test_the_body_is_openais_with_the_field_named() -> None:
    status, body = OPENAI.error(report_of(InvalidParameter("top_p is 3", param="top_p")), "req-1")
    assert status == 400
    assert body == {
        "error": {
            "message": "top_p is 3",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }
    }


def test_a_response_has_retry_after() -> None:
    response = error_response(OverloadedError("full", retry_after_s=1.2), OPENAI, request_id="r")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert json.loads(bytes(response.body))["error"]["code"] == "overloaded"


@each_case(
    ("kind", "is_final"),
    [
        *[(kind, True) for kind in (Aborted, ReadElsewhere, errors.PoisonRequest)],
        *[(kind, True) for kind in (errors.TokenizerError, SettingError, errors.CapacityError)],
        *[(kind, False) for kind in (OverloadedError, errors.WorkerError, errors.StepRowError)],
        *[(kind, False) for kind in (errors.TenantLimit, errors.TimedOut, QuireError)],
    ],
)
def test_errors_that_would_recur_are_not_to_be_resent(
    kind: type[QuireError], is_final: bool
) -> None:
    headers = error_response(kind("words"), OPENAI, request_id="r").headers
    assert headers.get("x-should-retry") == ("false" if is_final else None)


@each_case("dialect", [OPENAI, *DIALECTS.values()])
def test_each_error_with_a_code_has_it_in_a_header_in_every_api(dialect: Dialect) -> None:
    for kind in [*TREE, *SHAPES]:
        error = (
            MethodNotAllowed("words", allowed="GET") if kind is MethodNotAllowed else kind("words")
        )
        response = error_response(error, dialect, request_id="r")
        assert response.headers.get("x-quire-error-code") == shape_of(error).code, kind


def test_draining_and_busy_are_distinguished() -> None:
    assert shape_of(ShuttingDown("bye")).code == "shutting_down"


def test_a_missing_key_is_requested() -> None:
    response = error_response(NotAuthorized("no key"), OPENAI, request_id="r")
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
