"""POST /api/chat: a conversation in the form of Ollama's API, answered whole or streamed.

A stream is the default, as in Ollama. Always holds: the prompt, the parameters and the grammar are
those of the same conversation at /v1/chat/completions (with the window of penalties and the place
of min_p, if they are on), so the tokens are too.
"""

from __future__ import annotations

from typing import Any

from quire.api.generation.begun_answer import rendered_or_refused
from quire.api.generation.chat_output import Conversation
from quire.api.generation.conversation import ConversationFields, parsing_of
from quire.api.generation.fields import flag
from quire.api.generation.generate import GenerationJob, GenerationRequest
from quire.api.generation.request_context import encode
from quire.api.generation.text_bounds import TOO_LONG
from quire.api.generation.thinking_budget import AskedBudget, budget_of
from quire.api.generation.tools import ToolOffer, offer_of
from quire.api.generation.truncation import answer_room
from quire.api.ollama.history import history_of
from quire.api.ollama.prompted import loading_job, prompted_job, read_sampling
from quire.api.ollama.request import check_plain_fields, effort_of
from quire.api.ollama.truncated_chat import newest_messages
from quire.base.sampling_params import SamplingParams


async def read_chat(request: GenerationRequest) -> GenerationJob:
    """Check all fields. Raises RequestError naming the field."""
    given = request.given
    check_plain_fields(request)
    truncates = flag(given, "truncate", default=True)
    messages, budget = history_of(given.get("messages", [])), budget_of(given)
    sampling = read_sampling(request)
    offer = offer_of({"tools": given["tools"]}) if "tools" in given else None
    if not messages:
        return loading_job(request, sampling, is_chat=True)
    try:  # usually all fit
        return await _job(request, messages, sampling, offer, budget)
    except TOO_LONG:
        if not truncates:
            raise
    messages, num_passed = await newest_messages(
        messages,
        lambda kept, room: _check_fits(request, kept, offer, room),
        room=answer_room(sampling.max_tokens, request.engine.card.max_model_len),
    )
    if num_passed:
        request.context.ignore(f"messages[:{num_passed}]")
    return await _job(request, messages, sampling, offer, budget)


async def _job(
    request: GenerationRequest,
    messages: list[dict[str, Any]],
    sampling: SamplingParams,
    offer: ToolOffer | None,
    budget: AskedBudget | None,
) -> GenerationJob:
    """Return the job of a conversation. Raises one of TOO_LONG if it does not fit."""
    conversation = await conversation_of(request, messages, offer)
    sampling, parser = parsing_of(
        request.context,
        offer,
        conversation,
        sampling,
        includes_reasoning=True,
        budget=budget,
    )
    return await prompted_job(
        request, conversation.text, sampling, parser, param="messages", is_chat=True
    )


async def _check_fits(
    request: GenerationRequest, messages: list[dict[str, Any]], offer: ToolOffer | None, room: int
) -> None:
    """Raise ContextTooLong if a conversation leaves less than `room` tokens to the answer."""
    text = (await conversation_of(request, messages, offer)).text
    await encode(request.context, text, add_special_tokens=False, min_output=room, param="messages")


async def conversation_of(
    request: GenerationRequest, messages: list[dict[str, Any]], offer: ToolOffer | None = None
) -> Conversation:
    """Render a conversation; a last message of the assistant is continued. Raises RequestError."""
    fields = ConversationFields(
        messages=messages,
        effort=effort_of(request.given),
        effort_name="think",
        continue_final_message=messages[-1]["role"] == "assistant",
        tools=None if offer is None else offer.shown,
    )
    return await rendered_or_refused(request.context, fields)
