"""Rows of /v1/conversations; see operations.py.

Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.api.http.errors import UnknownConversation
from quire.api.openai.responses.conversations import MAX_ADDED
from quire.api.openai.responses.fields import INCLUDABLE
from quire.api.openai.responses.stored_routes import MAX_LISTED, NUM_LISTED, ORDERS
from quire.api.openapi.field_schemas import (
    TEXT,
    Schema,
    list_of,
    metadata_row,
    object_of,
    or_null,
)
from quire.api.openapi.operation import OBJECT, Operation
from quire.api.openapi.responses_schemas import input_items
from quire.base.errors import InvalidParameter, ShuttingDown, TimedOut

_TAG = "Conversations"
_CHANGE = (*OBJECT, UnknownConversation, TimedOut, ShuttingDown)
_READ = (InvalidParameter, UnknownConversation)
_LABELS: Schema = {
    **metadata_row(),
    "description": "Labels that the conversation is returned with.",
}


# What `include` in a query says.
INCLUDED = (
    "reasoning.encrypted_content: reasoning items have it. message.output_text.logprobs: without "
    "effect; texts have log-probabilities where their response was made with them."
)


def _query(name: str, says: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "description": says, "schema": schema}


_INCLUDE = _query("include", INCLUDED, {"enum": [*INCLUDABLE]})


def _items(least: int) -> Schema:
    items = list_of({"anyOf": input_items()}, least=least, most=MAX_ADDED)
    return {**items, "description": "Items as of POST /v1/responses."}


def _body(properties: Mapping[str, Schema], *needed: str) -> Schema:
    """Return a body; as elsewhere, null under any other name means that it is not given."""
    schema = object_of(properties, needed=needed, closed=False)
    return {**schema, "additionalProperties": {"type": "null"}}


CONVERSATION_OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/conversations": Operation(
        says="Make a conversation, which responses read and add to.",
        tag=_TAG,
        answer="Conversation",
        title="ConversationRequest",
        plain=_body({"items": or_null(_items(0)), "metadata": or_null(_LABELS)}),
        example={"metadata": {"topic": "stories"}},
        errors=_CHANGE,
    ),
    "GET /v1/conversations/{id}": Operation(
        says="A conversation, without its items.", tag=_TAG, answer="Conversation", errors=_READ
    ),
    "POST /v1/conversations/{id}": Operation(
        says="Replace the labels of a conversation.",
        tag=_TAG,
        answer="Conversation",
        title="ConversationUpdate",
        plain=_body({"metadata": or_null(_LABELS)}, "metadata"),
        example={"metadata": {"topic": "stories"}},
        errors=_CHANGE,
    ),
    "DELETE /v1/conversations/{id}": Operation(
        says="Remove a conversation and its items.",
        tag=_TAG,
        answer="ConversationDeleted",
        errors=_READ,
    ),
    "GET /v1/conversations/{id}/items": Operation(
        says="The items of a conversation.",
        tag=_TAG,
        answer="InputItemList",
        errors=_READ,
        others=(
            _query(
                "limit",
                "Number of items.",
                {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": NUM_LISTED},
            ),
            _query("order", "Oldest or newest first.", {"enum": [*ORDERS], "default": "desc"}),
            _query("after", "The last_id of the page before.", TEXT),
            _INCLUDE,
        ),
    ),
    "POST /v1/conversations/{id}/items": Operation(
        says="Add items to a conversation.",
        tag=_TAG,
        answer="InputItemList",
        title="ConversationItems",
        plain=_body({"items": _items(1)}, "items"),
        example={"items": [{"type": "message", "role": "user", "content": "Write a story."}]},
        errors=_CHANGE,
        others=(_INCLUDE,),
    ),
    "GET /v1/conversations/{id}/items/{item_id}": Operation(
        says="One item of a conversation.",
        tag=_TAG,
        answer="ConversationItem",
        errors=_READ,
        others=(_INCLUDE,),
    ),
    "DELETE /v1/conversations/{id}/items/{item_id}": Operation(
        says="Remove one item of a conversation.", tag=_TAG, answer="Conversation", errors=_READ
    ),
}
