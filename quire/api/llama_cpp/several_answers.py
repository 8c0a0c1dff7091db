"""Several answers to one request: to the prompts of a list, and `n_cmpl` answers to each prompt.

Answers are numbered prompt by prompt. A body is the list of them; a stream has their events in the
order in which they arrive, and the last object of an answer where it ends. Knows no HTTP. Always
holds: each answer has its own counts and timings, and the tokens of the same choice of
/v1/completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.api.generation.choice_streams import Choice, ChoiceStreams, PromptState
from quire.api.generation.usage import Usage, speeds_of, timings_of
from quire.api.llama_cpp.answer_writer import AnswerWriter
from quire.api.llama_cpp.line_limits import LineLimitedStreams, LineLimits
from quire.engine.output.output_stream import TextDelta


class SeveralAnswers:
    """Write several answers. writers: of one answer each, which is the one of a prompt of the
    job."""

    def __init__(self, writers: Sequence[AnswerWriter]) -> None:
        self._writers = writers
        self._last: dict[int, TextDelta] = {}

    def streams_of(self, limits: LineLimits) -> Callable[..., ChoiceStreams]:
        """Return what runs the prompts of the job, so that the counts of each are known here."""
        return partial(_CountedStreams, self._last, limits)

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> Any:
        """Return the body of a response that is not streamed: a list."""
        return [
            writer.whole([of_prompt], self._usage(at))
            for at, (writer, of_prompt) in enumerate(zip(self._writers, choices, strict=True))
        ]

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the event of more text, and after it the last object of an answer that ends."""
        writer = self._writers[prompt]
        for event in writer.of_delta(prompt, delta):
            yield {**event, **writer.so_far(self._usage(prompt))}
        if delta.finish_reason is not None:
            yield writer.of_usage(self._usage(prompt))

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: events have ids and counts."""

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Return the event of prompt progress."""
        return self._writers[progress.index].of_progress(progress)

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return nothing: events have the timings of their own answer."""
        return {}

    def of_usage(self, usage: Usage) -> None:
        """Return None: each answer has a last object."""

    def _usage(self, at: int) -> Usage:
        """Return the counts and timings of one answer."""
        delta = self._last[at]
        usage = Usage(
            prompt_tokens=delta.num_prompt_tokens,
            completion_tokens=delta.num_output_tokens,
            cached_tokens=delta.cached_tokens,
            accepted_drafts=delta.accepted_drafts,
            rejected_drafts=delta.rejected_drafts,
        )
        return replace(usage, speeds=speeds_of(usage, timings_of([delta.times])))


class _CountedStreams(LineLimitedStreams):
    """Streams that keep the last delta of each prompt."""

    def __init__(
        self, last: dict[int, TextDelta], limits: LineLimits, *args: Any, **options: Any
    ) -> None:
        super().__init__(limits, *args, **options)
        self._last_of_prompt = last

    def _count(self, prompt: int, delta: TextDelta) -> None:
        self._last_of_prompt[prompt] = delta
        super()._count(prompt, delta)
