"""POST /v1/chat/completions: messages, rendered by the model's own template, answered.

conversations.py checks and renders what is asked. With continue_final_message an answer is what
comes after the last message's words, without them. Without max_tokens (or max_completion_tokens)
an answer may take the rest of the context. Always holds: an answer's content is all the model said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.answers import Choice, Prompt, Usage
from quire.api.conversations import rendered
from quire.api.fields import CHAT, flag
from quire.api.generation import Asked, Envelope, Job, generate, usage_json
from quire.api.logprobs import chat_logprobs, check_told, prompt_logprobs
from quire.api.prompts import encode
from quire.api.sampling import limited, sampling_of
from quire.api.serving import Serving
from quire.base.errors import InvalidParameter
from quire.base.sampling_params import MAX_TOP_LOGPROBS
from quire.base.show import show
from quire.engine.output import TextDelta
from quire.engine.requests import default_sampling
from quire.engine.token_text import TokenText


class Chat:
    """The route."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def post(self, request: Request) -> Response:
        """Answer one request."""
        return await generate(
            self._serving, request, honoured=CHAT, prefix="chatcmpl", read=read_job
        )


async def read_job(asked: Asked) -> Job:
    """Check all fields. Raises RequestError naming the field."""
    given, engine = asked.given, asked.engine
    wants_logprobs = flag(given, "logprobs")
    num_top = _num_top(given, wants_logprobs=wants_logprobs)
    fields = {**given, **_max_tokens(given)}
    sampling = sampling_of(fields, engine.default_sampling(), logprobs=num_top)
    text = await rendered(asked.request)
    adds_special = flag(given, "add_special_tokens")
    token_ids = await encode(
        engine,
        text,
        add_special_tokens=adds_special,
        least_output=int(sampling.max_tokens != 0),
    )
    if sampling.prompt_logprobs is not None:
        num_told = len(token_ids) * (1 + sampling.prompt_logprobs)
        check_told(num_told, param="prompt_logprobs")
    room_tokens = engine.card.max_model_len - len(token_ids)
    default = default_sampling(engine.card, num_prompt_tokens=len(token_ids)).max_tokens
    chosen = limited(
        sampling,
        default_tokens=room_tokens if default is None else default,
        room_tokens=room_tokens,
        cap_tokens=asked.max_output_tokens,
    )
    writer = ChatWriter(
        asked.envelope,
        wants_logprobs=wants_logprobs,
        num_prompt_top=chosen.prompt_logprobs,
        include_usage=asked.include_usage,
    )
    return Job(prompts=[Prompt(token_ids=token_ids, sampling=chosen)], writer=writer)


class ChatWriter:
    """`chat.completion` objects and `chat.completion.chunk` objects. For one answer."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        wants_logprobs: bool,
        num_prompt_top: int | None,
        include_usage: bool,
    ) -> None:
        self._envelope = envelope
        self._wants_logprobs = wants_logprobs
        self._num_prompt_top = num_prompt_top
        self._include_usage = include_usage
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Sequence[Choice]], usage: Usage) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        written = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "seed": choice.seed,
            }
            for index, choice in enumerate(choices[0])
        ]
        return {
            **self._frame("chat.completion"),
            "choices": written,
            "usage": usage_json(usage),
            **self._scored(choices[0][0].prompt_logprobs),
        }

    def of_delta(self, prompt: int, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The role before a choice's first text, the text, and the finish reason after its last."""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            role = {"role": "assistant", "content": "", "refusal": None}
            yield {**self._chunk(delta.index, role), **self._scored(delta.prompt_logprobs)}
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(delta.logprobs)
            yield self._chunk(delta.index, {"content": delta.text}, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(
                delta.index,
                {},
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                seed=delta.seed,
            )

    def of_usage(self, usage: Usage) -> dict[str, Any] | None:
        """The chunk with the usage, if it was asked for."""
        if not self._include_usage:
            return None
        frame = self._frame("chat.completion.chunk")
        return {**frame, "choices": [], "usage": usage_json(usage)}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **last: Any,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **last,
        }
        chunk = {**self._frame("chat.completion.chunk"), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _frame(self, kind: str) -> dict[str, Any]:
        envelope = self._envelope
        return {
            "id": envelope.id,
            "object": kind,
            "created": envelope.created_s,
            "model": envelope.model,
            "system_fingerprint": envelope.fingerprint,
        }

    def _scored(self, tokens: Sequence[TokenText | None]) -> dict[str, Any]:
        """What is told of the prompt: once, beside the choices, where it was asked for."""
        if not tokens or self._num_prompt_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(tokens, self._num_prompt_top)}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return chat_logprobs(tokens) if self._wants_logprobs else None


def _max_tokens(given: Mapping[str, Any]) -> dict[str, Any]:
    """max_tokens under its newer name; both may be given if they agree."""
    newer = given.get("max_completion_tokens")
    if newer is None:
        return {}
    if given.get("max_tokens", newer) != newer:
        raise InvalidParameter(
            f"max_completion_tokens is {show(newer)} and max_tokens is "
            f"{show(given['max_tokens'])}; they mean the same: give one",
            param="max_completion_tokens",
        )
    least = 0 if "prompt_logprobs" in given else 1
    if isinstance(newer, bool) or not isinstance(newer, int) or newer < least:
        raise InvalidParameter(
            f"max_completion_tokens is {show(newer)}; a whole number from {least} is allowed",
            param="max_completion_tokens",
        )
    return {"max_tokens": newer}


def _num_top(given: Mapping[str, Any], *, wants_logprobs: bool) -> int | None:
    """How many alternatives a token gets; None for no log-probabilities at all."""
    num_top = given.get("top_logprobs")
    if num_top is None:
        return 0 if wants_logprobs else None
    whole = isinstance(num_top, int) and not isinstance(num_top, bool)
    if not whole or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise InvalidParameter(
            f"top_logprobs is {show(num_top)}; a whole number from 0 to {MAX_TOP_LOGPROBS} is "
            "allowed",
            param="top_logprobs",
        )
    if not wants_logprobs and num_top > 0:
        raise InvalidParameter(
            f"top_logprobs is {num_top} without logprobs: true; add it", param="top_logprobs"
        )
    return num_top if wants_logprobs else None
