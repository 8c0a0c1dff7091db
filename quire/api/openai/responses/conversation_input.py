"""The input of a response with what it continues: earlier responses, or a conversation.

Always holds: an item that the input refers to is stored for the same key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.api.generation.conversation import MAX_MESSAGES
from quire.api.openai.responses.conversations import Conversations, items_before
from quire.api.openai.responses.input_items import Item, checked_items, fault
from quire.api.openai.responses.store import ResponseStore
from quire.api.openai.responses.stored_items import earlier_items, resolved
from quire.base.errors import InvalidParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationInput:
    """Items before a response: those it continues, then its own. conversation_id: None if the
    request names no conversation."""

    earlier: list[Item]
    own: list[Item]
    conversation_id: str | None = None

    @property
    def items(self) -> list[Item]:
        """All items."""
        return [*self.earlier, *self.own]


async def read_input(
    store: ResponseStore, conversations: Conversations, key: bytes, given: Mapping[str, Any]
) -> ConversationInput:
    """Return the items of a request. Raises RequestError naming the field."""
    previous_id, conversation = given.get("previous_response_id"), given.get("conversation")
    continues = previous_id is not None or conversation is not None
    own = checked_items(given.get("input"), may_be_empty=continues)
    if previous_id is not None and conversation is not None:
        raise InvalidParameter(
            "previous_response_id and conversation are both given; give one of them",
            param="previous_response_id",
        )
    conversation_id, earlier = None, list[Item]()
    if previous_id is not None:
        earlier = await earlier_items(store, key, previous_id)
    elif conversation is not None:
        conversation_id, earlier = await items_before(conversations, key, conversation)
    own = await resolved(store, key, own, earlier)
    if len(earlier) + len(own) > MAX_MESSAGES:
        raise fault(
            f"input has {len(own)} items after the {len(earlier)} before it; at most "
            f"{MAX_MESSAGES} are allowed"
        )
    if not earlier and not own:
        raise fault(
            "input is empty, and so is the conversation; a text is needed, or a list of items"
        )
    return ConversationInput(earlier=earlier, own=own, conversation_id=conversation_id)
