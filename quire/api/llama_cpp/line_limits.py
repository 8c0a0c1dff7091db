"""Ends of an answer by its lines: `t_max_predict_ms` and `n_indent` of llama.cpp's API.

A line with less indentation than asked for ends the answer before its first letter. A time limit
counts from the first token on the engine's clock, and ends the answer with the next delta that has
a line break; the delta is kept whole. Entered only by requests with one of both fields. Always
holds: the answer is a beginning of the one without these fields; one that is cut ends with the
reason "length", and has the tokens of its text, the one that the cut divides included.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from quire.api.generation.choice_streams import ChoiceStreams, Prompt
from quire.base.errors import InvalidParameter
from quire.base.records import FinishReason
from quire.base.show import show
from quire.engine.output.output_stream import TextDelta

_INDENTATION = " \t"
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """max_ms: from the first token, 0 for no limit. min_indent: characters before each line but the
    first, 0 for any."""

    max_ms: int = 0
    min_indent: int = 0


NO_LIMITS = LineLimits()


def line_limits(given: Mapping[str, Any]) -> LineLimits:
    """Return the limits of a request. Raises InvalidParameter."""
    return LineLimits(
        max_ms=max(_whole(given, "t_max_predict_ms", -1), 0),
        min_indent=_whole(given, "n_indent", 0),
    )


def streams_of(limits: LineLimits) -> Callable[..., ChoiceStreams]:
    """Return what runs the prompt of a request."""
    return ChoiceStreams if limits == NO_LIMITS else partial(LineLimitedStreams, limits)


def _whole(given: Mapping[str, Any], name: str, least: int) -> int:
    value = given.get(name, 0)
    if type(value) is not int or not least <= value <= _MOST:
        raise InvalidParameter(
            f"{name} is {show(value)}; a whole number from {least} is allowed", param=name
        )
    return value


class LineLimitedStreams(ChoiceStreams):
    """ChoiceStreams that end where a line exceeds the limits."""

    def __init__(self, limits: LineLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits

    async def _stream(self, at: int, prompt: Prompt) -> AsyncGenerator[TextDelta, None]:
        lines = AnswerLines(self._limits)
        async with aclosing(super()._stream(at, prompt)) as deltas:
            async for delta in deltas:
                cut = lines.cut(delta)
                yield cut or delta
                if cut is not None and delta.finish_reason is None:
                    return  # leaving the stream aborts the request


class AnswerLines:
    """The lines of an answer so far."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._indent: int | None = None  # of a line of which only the indentation is known
        self._num_ahead = 0  # characters that were shown before their token is delivered

    def cut(self, delta: TextDelta) -> TextDelta | None:
        """Return the last delta of an answer that ends in this one; None if it goes on."""
        num_chars = self._end_in(delta)
        if num_chars is None:
            self._num_ahead += len(delta.text) - sum(delta.token_chars)
            return None
        num_tokens, left = 0, num_chars + self._num_ahead
        for num_chars_of_token in delta.token_chars:
            if left <= 0:
                break
            left -= num_chars_of_token
            num_tokens += 1
        num_dropped = len(delta.token_chars) - num_tokens
        return structs.replace(
            delta,
            text=delta.text[:num_chars],
            token_ids=delta.token_ids[: len(delta.token_ids) - num_dropped],
            logprobs=delta.logprobs[:num_tokens],
            token_chars=delta.token_chars[:num_tokens],
            num_output_tokens=delta.num_output_tokens - num_dropped,
            finish_reason=FinishReason.LENGTH,
            stop_reason=None,
        )

    def _end_in(self, delta: TextDelta) -> int | None:
        """Return after how many characters of a delta the answer ends; None if it goes on."""
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            return None
        for at, char in enumerate(delta.text if self._limits.min_indent else ""):
            if self._indent is not None:
                if char in _INDENTATION:
                    self._indent += 1
                    continue
                if self._indent < self._limits.min_indent:
                    return at
                self._indent = None
            if char == "\n":
                self._indent = 0
        if delta.finish_reason is not None:
            return None
        is_late = self._limits.max_ms and _decode_ms(delta) > self._limits.max_ms
        return len(delta.text) if is_late and "\n" in delta.text else None


def _decode_ms(delta: TextDelta) -> float:
    """Return the milliseconds since the first token; NaN before there is one."""
    times = delta.times
    return 0.0 if times is None else times.last_token_ms - times.first_token_ms
