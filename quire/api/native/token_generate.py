"""POST /generate: token ids in, token ids out, streamed or whole.

For callers who tokenize themselves. All that chooses tokens is as for completions; `stop` strings
and grammars too, which are about the text of these ids. Knows no text but that of the tokens of a
prompt, where log-probabilities are told. Always holds: the ids told are those the usage counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.generation.choice_streams import Choice, Prompt, Usage
from quire.api.generation.fields import GENERATE
from quire.api.generation.generate import (
    Envelope,
    GenerationJob,
    GenerationRequest,
    generate,
    usage_json,
)
from quire.api.generation.prompts import checked_ids, most_tokens
from quire.api.generation.sampling_fields import (
    COMPLETION_TOKENS,
    completion_tokens,
    limited,
    sampling_of,
)
from quire.api.openai.logprobs import check_told, prompt_logprobs
from quire.api.server_state import ServerState
from quire.api.streaming.sse import speeds_json
from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.engine.output.output_stream import TextDelta
from quire.engine.output.token_text import TokenText


class TokenGenerateRoute:
    """The route."""

    def __init__(self, serving: ServerState) -> None:
        self._serving = serving

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        return await generate(
            self._serving, request, honoured=GENERATE, prefix="gen", read=read_job
        )


async def read_job(asked: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises InvalidParameter and ContextTooLong naming the field."""
    given, engine = asked.given, asked.engine
    tokens = given.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidParameter(
            f"tokens is {show(tokens)}; a list of token ids is allowed", param="tokens"
        )
    sampling = sampling_of(given, engine.default_sampling(), logprobs=given.get("logprobs"))
    token_ids = checked_ids(
        engine,
        tokens,
        least_output=int(sampling.max_tokens != 0),
        keep_tokens=most_tokens(given, engine, completion_tokens(sampling)),
        param="tokens",
    )
    if sampling.prompt_logprobs is not None:
        check_told(len(token_ids) * (1 + sampling.prompt_logprobs), param="prompt_logprobs")
    chosen = limited(
        sampling,
        default_tokens=COMPLETION_TOKENS,
        room_tokens=engine.card.max_model_len - len(token_ids),
        cap_tokens=asked.config.max_output_tokens,
    )
    writer = TokenGenerateWriter(
        asked.envelope,
        wants_logprobs=chosen.logprobs is not None,
        num_prompt_top=chosen.prompt_logprobs,
        include_usage=asked.include_usage,
    )
    return GenerationJob(prompts=[Prompt(token_ids=token_ids, sampling=chosen)], writer=writer)


class TokenGenerateWriter:
    """`generation` objects, whole and in chunks. For one answer."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        wants_logprobs: bool,
        num_prompt_top: int | None,
        include_usage: bool,
    ) -> None:
        self._wants_logprobs = wants_logprobs
        self._num_prompt_top = num_prompt_top
        self._include_usage = include_usage
        self._frame = {
            "id": envelope.id,
            "object": "generation",
            "created": envelope.created_s,
            "model": envelope.model,
            "system_fingerprint": envelope.fingerprint,
        }

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        written = [
            {
                "index": index,
                "tokens": choice.token_ids,
                **self._logprobs(choice.logprobs),
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
        """One chunk: the ids that are new."""
        choice: dict[str, Any] = {
            "index": delta.index,
            "tokens": delta.token_ids,
            **self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice |= {"stop_reason": delta.stop_reason, "seed": delta.seed}
        yield {**self._frame, "choices": [choice], **self._scored(delta.prompt_logprobs)}

    def of_text(self, prompt: int, index: int, text: str) -> None:
        """None: text is not told here."""

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """Return the last chunk, with usage and timings where they were asked for."""
        told = {**self._included(usage), **speeds_json(usage)}
        return {**self._frame, "choices": [], **told} if told else None

    def frame(self) -> dict[str, Any]:
        """Return the fields that every chunk has, without its choices."""
        return self._frame

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Return the counts so far."""
        return usage_json(usage)

    def _included(self, usage: Usage) -> dict[str, Any]:
        return {"usage": self.usage(usage)} if self._include_usage else {}

    def _scored(self, tokens: Sequence[TokenText | None]) -> dict[str, Any]:
        """What is told of the prompt: once, beside the choices, where it was asked for."""
        if not tokens or self._num_prompt_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(tokens, self._num_prompt_top)}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """Of each token its own, and of the most probable ids where more were asked for."""
        if not self._wants_logprobs:
            return {}
        return {
            "logprobs": [max(token.logprob, _LEAST) for token in tokens],
            "top_logprobs": [
                {str(other.token_id): max(other.logprob, _LEAST) for other in token.top}
                for token in tokens
            ],
        }


# JSON has no minus infinity; the other routes write it so too.
_LEAST = -9999.0
