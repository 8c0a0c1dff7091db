"""POST /embedding and /embeddings: vectors of texts in the form of llama.cpp's API.

The fields are read as those of /v1/embeddings; app.py hands that reader in. Always holds: an input
has the vector that it has there; an answer is a list with one entry for each input, and each entry
has a list with one vector, since inputs are pooled.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from starlette.routing import Route

from quire.api.generation.generate import (
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    endpoint,
)
from quire.api.generation.reshaped_answer import ReshapedWriter
from quire.api.generation.usage import Usage
from quire.api.llama_cpp.dialect import LLAMA_CPP
from quire.api.llama_cpp.fields import LLAMA_EMBEDDING
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter
from quire.base.show import show

Read = Callable[[GenerationRequest], Coroutine[Any, Any, GenerationJob]]

# Values of embd_normalize: whether vectors are brought to length 1.
NORMS = {-1: False, 2: True}


def embedding_routes(server_state: ServerState, read_vectors: Read) -> list[Route]:
    """Return both routes. read_vectors: checks the fields of /v1/embeddings."""

    async def read(request: GenerationRequest) -> GenerationJob:
        return await _read(request, read_vectors)

    route = GenerationRoute(
        honoured=LLAMA_EMBEDDING, id_prefix="embd-", read=read, dialect=LLAMA_CPP
    )
    post = endpoint(server_state, route)
    return [Route(path, post, methods=["POST"]) for path in ("/embedding", "/embeddings")]


async def _read(request: GenerationRequest, read_vectors: Read) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    fields = dict(request.given)
    name = "content" if "content" in fields else "input"
    if "content" in fields and "input" in fields:
        raise InvalidParameter(
            "content and input are both given, and mean the same; leave one out", param="content"
        )
    fields["input"] = fields.pop(name, None)
    norm = fields.pop("embd_normalize", 2)
    if type(norm) is not int or norm not in NORMS:
        raise InvalidParameter(
            f"embd_normalize is {show(norm)}; 2 (length 1, the default) and -1 (as it is) are "
            "allowed: compute other norms from a vector of -1",
            param="embd_normalize",
        )
    fields["normalize"] = NORMS[norm]
    encoding = fields.pop("encoding_format", "float")
    if encoding != "float":
        raise InvalidParameter(
            f'encoding_format is {show(encoding)}; "float" is allowed here (POST /v1/embeddings '
            'also has "base64")',
            param="encoding_format",
        )
    try:
        job = await read_vectors(replace(request, given=fields))
    except InvalidParameter as error:
        if error.param != "input" or name == "input":
            raise
        raise InvalidParameter(str(error).replace("input", name, 1), param=name) from error
    return replace(job, writer=ReshapedWriter(job.writer, _listed))


def _listed(body: dict[str, Any], usage: Usage) -> list[dict[str, Any]]:
    return [{"index": entry["index"], "embedding": [entry["embedding"]]} for entry in body["data"]]
