"""The body of an answer that is not streamed.

Bodies with numbers of prompts are long, so a thread encodes them; one with the log-probabilities of
the whole vocabulary is sent in parts. Knows no API: the writer makes the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from quire.api.generation.choice_streams import ChoiceStreams, Prompt
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
    choices, usage = await answers.whole(), answers.usage

    def encoded() -> bytes:
        return msgspec.json.encode(writer.whole(choices, usage))

    if any(ALL_LOGPROBS in prompt.nums_logprobs for prompt in prompts):
        parts = parts_of(writer.whole(choices, usage))
        return PartedAnswer(server_state, parts, context.headers(), context.deadline, request)
    is_long = any(p.sampling.prompt_logprobs is not None or p.sampling.pooling for p in prompts)
    return await asyncio.to_thread(encoded) if is_long else encoded()
