"""Make the prompt of a response: render its items and tokenize them, or the newest that fit.

With truncation: auto the oldest items are left out where all do not fit: the conversation then
begins with a later message of the user. System and developer messages are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.generation.chat_output import Conversation
from quire.api.generation.conversation import ConversationFields, rendered
from quire.api.generation.fields import flag
from quire.api.generation.request_context import RequestContext, encode
from quire.api.generation.text_bounds import TOO_LONG
from quire.api.generation.tools import ToolOffer
from quire.api.generation.truncation import answer_room
from quire.api.openai.responses.history import messages_of
from quire.api.openai.responses.input_items import Item
from quire.api.openai.responses.request import instructions_of, reasoning_of, truncates
from quire.base.errors import InvalidParameter, RequestError
from quire.base.show import show

_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePrompt:
    """A rendered conversation and its token ids."""

    conversation: Conversation
    token_ids: list[int]


class PromptMaker:
    """Make the prompt of one request. max_tokens: of the answer, None if it has no limit."""

    def __init__(
        self, context: RequestContext, offer: ToolOffer | None, max_tokens: int | None
    ) -> None:
        self._context = context
        self._given: Mapping[str, Any] = context.given
        self._offer = offer
        self._max_tokens = max_tokens
        self._instructions = instructions_of(context.given)
        self._effort = reasoning_of(context.given, context)["effort"]
        self.adds_special = flag(context.given, "add_special_tokens")

    async def make(self, items: Sequence[Item]) -> ResponsePrompt:
        """Return the prompt of these items. Raises RequestError."""
        if not truncates(self._given):
            return await self._of(items)
        try:
            return await self._of(items, room=self._max_tokens or 1)
        except TOO_LONG as error:
            begins = _begins(items)
            if not begins:
                raise
            return await self._newest(items, begins, error)

    async def conversation(self, items: Sequence[Item]) -> Conversation:
        """Return the text of the prompt of these items. Raises RequestError."""
        variables = self._given.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise InvalidParameter(
                f"chat_template_kwargs is {show(variables)}; an object is allowed",
                param="chat_template_kwargs",
            )
        fields = ConversationFields(
            messages=messages_of(self._instructions, items),
            effort=self._effort,
            effort_name="reasoning.effort",
            tools=None if self._offer is None else self._offer.shown,
            variables=variables,
        )
        return await rendered(self._context, fields)

    async def _newest(
        self, items: Sequence[Item], begins: Sequence[int], error: RequestError
    ) -> ResponsePrompt:
        """Return the prompt of as many of the newest items as fit. begins: where it may begin."""
        room = self._max_tokens or answer_room(None, self._context.engine.card.max_model_len)
        found: ResponsePrompt | None = None
        low, high = 0, len(begins)
        while low < high:
            middle = (low + high) // 2
            kept = [item for item in items[: begins[middle]] if item.get("role") in _SYSTEM]
            try:
                found = await self._of([*kept, *items[begins[middle] :]], room=room)
                high = middle
            except TOO_LONG as still:
                error, low = still, middle + 1
        if found is None:
            raise error
        return found

    async def _of(self, items: Sequence[Item], *, room: int = 1) -> ResponsePrompt:
        """Return the prompt, which leaves `room` tokens to the answer."""
        conversation = await self.conversation(items)
        token_ids = await encode(
            self._context,
            conversation.text,
            add_special_tokens=self.adds_special,
            min_output=room,
            param="input",
        )
        return ResponsePrompt(conversation=conversation, token_ids=token_ids)


def _begins(items: Sequence[Item]) -> list[int]:
    """Return the indexes of the messages of the user, except the first item."""
    return [at for at, item in enumerate(items) if at and item.get("role") == "user"]
