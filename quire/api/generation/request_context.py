"""What every POST route begins with: a body in time, its fields by name, the model it asks for.

Knows the table of fields and no field's meaning but `model`'s. Always holds: a field that is not
served or not known, and any parameter of the query, is refused, or (unknown_fields="warn") left
out, logged and named in a header.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from quire.api.generation.fields import ignored_header, known_fields
from quire.api.http.cancellation import Deadline, body_in_time
from quire.api.http.request_body import read_object
from quire.api.server_state import Engine, ServerState
from quire.base.errors import InvalidParameter, UnknownModel
from quire.base.show import show
from quire.engine.model_card import ModelCard

P = ParamSpec("P")
T = TypeVar("T")


class RequestContext:
    """A request whose body has been read: the fields that were given, and who is to answer."""

    def __init__(
        self,
        serving: ServerState,
        engine: Engine,
        *,
        given: Mapping[str, Any],
        request_id: str,
        deadline: Deadline,
        is_large: bool,
    ) -> None:
        self.engine = engine
        self.config = serving.config
        self.given = given
        self.request_id = request_id
        self.deadline = deadline
        self._lanes = serving.lanes
        self._is_large = is_large
        self._log = serving.log
        self._ignored: list[str] = []

    @property
    def warns(self) -> bool:
        """Whether what is not known is left out instead of refused."""
        return self.config.unknown_fields == "warn"

    async def beside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` gives, run beside the event loop: in the slow lane for a large body."""
        return await self._lanes.run(self._is_large, function, *args, **kwargs)

    async def at_length(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `beside`, for what may take its time however small the body is."""
        return await self._lanes.run(True, function, *args, **kwargs)

    def ignore(self, *names: str) -> None:
        """These were left out."""
        if names:
            self._ignored += names
            self._log.warning(
                "fields ignored", request=self.request_id, fields=ignored_header(names)
            )

    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        headers = {"x-request-id": self.request_id}
        if self._ignored:
            headers["x-quire-ignored-fields"] = ignored_header(tuple(self._ignored))
        return headers


async def open_request(
    serving: ServerState, request: Request, *, honoured: frozenset[str], prefix: str
) -> RequestContext:
    """The request, once its body is there. Raises RequestError, and what `engine()` raises."""
    engine = serving.engine()
    deadline = Deadline(serving.config.request_timeout_s)
    body, is_large = await body_in_time(
        read_object(request, limit_bytes=serving.config.max_body_bytes),
        leaving=serving.leaving,
        deadline=deadline,
    )
    warns = serving.config.unknown_fields == "warn"
    given, ignored = known_fields(body, honoured, warn_unknown=warns)
    request_id = f"{prefix}-{secrets.token_hex(12)}"
    begun = RequestContext(
        serving,
        engine,
        given=given,
        request_id=request_id,
        deadline=deadline,
        is_large=is_large,
    )
    begun.ignore(*query_names(request, honoured, warns=warns), *ignored)
    _check_model(given, engine)
    return begun


def query_names(request: Request, honoured: frozenset[str], *, warns: bool) -> tuple[str, ...]:
    """Parameters of the query that are left out, none being known; only where the server warns.

    honoured: fields of the body. Raises InvalidParameter.
    """
    names = tuple(request.query_params) if request.scope["query_string"] else ()
    if names and not warns:
        name = names[0]
        advice = "send it as a field of the body" if name in honoured else "leave it out"
        raise InvalidParameter(
            f"{show(name)} is a parameter of the query, and this route takes none there; {advice}"
            + ("" if name in honoured else ", or start the server with --unknown-fields warn"),
            param=name[:64],
        )
    return names


def _check_model(given: Mapping[str, Any], engine: Engine) -> None:
    """Raise where a request names a model that is not served; "" and no name mean the one here."""
    asked = given.get("model", "")
    if not isinstance(asked, str):
        raise InvalidParameter(f"model is {show(asked)}; a string is allowed", param="model")
    if asked and asked not in engine.card.names:
        raise unknown_model(asked, engine.card, param="model")


def unknown_model(asked: str, card: ModelCard, *, param: str | None = None) -> UnknownModel:
    """Return the error for a model name that is not served, with the names that are."""
    served = " or ".join(map(repr, card.names))
    return UnknownModel(f"model {show(asked)} is not served here; {served} is", param=param)
