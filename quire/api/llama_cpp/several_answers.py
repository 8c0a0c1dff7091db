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
    """Write several answers. writers: of one answer each. num_together: how many of them each
    prompt of the job has."""

    def __init__(self, writers: Sequence[AnswerWriter], num_together: int) -> None:
        self._writers, self._num_together = writers, num_together
        self._last: dict[tuple[int, int], TextDelta] = {}

    def streams_of(self, limits: LineLimits) -> Callable[..., ChoiceStreams]:
        """Return what runs the prompts of the job, so that the counts of each are known here."""
        return partial(_CountedStreams, self._last, limits)

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> Any:
        """Return the body of a response that is not streamed: a list."""
        return [
            self._writer(prompt, index).whole([[choice]], self._usage(prompt, index))
            for prompt, of_prompt in enumerate(choices)
            for index, choice in enumerate(of_prompt)
        ]

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield the event of more text, and after it the last object of an answer that ends."""
        writer, usage = self._writer(prompt, delta.index), self._usage(prompt, delta.index)
        for event in writer.of_delta(prompt, delta):
            yield {**event, **writer.so_far(usage)}
        if delta.finish_reason is not None:
            yield writer.of_usage(usage)

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: events have ids and counts."""

    def of_progress(self, progress: PromptState) -> dict[str, Any]:
        """Return the event of prompt progress."""
        return self._writer(progress.index, 0).of_progress(progress)

    def so_far(self, usage: Usage) -> dict[str, Any]:
        """Return nothing: events have the timings of their own answer."""
        return {}

    def of_usage(self, usage: Usage) -> None:
        """Return None: each answer has a last object."""

    def _writer(self, prompt: int, index: int) -> AnswerWriter:
        return self._writers[prompt * self._num_together + index]

    def _usage(self, prompt: int, index: int) -> Usage:
        """Return the counts and timings of one answer."""
        delta = self._last[prompt, index]
        usage = Usage(
            prompt_tokens=delta.num_prompt_tokens,
            completion_tokens=delta.num_output_tokens,
            cached_tokens=delta.cached_tokens,
            accepted_drafts=delta.accepted_drafts,
            rejected_drafts=delta.rejected_drafts,
        )
        return replace(usage, speeds=speeds_of(usage, timings_of([delta.times])))


class _CountedStreams(LineLimitedStreams):
    """Streams that keep the last delta of each answer, by its prompt and its number there."""

    def __init__(
        self,
        last: dict[tuple[int, int], TextDelta],
        limits: LineLimits,
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(limits, *args, **options)
        self._last_of_answer = last

    def _count(self, prompt: int, delta: TextDelta) -> None:
        self._last_of_answer[prompt, delta.index] = delta
        super()._count(prompt, delta)
