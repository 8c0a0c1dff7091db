"""ContinuableEvents: a stream that also reports what is needed to continue it elsewhere.

With stream_options.include_output_ids a comment follows the events of each delta:

    : {"output_ids": [411, 7], "held_tokens": 0, "seed": 42}

A client that has all comments up to one, and all events before it, has an exact prefix of the
answer: its `output_ids` joined, the last `held_tokens`, and the seed are the fields of a request
that continues it. Comments are no events to other clients. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.api.generation.choice_streams import Prompt
from quire.api.streaming.event_stream import Events
from quire.base.errors import InvalidParameter
from quire.engine.output.text_delta import TextDelta


class ContinuableEvents(Events):
    """As Events, of one prompt and one choice."""

    def _of_delta(self, prompt: int, delta: TextDelta) -> list[bytes]:
        events = super()._of_delta(prompt, delta)
        if delta.prompt_progress is not None or delta.finish_reason is not None:
            return events
        cursor: dict[str, Any] = {"output_ids": delta.token_ids, "held_tokens": delta.held_tokens}
        if self._is_first:
            self._is_first = False
            cursor["seed"] = delta.seed
        return [*events, b": %b\n\n" % msgspec.json.encode(cursor)]

    _is_first = True


def check_continuable(prompts: Sequence[Prompt], *, is_resumable: bool) -> None:
    """Refuse to report the tokens of several choices, or in a stream that is kept."""
    if is_resumable:
        raise InvalidParameter(
            "stream_options has include_output_ids and resumable; a client needs one of the two "
            "to go on after a break: leave the other out",
            param="stream_options",
        )
    if len(prompts) != 1 or prompts[0].sampling.num_sequences != 1:
        raise InvalidParameter(
            f"stream_options.include_output_ids is given with {len(prompts)} prompts and n "
            f"{prompts[0].sampling.n}; one prompt and n = 1 are allowed: leave it out",
            param="stream_options",
        )
