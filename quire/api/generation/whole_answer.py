"""The body of an answer that is not streamed.

Bodies with numbers of prompts are long, so a thread encodes them; one with the log-probabilities of
the whole vocabulary is sent in parts. Knows no API: the writer makes the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from quire.api.generation.choice_streams import Choice, ChoiceStreams, Prompt
from quire.api.generation.parted_answer import PartedAnswer, parts_of
from quire.api.generation.request_context import RequestContext
from quire.api.server_state import OpenRequest, ServerState
from quire.api.streaming.event_stream import Writer
from quire.base.sampling_checks import ALL_LOGPROBS


async def whole_answer(
    server_state: ServerState,
    prompts: Sequence[Prompt],
    writer: Writer,
    answers: ChoiceStreams,
    context: RequestContext,
    request: OpenRequest,
) -> bytes | PartedAnswer:
    """Return the body once the answer is complete, or the response that sends it in parts."""
    choices, usage = await _whole_choices(answers), answers.usage

    def encoded() -> bytes:
        return msgspec.json.encode(writer.whole(choices, usage))

    if any(ALL_LOGPROBS in (p.sampling.logprobs, p.sampling.prompt_logprobs) for p in prompts):
        parts = parts_of(writer.whole(choices, usage))
        return PartedAnswer(server_state, parts, context.headers(), context.deadline, request)
    is_long = any(p.sampling.prompt_logprobs is not None or p.sampling.pooling for p in prompts)
    return await asyncio.to_thread(encoded) if is_long else encoded()


async def _whole_choices(answers: ChoiceStreams) -> list[list[Choice]]:
    """Return all choices of each prompt once all have ended."""
    choices = [[Choice() for _ in range(prompt.sampling.n)] for prompt in answers.prompts]
    texts: list[list[list[str]]] = [[[] for _ in of_prompt] for of_prompt in choices]
    async with aclosing(answers.deltas()) as deltas:
        async for prompt, delta in deltas:
            choice = choices[prompt][delta.index]
            texts[prompt][delta.index].append(delta.text)
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(delta.logprobs)
            choice.token_chars.extend(delta.token_chars)
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            choice.seed = delta.seed
            choice.output_tokens = delta.num_output_tokens
            choice.pooled = delta.pooled
            if delta.prompt_logprobs:
                for each in choices[prompt]:
                    each.prompt_logprobs = delta.prompt_logprobs
    for of_prompt, pieces in zip(choices, texts, strict=True):
        for choice, text in zip(of_prompt, pieces, strict=True):
            choice.text = "".join(text)
    return choices
