"""POST /api/embed and /api/embeddings: vectors of texts in the form of Ollama's API.

The fields are read as those of /v1/embeddings; app.py hands that reader in. Always holds: a text
has the vector that it has there; /api/embed cuts inputs beyond the context unless `truncate` is
false, and /api/embeddings leaves the vector as long as it is, as Ollama does. Without a text the
request would load the model, and the answer has no vector.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.fields import flag
from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    generate,
)
from quire.api.generation.reshaped_answer import ReshapedWriter
from quire.api.generation.usage import Usage
from quire.api.ollama.answer_writer import counts_json
from quire.api.ollama.dialect import OLLAMA
from quire.api.ollama.fields import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from quire.api.ollama.prompted import LoadedResponse, Read, answered_job
from quire.api.ollama.request import check_keep_alive, check_options_of_vectors
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter
from quire.base.http_apis import MODEL_TAG
from quire.base.show import show

# The counts of an answer.
COUNTS = ("total_duration", "load_duration", "prompt_eval_count")
# Fields of /v1/embeddings with the same meaning here.
_SAME = frozenset({"dimensions", "normalize", "prompt_name"})
_ANY_TEXT = "a"


def embed_routes(server_state: ServerState, read_vectors: Read) -> list[Route]:
    """Return both routes. read_vectors: checks the fields of /v1/embeddings."""

    async def embed(request: GenerationRequest) -> GenerationJob:
        return await _read_embed(request, read_vectors)

    async def embeddings(request: GenerationRequest) -> GenerationJob:
        return await _read_embeddings(request, read_vectors)

    return [
        Route("/api/embed", _endpoint(server_state, OLLAMA_EMBED, embed), methods=["POST"]),
        Route(
            "/api/embeddings",
            _endpoint(server_state, OLLAMA_EMBEDDINGS, embeddings),
            methods=["POST"],
        ),
    ]


def _endpoint(
    server_state: ServerState, honoured: frozenset[str], read: Read
) -> Callable[[Request], Awaitable[Response]]:
    # Durations are in each answer.
    route = GenerationRoute(
        honoured=honoured,
        id_prefix="embd-",
        read=read,
        dialect=OLLAMA,
        implied=frozenset({"return_timings"}),
        model_suffix=MODEL_TAG,
    )

    async def post(request: Request) -> Response:
        response = await generate(server_state, request, route)
        if isinstance(response, LoadedResponse):
            server_state.requests.end(request.state.open_request)
        return response

    return post


async def _read_embed(request: GenerationRequest, read_vectors: Read) -> GenerationJob:
    """Check the fields of /api/embed. Raises RequestError."""
    given = request.given
    _check_plain(request)
    entries = given.get("input")
    texts = entries if isinstance(entries, list) else [entries]
    if entries in ("", []):
        return await _loading_job(request, read_vectors, is_one=False)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(
            f"input is {'missing' if entries is None else show(entries)}; a text or a list of "
            "texts is needed (POST /v1/embeddings also takes token ids)",
            param="input",
        )
    fields = {name: given[name] for name in _SAME if name in given}
    fields |= {"input": texts, "normalize": flag(given, "normalize", default=True)}
    if flag(given, "truncate", default=True):
        fields["truncate_prompt_tokens"] = -1
    return await _job(request, fields, read_vectors, is_one=False)


async def _read_embeddings(request: GenerationRequest, read_vectors: Read) -> GenerationJob:
    """Check the fields of /api/embeddings. Raises RequestError."""
    given = request.given
    _check_plain(request)
    prompt = given.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidParameter(
            f"prompt is {'missing' if prompt is None else show(prompt)}; a text is needed (POST "
            "/api/embed takes several, as its input)",
            param="prompt",
        )
    if not prompt:
        return await _loading_job(request, read_vectors, is_one=True)
    fields = {name: given[name] for name in _SAME if name in given}
    fields |= {"input": prompt, "normalize": flag(given, "normalize")}
    try:
        return await _job(request, fields, read_vectors, is_one=True)
    except InvalidParameter as error:
        raise _of_prompt(error) from error


async def _job(
    request: GenerationRequest, fields: dict[str, Any], read_vectors: Read, *, is_one: bool
) -> GenerationJob:
    """Return the job of these fields of /v1/embeddings. is_one: the answer is one vector."""

    def reshaped(body: dict[str, Any], usage: Usage) -> dict[str, Any]:
        vectors = [entry["embedding"] for entry in body["data"]]
        if is_one:
            return {"embedding": vectors[0]}
        counts = counts_json(usage)
        return {
            "model": request.envelope.model,
            "embeddings": vectors,
            **{name: counts[name] for name in COUNTS},
        }

    job = await read_vectors(replace(request, given=fields))
    return replace(job, writer=ReshapedWriter(job.writer, reshaped))


async def _loading_job(
    request: GenerationRequest, read_vectors: Read, *, is_one: bool
) -> GenerationJob:
    """Return the job of a request without a text. Its other fields are checked as with one."""
    given = request.given
    fields = {name: given[name] for name in _SAME if name in given}
    flag(given, "truncate")
    job = await read_vectors(replace(request, given={**fields, "input": _ANY_TEXT}))
    content: dict[str, Any] = {"embedding": []}
    if not is_one:
        content = {"model": request.envelope.model, "embeddings": [], **dict.fromkeys(COUNTS, 0)}
    return answered_job(request, content, job.writer)


def _check_plain(request: GenerationRequest) -> None:
    """Check the fields that only Ollama has."""
    check_keep_alive(request.given)
    check_options_of_vectors(request.context)


def _of_prompt(error: InvalidParameter) -> InvalidParameter:
    if error.param != "input":
        return error
    return type(error)(str(error).replace("input", "prompt", 1), param="prompt")
