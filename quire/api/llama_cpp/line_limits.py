"""Ends of an answer by its lines: `t_max_predict_ms` and `n_indent` of llama.cpp's API.

A line with less indentation than asked for ends the answer before its first letter. A time limit
counts from the first token on the engine's clock, and ends the answer with the next line break, so
that no line is cut. Entered only by requests with one of both fields. Always holds: the answer is a
beginning of the one without these fields, and ends with the reason "length".
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


def streams_of(given: Mapping[str, Any]) -> Callable[..., ChoiceStreams]:
    """Return what runs the prompts of a request. Raises InvalidParameter."""
    limits = LineLimits(
        max_ms=max(_whole(given, "t_max_predict_ms", -1), 0),
        min_indent=_whole(given, "n_indent", 0),
    )
    return ChoiceStreams if limits == LineLimits() else partial(LineLimitedStreams, limits)


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

    async def _run(self, at: int, prompt: Prompt) -> AsyncGenerator[tuple[int, TextDelta], None]:
        lines = _Lines(self._limits)
        async with aclosing(super()._run(at, prompt)) as deltas:
            async for index, delta in deltas:
                num_chars = None if delta.finish_reason else lines.end_in(delta)
                if num_chars is not None:  # leaving the stream aborts the request
                    text, reason = delta.text[:num_chars], FinishReason.LENGTH
                    yield index, structs.replace(delta, text=text, finish_reason=reason)
                    return
                yield index, delta


class _Lines:
    """The lines of an answer so far."""

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._indent: int | None = None  # of a line of which only the indentation is known

    def end_in(self, delta: TextDelta) -> int | None:
        """Return after how many characters of a delta the answer ends; None if it goes on."""
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
        is_late = self._limits.max_ms and _decode_ms(delta) > self._limits.max_ms
        return len(delta.text) if is_late and "\n" in delta.text else None


def _decode_ms(delta: TextDelta) -> float:
    """Return the milliseconds since the first token; NaN before there is one."""
    times = delta.times
    return 0.0 if times is None else times.last_token_ms - times.first_token_ms
