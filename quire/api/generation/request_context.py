"""Open a POST request: read its body, sort its fields, check its model, tokenize its text.

Knows the table of fields and the meaning of `model` only. Long texts are tokenized in a thread.
Whether prompt and output fit together is the engine's to check. Always holds: an unknown field or
query parameter is refused, or (unknown_fields="warn") ignored, logged and listed in a header;
prompt ids are plain ints of the vocabulary; no text beyond `max_text_bytes` is tokenized.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request

from quire.api.engine_protocol import Engine
from quire.api.generation.fields import ignored_header, known_fields
from quire.api.generation.text_bounds import check_text_bytes
from quire.api.http.request_io import Deadline, body_in_time, read_object
from quire.api.server_state import ServerState
from quire.base.errors import ContextTooLong, InvalidParameter, UnknownModel
from quire.base.http_apis import FINGERPRINT_HEADER
from quire.base.show import show
from quire.engine.client.request_builder import prompt_too_long
from quire.engine.model_card import ModelCard

P = ParamSpec("P")
T = TypeVar("T")

# Texts up to this length are tokenized in about a millisecond.
_SHORT_CHARS = 4096


class RequestContext:
    """A request with its body read: the known fields, those of the query, the id, the deadline."""

    def __init__(
        self,
        server_state: ServerState,
        engine: Engine,
        *,
        given: Mapping[str, Any],
        request_id: str,
        deadline: Deadline,
        is_large: bool,
        query: Mapping[str, str],
    ) -> None:
        self.engine = engine
        self.config = server_state.config
        self.given, self.query = given, query
        self.request_id = self.answer_id = request_id
        self.deadline = deadline
        self._thread_pools = server_state.thread_pools
        self._is_large = is_large
        self._log = server_state.log
        self._fingerprint = server_state.fingerprint(engine.card)
        self._ignored: list[str] = []

    @property
    def warns(self) -> bool:
        """Whether unknown names are ignored with a warning instead of refused."""
        return self.config.unknown_fields == "warn"

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` beside the event loop: in the slow pool for a large body."""
        return await self._thread_pools.run(self._is_large, function, *args, **kwargs)

    async def run_if_large(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function`, beside the event loop for a large body."""
        if not self._is_large:
            return function(*args, **kwargs)
        return await self.run_in_thread(function, *args, **kwargs)

    async def run_slow(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the slow pool, whatever the size of the body."""
        return await self._thread_pools.run(True, function, *args, **kwargs)

    def ignore(self, *names: str) -> None:
        """Record, log and report names that are ignored."""
        if new := tuple(name for name in names if name not in self._ignored):
            self._ignored += new
            self._log.warning("fields ignored", request=self.request_id, fields=ignored_header(new))

    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        headers = {
            "x-request-id": self.request_id,
            FINGERPRINT_HEADER.decode(): self._fingerprint,
        }
        if self._ignored:
            headers["x-quire-ignored-fields"] = ignored_header(tuple(self._ignored))
        return headers


async def open_request(
    server_state: ServerState,
    request: Request,
    *,
    honoured: frozenset[str],
    id_prefix: str,
    query_params: frozenset[str] = frozenset(),
    path_model: str = "",
    model_suffix: str = "",
) -> RequestContext:
    """Read the body of a request and sort its fields. Raises RequestError, and what `engine()`
    raises. query_params, path_model, model_suffix: as of GenerationRoute."""
    engine = server_state.engine()
    deadline = Deadline(server_state.config.request_timeout_s)
    body, is_large = await body_in_time(
        read_object(request, limit_bytes=server_state.config.max_body_bytes),
        stopping=server_state.lifecycle.stopping,
        deadline=deadline,
    )
    warns = server_state.config.unknown_fields == "warn"
    given, ignored = known_fields(body, honoured, warn_unknown=warns)
    if given.keys() != body.keys():  # errors name fields as they were sent
        request.state.body = body
    if path_model:
        given["model"] = request.path_params[path_model]
    query = {name: text for name, text in request.query_params.items() if name in query_params}
    context = RequestContext(
        server_state,
        engine,
        given=given,
        request_id=f"{id_prefix}{secrets.token_hex(12)}",
        deadline=deadline,
        is_large=is_large,
        query=query,
    )
    context.ignore(*query_names(request, honoured, warns=warns, taken=query_params), *ignored)
    _check_model(given, engine, model_suffix)
    return context


def query_names(
    request: Request,
    honoured: frozenset[str],
    *,
    warns: bool,
    taken: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Return the query parameters that are ignored. Raises InvalidParameter unless `warns`.

    honoured: fields of the body. taken: parameters that the route reads.
    """
    names = tuple(name for name in request.query_params if name not in taken)
    if names and not warns:
        name, known = names[0], ", ".join(sorted(taken)) or "none"
        advice = "send it as a field of the body" if name in honoured else "leave it out"
        raise InvalidParameter(
            f"{show(name)} is a parameter of the query, and this route takes {known} there; "
            f"{advice}"
            + ("" if name in honoured else ", or start the server with --unknown-fields warn"),
            param=name[:64],
        )
    return names


def _check_model(given: Mapping[str, Any], engine: Engine, suffix: str) -> None:
    """Refuse a model name that is not served; "" and no name mean the served model."""
    name = given.get("model", "")
    if not isinstance(name, str):
        raise InvalidParameter(f"model is {show(name)}; a string is allowed", param="model")
    if name and not is_served(name, engine.card, suffix):
        raise unknown_model(name, engine.card, param="model")


def is_served(name: str, card: ModelCard, suffix: str) -> bool:
    """Return whether a name, with or without a suffix of its API, is one of the model's."""
    return name in card.names or name.removesuffix(suffix) in card.names


def unknown_model(name: str, card: ModelCard, *, param: str | None = None) -> UnknownModel:
    """Return the error for a model name that is not served, with the names that are."""
    served = ", ".join(map(show, card.names))
    return UnknownModel(
        f"model {show(name)} is not served here; served: {served} (--served-model-name adds names)",
        param=param,
    )


async def encode(
    request: RequestContext,
    text: str,
    *,
    add_special_tokens: bool,
    min_output: int = 1,
    keep_tokens: slice | None = None,
    param: str = "prompt",
) -> list[int]:
    """Return the ids of a request's `text`. Raises ContextTooLong and InvalidParameter.

    A text that is too long for the context in any tokenization, or has more than max_text_bytes, is
    refused before it is tokenized. param: the field it came in. min_output: tokens that must fit
    after it; 0 if it is only scored. keep_tokens: keep only these ids.
    """
    engine, tokenize = request.engine, request.engine.tokenizer.encode
    if keep_tokens is None:
        min_tokens = engine.tokenizer.min_num_tokens(text)
        if min_tokens + min_output > engine.card.max_model_len:
            found = f"{len(text)} characters, so at least "
            raise _too_long(engine, min_tokens, min_output, param, found)
    if len(text) <= _SHORT_CHARS:
        ids = tokenize(text, add_special_tokens=add_special_tokens)
    else:
        check_text_bytes(engine, text, param=param)
        ids = await request.run_in_thread(tokenize, text, add_special_tokens=add_special_tokens)
    if keep_tokens is not None:
        return ids[keep_tokens]
    if len(ids) + min_output > engine.card.max_model_len:
        raise _too_long(engine, len(ids), min_output, param)
    return ids


def checked_ids(
    engine: Engine,
    token_ids: Sequence[Any],
    *,
    min_output: int = 1,
    keep_tokens: slice | None = None,
    param: str = "prompt",
) -> list[int]:
    """Return the token ids of field `param`. Raises InvalidParameter, and ContextTooLong with both
    numbers."""
    card = engine.card
    if keep_tokens is not None:
        token_ids = token_ids[keep_tokens]
    if len(token_ids) + min_output > card.max_model_len:
        raise _too_long(engine, len(token_ids), min_output, param)
    if not token_ids:
        raise InvalidParameter(
            "the prompt is an empty list; give at least one token id", param=param
        )
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < card.vocab_size:
            raise InvalidParameter(
                f"the prompt holds {show(token_id)}; token ids from 0 to {card.vocab_size - 1} "
                "are allowed",
                param=param,
            )
    return list(token_ids)


def _too_long(
    engine: Engine, num_tokens: int, min_output: int, param: str, found: str = ""
) -> ContextTooLong:
    most = engine.card.max_model_len
    message = prompt_too_long(f"{found}{num_tokens} tokens", most, min_output=min_output)
    return ContextTooLong(message, param=param, lengths=(num_tokens, most))
