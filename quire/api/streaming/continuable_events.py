"""ContinuableEvents: a stream that also reports what is needed to continue it elsewhere.

With stream_options.include_output_ids (of other APIs than OpenAI's: include_output_ids) a comment
follows the events of each delta, and one the last event or the error that ends the stream:

    : {"output_ids": [411, 7], "output_cursor": "chatcmpl-...:1795648853:12:0:5b2c90ff", "seed": 42}
    : {"ended": null}

A client that has all comments up to one, and all events before it, has an exact prefix of the
stream: the `output_ids` joined, the last `output_cursor` and the seed (in the first comment, with
the number of prompt tokens) are the fields of a request that continues it. Where a request has
several choices, the first comment has `num_choices` and each comment the number of its `choice`;
the fields are then lists with an entry for each. `ended` is null, or the code of the error.
Comments are no events to other clients. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import msgspec

from quire.api.generation.stream_cursor import Cursor, digest_after, prompt_digest
from quire.api.http.errors import report_of
from quire.api.streaming.event_stream import Events, Put
from quire.base.errors import InvalidParameter, QuireError
from quire.engine.output.text_delta import TextDelta


class AnswerNames(Protocol):
    """The id and the time of an answer."""

    @property
    def id(self) -> str: ...

    @property
    def created_s(self) -> int: ...


class StreamFlags(Protocol):
    """Whether a stream can be resumed by its id."""

    @property
    def resumable(self) -> bool: ...


class ContinuableEvents(Events):
    """As Events."""

    def __init__(self, *arguments: Any, names: AnswerNames, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._names = names
        self._is_first = True
        prompts = self._answers.prompts
        self._num_each = prompts[0].sampling.n
        digests = [prompt_digest(prompt.token_ids) for prompt in prompts]
        self._digests = [digest for digest in digests for _ in range(self._num_each)]

    async def write(self, put: Put) -> None:
        """Hand all events to `put`, and the comment that the stream has ended with the last."""

        async def put_ended(events: list[bytes], is_last: bool) -> None:
            await put([*events, self._comment({"ended": None})] if is_last else events, is_last)

        await super().write(put_ended)

    def of_error(self, error: QuireError) -> bytes:
        """Return the event of an error that ends the stream, and the comment with its code."""
        code = report_of(error).code or "error"
        return super().of_error(error) + self._comment({"ended": code})

    def _of_delta(self, prompt: int, delta: TextDelta) -> list[bytes]:
        events = super()._of_delta(prompt, delta)
        num_choices, has_ended = len(self._digests), delta.finish_reason is not None
        if delta.prompt_progress is not None or (has_ended and num_choices == 1):
            return events
        choice = prompt * self._num_each + delta.index
        digest = self._digests[choice]
        if delta.known is not None:
            digest = digest_after(digest, delta.known.text)
        self._digests[choice] = digest = digest_after(digest, delta.text)
        cursor = Cursor(
            answer_id=self._names.id,
            created_s=self._names.created_s,
            num_events=self.number,
            held_tokens=0 if has_ended else delta.held_tokens,
            digest=digest,
            has_ended=has_ended,
        )
        fields: dict[str, Any] = {"output_ids": delta.token_ids, "output_cursor": str(cursor)}
        if num_choices > 1:
            fields["choice"] = choice
        if self._is_first:
            self._is_first = False
            prompt_tokens = sum(len(each.token_ids) for each in self._answers.prompts)
            fields |= {"seed": delta.seed, "prompt_tokens": prompt_tokens}
            if num_choices > 1:
                fields["num_choices"] = num_choices
        return [*events, self._comment(fields)]

    def _comment(self, fields: dict[str, Any]) -> bytes:
        return b": %b%b" % (msgspec.json.encode(fields), self.framing.event_end)


def continuable(names: AnswerNames, options: StreamFlags) -> Callable[..., Events]:
    """Return what makes the events of a stream that reports its output ids.

    Raises InvalidParameter for a stream that is kept for its client.
    """
    if options.resumable:
        raise InvalidParameter(
            "stream_options has include_output_ids and resumable; a client needs one of the two "
            "to go on after a break: leave the other out",
            param="stream_options",
        )
    return partial(ContinuableEvents, names=names)
