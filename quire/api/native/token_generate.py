"""POST /generate: token ids in, token ids out, streamed or whole.

For clients that tokenize themselves. Sampling fields are those of completions, including `stop`
strings and grammars, which apply to the text of the ids. Its errors and events follow the dialect
that app.py hands in. Always holds: the ids of an answer are those that its usage counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.api.generation.answer_json import (
    PartedList,
    check_prompt_numbers,
    finite,
    prompt_logprobs,
    refuse_streamed_prompt,
    speeds_json,
    usage_json,
)
from quire.api.generation.choice_streams import Choice, Prompt
from quire.api.generation.fields import (
    COMPLETION_TOKENS,
    GENERATE,
    completion_tokens,
    flag,
    sampling_of,
)
from quire.api.generation.generate import (
    ChunkWriter,
    Envelope,
    GenerationJob,
    GenerationRequest,
    GenerationRoute,
    StreamOptions,
)
from quire.api.generation.request_context import checked_ids
from quire.api.generation.truncation import kept_tokens
from quire.api.generation.usage import Usage
from quire.api.http.dialect import Dialect
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import ALL_LOGPROBS
from quire.base.show import show
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText


async def read_job(request: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises InvalidParameter and ContextTooLong naming the field."""
    given, engine = request.given, request.engine
    tokens = given.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidParameter(
            f"tokens is {'missing' if tokens is None else show(tokens)}; a list of token ids is "
            "needed, such as [1, 2]",
            param="tokens",
        )
    sampling = sampling_of(
        given,
        engine.default_sampling(),
        logprobs=given.get("logprobs"),
        tokenizer=engine.tokenizer,
    )
    token_ids = checked_ids(
        engine,
        tokens,
        min_output=int(sampling.max_tokens != 0),
        keep_tokens=kept_tokens(given, engine, completion_tokens(sampling)),
        param="tokens",
    )
    if sampling.prompt_logprobs is not None:
        refuse_streamed_prompt(sampling.prompt_logprobs, stream=flag(given, "stream"))
        num_numbers = len(token_ids) * (1 + max(sampling.prompt_logprobs, 0))
        check_prompt_numbers(num_numbers, param="prompt_logprobs")
    chosen = request.limited(sampling, len(token_ids), default_tokens=COMPLETION_TOKENS)
    writer = TokenGenerateWriter(
        request.envelope,
        num_top=chosen.logprobs,
        num_prompt_top=chosen.prompt_logprobs,
        options=request.stream_options,
    )
    return GenerationJob(prompts=[Prompt(token_ids=token_ids, sampling=chosen)], writer=writer)


def route_of(dialect: Dialect) -> GenerationRoute:
    """Return the route. dialect: of its errors and events."""
    return GenerationRoute(honoured=GENERATE, id_prefix="gen-", read=read_job, dialect=dialect)


class TokenGenerateWriter(ChunkWriter):
    """Write one answer as a `generation` object, or as chunks."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        num_top: int | None,
        num_prompt_top: int | None,
        options: StreamOptions,
    ) -> None:
        super().__init__(envelope.frame("generation"), options)
        self._num_top = num_top
        self._num_prompt_top = num_prompt_top
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        written = [
            {
                "index": index,
                "tokens": choice.token_ids,
                **self._logprobs(choice.logprobs, whole=True),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "seed": choice.seed,
            }
            for index, choice in enumerate(choices[0])
        ]
        return {
            **self._frame,
            "choices": written,
            "usage": usage_json(usage),
            **speeds_json(usage),
            **self._scored(choices[0][0].prompt_logprobs),
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Yield one chunk: the new ids; the first of a choice has its seed."""
        choice: dict[str, Any] = {
            "index": delta.index,
            "tokens": delta.token_ids,
            **self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            choice["seed"] = delta.seed
        if delta.finish_reason is not None:
            choice |= {"stop_reason": delta.stop_reason, "seed": delta.seed}
        yield {**self._frame, "choices": [choice], **self._scored(delta.prompt_logprobs)}

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """Return None: chunks have ids, not text."""

    def _scored(self, tokens: Sequence[TokenText | None]) -> dict[str, Any]:
        """Return the log-probabilities of the prompt, which an answer has once, if requested."""
        if not tokens or self._num_prompt_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(tokens, self._num_prompt_top)}

    def _logprobs(self, tokens: Sequence[TokenText], *, whole: bool = False) -> dict[str, Any]:
        """Return the log-probabilities of tokens and of their most probable ids, if requested."""
        if self._num_top is None:
            return {}

        def tops() -> Iterator[msgspec.Raw]:
            for token in tokens:
                top = {str(other.token_id): finite(other.logprob) for other in token.top}
                yield msgspec.Raw(msgspec.json.encode(top))

        return {
            "logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": PartedList(tops)
            if whole and self._num_top == ALL_LOGPROBS
            else list(tops()),
        }
