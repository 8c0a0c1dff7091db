"""POST /v1/embeddings and /pooling: one vector for each text or list of token ids.

A vector depends on its own input alone. Always holds: vectors come in the order of the inputs, and
the usage counts every token that was computed or found in the cache once.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.api.embeddings.fields import ENCODINGS, TASKS
from quire.api.embeddings.inputs import cutting_of, input_ids, listed_inputs, yield_regularly
from quire.api.generation.answer_json import prompt_usage_json
from quire.api.generation.choice_streams import Choice, Prompt
from quire.api.generation.fields import flag
from quire.api.generation.generate import (
    ChunkWriter,
    Envelope,
    GenerationJob,
    GenerationRequest,
    StreamOptions,
)
from quire.api.generation.usage import Usage
from quire.base.errors import InvalidParameter, WorkerError
from quire.base.show import show
from quire.engine.client.pooling_checks import pooling_of
from quire.engine.output.embedding import (
    checked_dimensions,
    pooling_params,
    prompt_text,
    vector_of,
)
from quire.engine.output.output_stream import TextDelta
from quire.models.pooling_files import PoolingSpec

# Numbers in one answer; each is up to some 25 bytes of JSON.
MAX_NUMBERS = 8_388_608


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorForm:
    """The form of a vector in an answer. kind: "embedding" or "pooling"."""

    pooling: PoolingSpec
    kind: str
    encoding: str = "float"
    dimensions: int | None = None
    normalizes: bool | None = None


class VectorWriter(ChunkWriter):
    """Write vectors as a list of objects. Nothing here is streamed."""

    def __init__(self, envelope: Envelope, form: VectorForm) -> None:
        super().__init__(envelope.frame("list"), StreamOptions())
        self._form = form

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body."""
        key = "embedding" if self._form.kind == "embedding" else "data"
        written = [
            {"object": self._form.kind, "index": index, key: self._written(choice)}
            for index, (choice,) in enumerate(choices)
        ]
        return {**self._frame, "data": written, "usage": prompt_usage_json(usage)}

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield nothing: vectors are not streamed."""
        yield from ()

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: there is no text."""

    def _written(self, choice: Choice) -> Any:
        """Return a vector as JSON has it, encoded at once, so that no list of numbers stays."""
        if choice.pooled is None:
            raise WorkerError("the engine ended a request without its embedding")
        form = self._form
        vector = vector_of(
            choice.pooled, form.pooling, dimensions=form.dimensions, normalizes=form.normalizes
        )
        if form.encoding == "base64":
            return base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode()
        return msgspec.Raw(msgspec.json.encode(vector.tolist()))


async def read_embeddings(request: GenerationRequest) -> GenerationJob:
    """Check the fields of /v1/embeddings. Raises InvalidParameter and ContextTooLong."""
    return await _read(request, "embedding")


async def read_pooling(request: GenerationRequest) -> GenerationJob:
    """Check the fields of /pooling. Raises InvalidParameter and ContextTooLong."""
    task = request.given.get("task", TASKS[0])
    if task not in TASKS:
        raise InvalidParameter(
            f"task is {show(task)}; {' or '.join(map(show, TASKS))} is allowed: one vector a text "
            "is returned, and POST /v1/score and /v1/rerank compare texts",
            param="task",
        )
    return await _read(request, "pooling")


async def _read(request: GenerationRequest, kind: str) -> GenerationJob:
    given, card = request.given, request.engine.card
    pooling = pooling_of(card)
    form = VectorForm(
        pooling=pooling,
        kind=kind,
        encoding=_encoding(given.get("encoding_format", ENCODINGS[0])),
        dimensions=checked_dimensions(given.get("dimensions"), pooling, card.name),
        normalizes=flag(given, "normalize", default=pooling.normalizes),
    )
    before = prompt_text(given.get("prompt_name"), pooling)
    entries = listed_inputs(given.get("input"), param="input")
    check_numbers(len(entries) * (form.dimensions or pooling.size))
    cutting, sampling = cutting_of(given, request.engine), pooling_params(pooling)
    prompts = []
    for at, entry in enumerate(entries):
        await yield_regularly(at)
        ids = await input_ids(request.context, entry, cutting, before=before, param="input")
        prompts.append(Prompt(token_ids=ids, sampling=sampling))
    return GenerationJob(prompts=prompts, writer=VectorWriter(request.envelope, form))


def check_numbers(num_numbers: int) -> None:
    """Refuse an answer with too many numbers."""
    if num_numbers > MAX_NUMBERS:
        raise InvalidParameter(
            f"the answer would have {num_numbers} numbers; at most {MAX_NUMBERS} a request are "
            "allowed: send fewer inputs, or ask for fewer dimensions",
            param="input",
        )


def _encoding(value: object) -> str:
    if value not in ENCODINGS:
        raise InvalidParameter(
            f'encoding_format is {show(value)}; "float" or "base64" is allowed',
            param="encoding_format",
        )
    return str(value)
