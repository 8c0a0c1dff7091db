"""A writer that gives another writer's whole answer in the form of another API.

For answers that are not streamed, such as vectors. Knows neither form; not entered by a plain
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.api.generation.choice_streams import Choice
from quire.api.generation.generate import ChunkWriter, StreamOptions
from quire.api.generation.usage import Usage
from quire.api.streaming.event_stream import Writer
from quire.engine.output.output_stream import TextDelta


class ReshapedWriter(ChunkWriter):
    """Write what `reshape` makes of the body of another writer and the usage."""

    def __init__(self, writer: Writer, reshape: Callable[[dict[str, Any], Usage], Any]) -> None:
        super().__init__({}, StreamOptions())
        self._writer = writer
        self._reshape = reshape

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> Any:
        """Return the body."""
        return self._reshape(self._writer.whole(choices, usage), usage)

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield nothing: these answers are not streamed."""
        yield from ()

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: there is no text."""
