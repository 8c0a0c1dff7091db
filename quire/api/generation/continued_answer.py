"""Continue an answer from its known tokens: the request fields and the streams of such a request.

`output_ids` are tokens of the answer that the client has; they count as output. The writer of the
answer is given what they had delivered, so that it stands where the original stood (in reasoning, a
tool call, or after the first chunk), and what it writes of that is discarded. Always holds: one
prompt and one choice; a combination that cannot be continued exactly is refused by name, and so is
a cursor of another prompt or of known tokens with another text.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from msgspec import structs

from quire.api.generation.choice_streams import ChoiceStreams, Prompt
from quire.api.generation.request_context import RequestContext
from quire.api.streaming.event_stream import Writer
from quire.base.errors import InvalidParameter
from quire.base.records import FinishReason
from quire.base.show import show
from quire.engine.client.output_ids import PARAM, check_combination
from quire.engine.output.text_delta import PLAIN_TEXT, TextDelta

CONTINUATION = frozenset({"output_ids", "output_cursor"})
# Fields of routes without stream_options, or with other ones than OpenAI's.
CONTINUED_STREAMS = CONTINUATION | {"include_output_ids"}
_DIGITS = 24  # of an id
CURSOR = "([a-z]{1,16}[-_][0-9a-f]{24}):([0-9]{1,12}):([0-9]{1,9}):([0-9]{1,6})(?::([0-9a-f]{8}))?"
_CURSOR = re.compile(CURSOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a stream stood after the tokens of output_ids: the id and time of the answer, the
    number of its last event, tokens computed after output_ids, of which part of the text may have
    been delivered, and the digest of the prompt's ids and the text so far; None: not known."""

    answer_id: str
    created_s: int
    num_events: int
    held_tokens: int
    digest: int | None

    def __str__(self) -> str:
        shown = "" if self.digest is None else f":{self.digest:08x}"
        return f"{self.answer_id}:{self.created_s}:{self.num_events}:{self.held_tokens}{shown}"


def prompt_digest(token_ids: Sequence[int]) -> int:
    """Return the digest of an answer without text."""
    return zlib.crc32(array("I", token_ids).tobytes())


def digest_after(digest: int, text: str) -> int:
    """Return the digest of an answer with more text."""
    return zlib.crc32(text.encode(errors="surrogatepass"), digest)


def read_cursor(given: Mapping[str, Any], context: RequestContext) -> Cursor:
    """Return `output_cursor`, and let the answer have its id. Raises InvalidParameter."""
    value, prefix = given["output_cursor"], context.request_id[:-_DIGITS]
    found = _CURSOR.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[1][:-_DIGITS] != prefix:
        raise InvalidParameter(
            f"output_cursor is {show(value)}; the output_cursor of a stream of this route is "
            "allowed, as its last comment had it (include_output_ids)",
            param="output_cursor",
        )
    context.answer_id = found[1]
    return Cursor(
        answer_id=found[1],
        created_s=int(found[2]),
        num_events=int(found[3]),
        held_tokens=int(found[4]),
        digest=None if found[5] is None else int(found[5], 16),
    )


def continued_streams(
    given: Mapping[str, Any],
    prompts: Sequence[Prompt],
    writer: Writer,
    cursor: Cursor | None,
    vocab_size: int,
) -> Callable[..., ChoiceStreams]:
    """Return what makes the streams of a request that has fields of CONTINUATION.

    Raises InvalidParameter.
    """
    output_ids = _output_ids(given, vocab_size)
    _check(given, prompts)
    return partial(ContinuedStreams, output_ids=output_ids, cursor=cursor, writer=writer)


class ContinuedStreams(ChoiceStreams):
    """The one answer of a request, after its known tokens."""

    def __init__(
        self,
        *arguments: Any,
        output_ids: Sequence[int],
        cursor: Cursor | None,
        writer: Writer,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._output_ids = output_ids
        self._held_tokens = 0 if cursor is None else cursor.held_tokens
        self._digest = None if cursor is None else cursor.digest
        self._writer = writer

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield (0, delta) of what follows the known tokens."""
        async with aclosing(super().deltas()) as deltas:
            async for prompt, delta in deltas:
                if self._digest is not None and delta.prompt_progress is None:
                    self._check_digest("" if delta.known is None else delta.known.text)
                if delta.known is not None:
                    for _ in self._writer.of_delta(prompt, delta.known):
                        pass  # the client has it
                yield prompt, delta

    def _check_digest(self, text: str) -> None:
        """Raise InvalidParameter if the known tokens make another answer than the client has."""
        digest, self._digest = self._digest, None
        if digest_after(prompt_digest(self.prompts[0].token_ids), text) != digest:
            raise InvalidParameter(
                "output_cursor is of another prompt or another text than this request makes here "
                "with output_ids (its digest differs): send the request as it was, to a server "
                "with the same model and template",
                param="output_cursor",
            )

    async def _run(self, at: int, prompt: Prompt) -> AsyncGenerator[tuple[int, TextDelta], None]:
        stream = self._engine.generate(
            prompt.token_ids,
            prompt.sampling,
            request_id=self._request_id,
            cache_salt=self._cache_salt,
            terms=self._terms,
            text_rules=replace(prompt.text_rules, held_tokens=self._held_tokens),
            output_ids=self._output_ids,
        )
        async with aclosing(cast(AsyncGenerator[TextDelta, None], stream)) as deltas:
            async for delta in deltas:
                yield at, delta

    def _ended(self, index: int, delta: TextDelta, reason: FinishReason) -> None:
        """Count the tokens that were computed here."""
        num_tokens = max(delta.num_output_tokens - len(self._output_ids), 0)
        super()._ended(index, structs.replace(delta, num_output_tokens=num_tokens), reason)


def _output_ids(given: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    token_ids = given.get(PARAM)
    if not isinstance(token_ids, list):
        found = "missing" if token_ids is None else show(token_ids)
        raise InvalidParameter(
            f"output_ids is {found}; a list of the answer's token ids is needed", param=PARAM
        )
    if set(map(type, token_ids)) <= {int} and (
        not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
    ):
        return tuple(token_ids)
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"output_ids holds {show(token_id)}; token ids from 0 to {vocab_size - 1} are "
                "allowed",
                param=PARAM,
            )
    return tuple(token_ids)


def _check(given: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
    """Refuse what cannot be continued exactly."""
    if len(prompts) != 1:
        raise InvalidParameter(
            f"output_ids is given with {len(prompts)} prompts; one prompt is allowed", param=PARAM
        )
    prompt = prompts[0]
    check_combination(prompt.sampling)
    options = given.get("stream_options") or {}
    if given.get("echo"):
        why = "echo; the prompt was echoed before the first token: leave echo out"
    elif options.get("resumable"):
        why = "stream_options.resumable; a continued stream has no earlier events: leave it out"
    elif not _has_seed(given) and prompt.sampling.temperature > 0:
        why = "no seed; give the seed that the answer had (its choice has it)"
    elif not given.get("stream") and prompt.text_rules is not PLAIN_TEXT:
        why = "tools or reasoning; the rest of such an answer has no whole form: set stream"
    else:
        return
    raise InvalidParameter(f"output_ids is given with {why}", param=PARAM)


def _has_seed(given: Mapping[str, Any]) -> bool:
    options = given.get("options")  # Ollama's place of sampling fields
    return "seed" in given or (isinstance(options, dict) and "seed" in options)
