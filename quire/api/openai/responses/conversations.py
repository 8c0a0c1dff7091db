"""/v1/conversations: conversations that responses read and add to, and their items.

A conversation is kept in the store of responses, under a name of its key that responses do not
have. Always holds: a conversation is found only with the key that it was made with; it changes by
whole items, in one transaction each.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.generation.conversation import MAX_MESSAGES
from quire.api.http.errors import UnknownConversation
from quire.api.http.request_io import Deadline, body_in_time, read_object
from quire.api.openai.metadata import checked_metadata
from quire.api.openai.responses.input_items import Item, checked_items, fault
from quire.api.openai.responses.item_ids import PREFIXES
from quire.api.openai.responses.store import ResponseStore, StoredResponse
from quire.api.openai.responses.stored_items import listed, resolved
from quire.api.openai.responses.stored_routes import (
    items_shown,
    json_of,
    page_of_items,
    query_of,
)
from quire.api.server_state import ServerState
from quire.base.errors import InvalidParameter
from quire.base.show import show

PATH, PREFIX = "/v1/conversations", "conv_"
MAX_ADDED = 20
_KEY_PREFIX = b"conversations "


class Conversations:
    """The conversations of one server."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    @property
    def is_on(self) -> bool:
        """Return whether anything is kept."""
        return self._store.is_on

    async def create(self, key: bytes, items: Sequence[Item], metadata: dict[str, str]) -> bytes:
        """Add a conversation; return its JSON. Raises InvalidParameter if it is too large."""
        id_ = f"{PREFIX}{secrets.token_hex(24)}"
        shown = {"id": id_, "object": "conversation", "created_at": int(time.time())}
        stored = StoredResponse(
            id=id_,
            previous=None,
            response=msgspec.json.encode({**shown, "metadata": metadata}),
            items=msgspec.json.encode([*items]),
        )
        self._check_size(stored, "items")
        await self._store.save(_KEY_PREFIX + key, stored)
        return stored.response

    async def find(self, key: bytes, id_: str, param: str = "id") -> StoredResponse:
        """Return a conversation. Raises UnknownConversation."""
        self._check_on(param)
        found = await self._store.find(_KEY_PREFIX + key, id_)
        if found is None:
            raise _unknown(id_, param)
        return found

    async def add(self, key: bytes, id_: str, added: Sequence[Item], param: str = "items") -> None:
        """Add items to the end of a conversation. Raises UnknownConversation, InvalidParameter."""

        def with_added(stored: StoredResponse) -> StoredResponse:
            items = [*msgspec.json.decode(stored.items), *added]
            if len(items) > MAX_MESSAGES:
                raise fault(
                    f"conversation {id_} would have {len(items)} items; at most {MAX_MESSAGES} are "
                    "allowed: begin a new one",
                    param,
                )
            changed = structs.replace(stored, items=msgspec.json.encode(items))
            self._check_size(changed, param)
            return changed

        await self.change(key, id_, with_added)

    async def change(
        self, key: bytes, id_: str, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse:
        """Replace a conversation by what `change` makes of it. Raises UnknownConversation."""
        self._check_on("id")
        changed = await self._store.change(_KEY_PREFIX + key, id_, change)
        if changed is None:
            raise _unknown(id_, "id")
        return changed

    async def delete(self, key: bytes, id_: str) -> None:
        """Remove a conversation. Raises UnknownConversation."""
        if not await self._store.delete(_KEY_PREFIX + key, id_):
            raise _unknown(id_, "id")

    def _check_on(self, param: str) -> None:
        if not self.is_on:
            raise InvalidParameter(
                "this server keeps no conversations (--responses-store-size 0); send the whole "
                "conversation as input",
                param=param,
            )

    def _check_size(self, stored: StoredResponse, param: str) -> None:
        self._check_on(param)
        if stored.num_bytes > self._store.max_bytes:
            raise InvalidParameter(
                f"the conversation would have {stored.num_bytes} bytes; at most "
                f"{self._store.max_bytes} are kept (--responses-store-size): begin a new one",
                param=param,
            )


async def items_before(
    conversations: Conversations, key: bytes, given: Any
) -> tuple[str, list[Item]]:
    """Return the id and the items of the conversation that a request names.

    Raises UnknownConversation and InvalidParameter.
    """
    id_ = given.get("id") if isinstance(given, dict) and given.keys() == {"id"} else given
    if not isinstance(id_, str):
        raise InvalidParameter(
            f'conversation is {show(given)}; the id of a conversation or {{"id": ...}} is allowed',
            param="conversation",
        )
    found = await conversations.find(key, id_, "conversation")
    items: list[Item] = msgspec.json.decode(found.items)
    return id_, items


class ConversationRoutes:
    """The routes."""

    def __init__(
        self, server_state: ServerState, store: ResponseStore, conversations: Conversations
    ) -> None:
        self._server_state, self._store = server_state, store
        self._conversations = conversations

    def routes(self) -> list[Route]:
        """Return them."""
        one, items = f"{PATH}/{{id}}", f"{PATH}/{{id}}/items"
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(items, self.list_items, methods=["GET"]),
            Route(items, self.add_items, methods=["POST"]),
            Route(f"{items}/{{item_id}}", self.get_item, methods=["GET"]),
            Route(f"{items}/{{item_id}}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        """Add a conversation."""
        body = await self._body(request, ("items", "metadata"))
        metadata = checked_metadata({} if body.get("metadata") is None else body["metadata"])
        given, items = body.get("items"), list[Item]()
        if given not in (None, []):
            items = await self._new_items(request, given)
        return json_of(await self._conversations.create(request.state.key, items, metadata))

    async def get(self, request: Request) -> Response:
        """Return a conversation, without its items."""
        query_of(request, ())
        return json_of((await self._found(request)).response)

    async def update(self, request: Request) -> Response:
        """Replace the labels of a conversation; null removes them."""
        body = await self._body(request, ("metadata",))
        if "metadata" not in body:
            raise InvalidParameter(
                "metadata is missing; an object is needed, or null to remove the labels",
                param="metadata",
            )
        metadata = checked_metadata({} if body["metadata"] is None else body["metadata"])

        def relabelled(stored: StoredResponse) -> StoredResponse:
            shown = {**msgspec.json.decode(stored.response), "metadata": metadata}
            return structs.replace(stored, response=msgspec.json.encode(shown))

        return json_of((await self._changed(request, relabelled)).response)

    async def delete(self, request: Request) -> Response:
        """Remove a conversation and its items."""
        query_of(request, ())
        id_ = request.path_params["id"]
        await self._conversations.delete(request.state.key, id_)
        shown = {"id": id_, "object": "conversation.deleted", "deleted": True}
        return json_of(msgspec.json.encode(shown))

    async def list_items(self, request: Request) -> Response:
        """Return a page of the items."""
        return page_of_items(request, _listed(await self._found(request)))

    async def add_items(self, request: Request) -> Response:
        """Add items; return those that were added."""
        query_of(request, ("include", "include[]"))
        body = await self._body(request, ("items",))
        items = await self._new_items(request, body.get("items"))
        await self._conversations.add(request.state.key, request.path_params["id"], items)
        shown = items_shown(request, [listed(item) for item in items])
        return json_of(
            msgspec.json.encode(
                {
                    "object": "list",
                    "data": shown,
                    "first_id": shown[0]["id"],
                    "last_id": shown[-1]["id"],
                    "has_more": False,
                }
            )
        )

    async def get_item(self, request: Request) -> Response:
        """Return one item."""
        query_of(request, ("include", "include[]"))
        item_id = request.path_params["item_id"]
        for item in _listed(await self._found(request)):
            if item["id"] == item_id:
                (shown,) = items_shown(request, [item])
                return json_of(msgspec.json.encode(shown))
        raise _no_item(item_id)

    async def delete_item(self, request: Request) -> Response:
        """Remove one item; return the conversation."""
        query_of(request, ())
        item_id = request.path_params["item_id"]

        def without(stored: StoredResponse) -> StoredResponse:
            items = msgspec.json.decode(stored.items)
            kept = [item for item in items if item["id"] != item_id]
            if len(kept) == len(items):
                raise _no_item(item_id)
            return structs.replace(stored, items=msgspec.json.encode(kept))

        return json_of((await self._changed(request, without)).response)

    async def _body(self, request: Request, known: tuple[str, ...]) -> dict[str, Any]:
        lifecycle, config = self._server_state.lifecycle, self._server_state.config
        body, _ = await body_in_time(
            read_object(request, limit_bytes=config.max_body_bytes),
            stopping=lifecycle.stopping,
            deadline=Deadline(None),
        )
        for name in body:
            if name not in known and body[name] is not None:
                raise InvalidParameter(
                    f"{show(name)} is not known here; {', '.join(known)} are", param=name[:64]
                )
        return body

    async def _new_items(self, request: Request, given: Any) -> list[Item]:
        """Return items that were sent, checked and with ids of their own."""
        if not isinstance(given, list) or not 1 <= len(given) <= MAX_ADDED:
            found = f"a list of {len(given)}" if isinstance(given, list) else show(given)
            raise fault(f"items is {found}; a list of 1 to {MAX_ADDED} items is allowed", "items")
        try:
            items = await resolved(self._store, request.state.key, checked_items(given))
        except InvalidParameter as error:  # paths of `input`
            said = str(error).replace("input[", "items[")
            raise InvalidParameter(said, param="items") from error
        return [
            {**item, "id": f"{PREFIXES[item['type']]}{secrets.token_hex(24)}"} for item in items
        ]

    async def _found(self, request: Request) -> StoredResponse:
        return await self._conversations.find(request.state.key, request.path_params["id"])

    async def _changed(
        self, request: Request, change: Callable[[StoredResponse], StoredResponse]
    ) -> StoredResponse:
        id_ = request.path_params["id"]
        return await self._conversations.change(request.state.key, id_, change)


def _listed(stored: StoredResponse) -> list[Item]:
    return [listed(item) for item in msgspec.json.decode(stored.items)]


def _unknown(id_: str, param: str) -> UnknownConversation:
    return UnknownConversation(
        f"no conversation {show(id_)} is stored for this key: it was never made with this key, was "
        "deleted, or evicted by newer ones (--responses-store-size); check the id and the key",
        param=param,
    )


def _no_item(item_id: str) -> UnknownConversation:
    return UnknownConversation(
        f"the conversation has no item {show(item_id)}; GET /v1/conversations/ID/items lists them",
        param="item_id",
    )
