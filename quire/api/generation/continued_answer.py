"""Continue answers from their known tokens: the request fields and the streams of such a request.

`output_ids` are tokens of the answer that the client has; they count as output. Where a request has
several choices (prompt by prompt, n of each), they are a list for each, and `output_cursor` is a
cursor for each. The writer is given what the known tokens had delivered, so that it stands where
the original stood (in reasoning, a tool call, or after the first chunk), and what it writes of that
is discarded. Always holds: a choice that has ended is not computed again; a combination that cannot
be continued exactly is refused by name, and so is a cursor of another prompt or of known tokens
with another text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from quire.api.generation.choice_streams import ChoiceStreams, Prompt
from quire.api.generation.prompt_admission import PromptAdmission, senders
from quire.api.generation.stream_cursor import CURSOR_PARAM, Cursor, digest_after, prompt_digest
from quire.api.streaming.event_stream import Writer
from quire.base.errors import InvalidParameter
from quire.base.records import FinishReason, RequestOutput
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.engine.client.interleaving import interleaved
from quire.engine.client.output_ids import PARAM, check_combination
from quire.engine.client.request_builder import make_requests
from quire.engine.output.continued_stream import ContinuedStream
from quire.engine.output.text_delta import PLAIN_TEXT, TextDelta

CONTINUATION = frozenset({PARAM, CURSOR_PARAM})
# Fields of routes without stream_options, or with other ones than OpenAI's.
CONTINUED_STREAMS = CONTINUATION | {"include_output_ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownChoice:
    """What the client has of one choice. cursor: None where it was not sent: of a request of one
    choice it is not needed, and of several the choice has not begun."""

    output_ids: tuple[int, ...]
    cursor: Cursor | None

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to compute."""
        return self.cursor is not None and self.cursor.has_ended


def continued_streams(
    given: Mapping[str, Any],
    prompts: Sequence[Prompt],
    writer: Writer,
    cursors: Sequence[Cursor | None],
    vocab_size: int,
) -> Callable[..., ChoiceStreams]:
    """Return what makes the streams of a request that has fields of CONTINUATION.

    cursors: of each choice; none where output_cursor was not sent. Raises InvalidParameter.
    """
    num_choices = sum(prompt.sampling.n for prompt in prompts)
    if num_choices == 1 and len(cursors) < 2:
        known_ids = [_checked(given.get(PARAM), vocab_size)]
        cursors = cursors or (None,)
    else:
        known_ids = _of_choices(given, num_choices, vocab_size)
        _check_lengths(known_ids, prompts)
        cursors = cursors or (None,) * num_choices
    _check(given, prompts, cursors)
    known = [
        KnownChoice(output_ids=ids, cursor=cursor)
        for ids, cursor in zip(known_ids, cursors, strict=True)
    ]
    return partial(ContinuedStreams, known=known, writer=writer)


class ContinuedStreams(ChoiceStreams):
    """The choices of a request, each after its known tokens."""

    def __init__(
        self, *arguments: Any, known: Sequence[KnownChoice], writer: Writer, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._known = known
        self._num_each = self.prompts[0].sampling.n
        self._digests = [
            None if one.cursor is None or one.has_ended else one.cursor.digest for one in known
        ]
        self._num_unchecked = sum(digest is not None for digest in self._digests)
        self._writer = writer

    def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Return (prompt, delta) of what follows the known tokens."""
        return super().deltas() if self._is_one else self._of_several()

    async def _of_several(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield the deltas of several choices. One that has not begun waits until the cursors of
        the others were checked: they say whether the prompt is the same."""
        held: list[tuple[int, TextDelta]] = []
        await self._begin()
        async with aclosing(super().deltas()) as deltas:
            async for prompt, delta in deltas:
                known = self._known[prompt * self._num_each + delta.index]
                if self._num_unchecked and known.cursor is None:
                    held.append((prompt, delta))
                    continue
                while held and not self._num_unchecked:
                    yield held.pop(0)
                yield prompt, delta
        for each in held:
            yield each

    def _count(self, prompt: int, delta: TextDelta) -> None:
        """Count a delta; check what the client has, and let the writer write it."""
        super()._count(prompt, delta)
        if delta.prompt_progress is None:
            self._check_digest(prompt, delta)
        if delta.known is not None:
            self._write(prompt, structs.replace(delta.known, index=delta.index))

    async def _begin(self) -> None:
        """Bring the writer and the counts to where the choices of the original stood. What a choice
        that goes on had delivered comes with its first delta."""
        for choice, known in enumerate(self._known):
            if known.cursor is None:
                continue
            prompt, index = divmod(choice, self._num_each)
            delta = structs.replace(self._replayed(prompt, choice), index=index)
            if known.has_ended:
                self._num_open -= 1
            else:
                delta = structs.replace(delta, text="", token_chars=(), finish_reason=None)
            self._last[prompt, index] = delta
            self._write(prompt, delta)
            await asyncio.sleep(0)  # known tokens of many choices take a while
        self._before = dict(self._last)

    def _replayed(self, prompt: int, choice: int) -> TextDelta:
        """Return all that the known tokens of a choice make, as its only delta."""
        engine, asked, known = self._engine, self.prompts[prompt], self._known[choice]
        [request] = make_requests(
            engine.card,
            asked.token_ids,
            _of_one(asked.sampling),
            request_id=self._id_of(choice),
            arrival_ms=0.0,
            encoder=engine.tokenizer,
            shown_ids=asked.text_rules.shown_ids,
        )
        request = replace(request, output_ids=np.array(known.output_ids, np.int32))
        stream = ContinuedStream(engine.tokenizer, request, asked.text_rules)
        end = RequestOutput(request.request_id, (), finish_reason=FinishReason.STOP)
        delta = stream.push(end)
        assert delta is not None, "an end is never held back"
        before = delta.known or delta
        return structs.replace(
            delta,
            text=before.text if delta is before else before.text + delta.text,
            token_ids=(),
            token_chars=before.token_chars,
            known=None,
            num_output_tokens=len(known.output_ids),
        )

    def _write(self, prompt: int, delta: TextDelta) -> None:
        """Write what the client has."""
        for _ in self._writer.of_delta(prompt, delta):
            pass

    def _check_digest(self, prompt: int, delta: TextDelta) -> None:
        """Raise InvalidParameter if the known tokens make another answer than the client has."""
        choice = prompt * self._num_each + delta.index
        digest, self._digests[choice] = self._digests[choice], None
        if digest is None:
            return
        self._num_unchecked -= 1
        text = "" if delta.known is None else delta.known.text
        if digest_after(prompt_digest(self.prompts[prompt].token_ids), text) != digest:
            raise InvalidParameter(
                "output_cursor is of another prompt or another text than this request makes here "
                "with output_ids (its digest differs): send the request as it was, to a server "
                "with the same model and template",
                param=CURSOR_PARAM,
            )

    @property
    def _is_one(self) -> bool:
        return len(self._known) == 1

    def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Run each choice that has not ended as a request of its own."""
        admission = PromptAdmission(self._engine.card.queue_timeout_s)
        left = [choice for choice, known in enumerate(self._known) if not known.has_ended]
        prompts = [self.prompts[choice // self._num_each] for choice in left]

        def run(at: int, prompt: Prompt) -> AsyncGenerator[tuple[int, TextDelta], None]:
            return self._run(left[at], prompt)

        return interleaved([admission.run(send) for send in senders(run, prompts, self._terms)])

    async def _run(self, at: int, prompt: Prompt) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Run one choice."""
        number, index = divmod(at, self._num_each)
        async with aclosing(self._stream(at, prompt)) as deltas:
            async for delta in deltas:
                yield number, delta if delta.index == index else structs.replace(delta, index=index)

    def _stream(self, at: int, prompt: Prompt) -> AsyncGenerator[TextDelta, None]:
        """Return the deltas of one choice; it draws the noise that it draws among the others."""
        known = self._known[at]
        held_tokens = 0 if known.cursor is None else known.cursor.held_tokens
        return self._engine.generate(
            prompt.token_ids,
            _of_one(prompt.sampling),
            request_id=self._id_of(at),
            first_stream=at,
            cache_salt=self._cache_salt,
            terms=prompt.terms or self._terms,
            text_rules=replace(prompt.text_rules, held_tokens=held_tokens),
            output_ids=known.output_ids,
        )

    def _id_of(self, at: int) -> str:
        return self._request_id if self._is_one else f"{self._request_id}.{at}"

    def _ended(self, prompt: int, delta: TextDelta, reason: FinishReason) -> None:
        """Count the tokens that were computed here."""
        known = self._known[prompt * self._num_each + delta.index]
        num_tokens = max(delta.num_output_tokens - len(known.output_ids), 0)
        super()._ended(prompt, structs.replace(delta, num_output_tokens=num_tokens), reason)


def _of_choices(
    given: Mapping[str, Any], num_choices: int, vocab_size: int
) -> list[tuple[int, ...]]:
    """Return the known tokens of each of several choices."""
    lists = given.get(PARAM)
    is_nested = isinstance(lists, list) and all(isinstance(one, list) for one in lists)
    if not isinstance(lists, list) or not is_nested or not 2 <= num_choices == len(lists):
        found = f"a list of {len(lists or ())} lists" if is_nested else show(lists)
        wanted = "a list of token ids is needed, and one output_cursor"
        if num_choices > 1:
            wanted = (
                f"a list of {num_choices} lists of token ids is needed, one for each choice, and a "
                "list of their output_cursor"
            )
        raise InvalidParameter(f"output_ids is {found}; {wanted}", param=PARAM)
    return [_checked(one, vocab_size) for one in lists]


def _check_lengths(known_ids: Sequence[Sequence[int]], prompts: Sequence[Prompt]) -> None:
    """Refuse more known tokens than an answer may have before their text is made. The engine checks
    those of choices that it computes."""
    max_tokens = [
        prompt.sampling.max_tokens for prompt in prompts for _ in range(prompt.sampling.n)
    ]
    for choice, (ids, most) in enumerate(zip(known_ids, max_tokens, strict=True)):
        if most is not None and len(ids) > most:
            raise InvalidParameter(
                f"output_ids has {len(ids)} tokens of choice {choice}, and each answer may have "
                f"{most} (max_tokens counts them too); send the request as it was",
                param=PARAM,
            )


def _checked(token_ids: Any, vocab_size: int) -> tuple[int, ...]:
    """Return known tokens of one choice."""
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


def _check(
    given: Mapping[str, Any], prompts: Sequence[Prompt], cursors: Sequence[Cursor | None]
) -> None:
    """Refuse what cannot be continued exactly."""
    prompt, num_choices = prompts[0], sum(each.sampling.n for each in prompts)
    if len(cursors) != num_choices:
        raise InvalidParameter(
            f"output_cursor has cursors of {len(cursors)} choices, and the request has "
            f"{num_choices}; send one for each, null for a choice that has not begun",
            param=CURSOR_PARAM,
        )
    check_combination(_of_one(prompt.sampling))
    options = given.get("stream_options") or {}
    if given.get("echo"):
        why = "echo; the prompt was echoed before the first token: leave echo out"
    elif options.get("resumable"):
        why = "stream_options.resumable; a continued stream has no earlier events: leave it out"
    elif not _has_seed(given) and prompt.sampling.temperature > 0:
        why = "no seed; give the seed that the answer had (its choice has it)"
    elif not given.get("stream") and num_choices > 1:
        why = f"{num_choices} choices; the rest of such an answer has no whole form: set stream"
    elif not given.get("stream") and prompt.text_rules is not PLAIN_TEXT:
        why = "tools or reasoning; the rest of such an answer has no whole form: set stream"
    else:
        return
    raise InvalidParameter(f"output_ids is given with {why}", param=PARAM)


def _of_one(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters of one of n choices."""
    if sampling.n == 1 and sampling.best_of is None:  # nothing is made and checked again
        return sampling
    best_of = None if sampling.best_of == sampling.n else sampling.best_of
    return replace(sampling, n=1, best_of=best_of)


def _has_seed(given: Mapping[str, Any]) -> bool:
    options = given.get("options")  # Ollama's place of sampling fields
    return "seed" in given or (isinstance(options, dict) and "seed" in options)
