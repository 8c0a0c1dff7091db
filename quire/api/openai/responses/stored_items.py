"""Stored items as input: of the response that a request continues, and of references by id.

A response of another key is never found. It does not know how a store keeps its responses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.api.generation.conversation import MAX_MESSAGES
from quire.api.http.errors import UnknownResponse
from quire.api.openai.responses.history import sealed
from quire.api.openai.responses.input_items import Item, fault, texts_of
from quire.api.openai.responses.item_ids import item_id, place_of
from quire.api.openai.responses.store import ResponseStore, StoredResponse
from quire.base.errors import InvalidParameter
from quire.base.show import show

OPEN_STATUSES = ("queued", "in_progress")


def unknown_response(
    id_: str, *, param: str | None = None, advice: str = "; check the id and the key"
) -> UnknownResponse:
    """Return the error for an id of which nothing is stored."""
    return UnknownResponse(
        f"no response {show(id_)} is stored for this key: it was never made with this key, or with "
        "store: false, was deleted, or evicted by newer ones (--responses-store-size)" + advice,
        param=param,
    )


async def earlier_items(store: ResponseStore, key: bytes, id_: Any) -> list[Item]:
    """Return the items of the conversation that ends with the response `id_`.

    Raises UnknownResponse, also if a response before it is not stored any more.
    """
    param = "previous_response_id"
    if not isinstance(id_, str):
        raise InvalidParameter(
            f"{param} is {show(id_)}; the id of a response is allowed", param=param
        )
    parts: list[list[Item]] = []
    num_items = 0
    next_id: str | None = id_
    while next_id is not None:
        stored = await store.find(key, next_id)
        if stored is None:
            raise unknown_response(
                next_id,
                param=param,
                advice="; check the id and the key, or send the whole conversation as input",
            )
        response = msgspec.json.decode(stored.response)
        if response["status"] in OPEN_STATUSES:
            raise InvalidParameter(
                f"{param} is {show(next_id)}, a response that is {response['status']}; continue it "
                "when it has ended",
                param=param,
            )
        parts.append([*msgspec.json.decode(stored.items), *response["output"]])
        num_items, next_id = num_items + len(parts[-1]), stored.previous
        if num_items > MAX_MESSAGES:
            raise InvalidParameter(
                f"{param} continues a conversation of more than {MAX_MESSAGES} items; begin a new "
                "one",
                param=param,
            )
    return [item for part in reversed(parts) for item in part]


async def resolved(
    store: ResponseStore, key: bytes, items: Sequence[Item], earlier: Sequence[Item] = ()
) -> list[Item]:
    """Return items with the stored ones in place of references. Raises InvalidParameter.

    earlier: items of the same conversation, which references may name too.
    """
    by_id = {item["id"]: item for item in earlier if "id" in item}
    found = []
    for at, item in enumerate(items):
        if item["type"] == "item_reference":
            id_ = item["id"]
            item = by_id.get(id_) or await _referenced(store, key, f"input[{at}].id", id_)
        found.append(item)
    return found


async def _referenced(store: ResponseStore, key: bytes, path: str, id_: str) -> Item:
    place = place_of(id_)
    stored = None if place is None else await store.find(key, place.response_id)
    if place is not None and stored is not None:
        response = msgspec.json.decode(stored.response)
        listed = response["output"] if place.is_output else msgspec.json.decode(stored.items)
        if place.index < len(listed):
            item: Item = listed[place.index]
            return item
    raise fault(
        f"{path} is {show(id_)}, and no item with that id is stored for this key; send the item "
        "itself"
    )


def with_ids(response_id: str, items: Sequence[Item]) -> list[Item]:
    """Return input items as they are stored: each has an id, which a reference may name."""
    return [
        {**item, "id": item_id(item["type"], response_id, at, is_output=False)}
        for at, item in enumerate(items)
    ]


def listed_items(stored: StoredResponse) -> list[Item]:
    """Return the input items of a response in the form of the API: messages have parts."""
    return [listed(item) for item in msgspec.json.decode(stored.items)]


def with_encrypted_content(items: Iterable[Item]) -> list[Item]:
    """Return items with the encrypted_content of all reasoning with a text."""
    return [
        {**item, "encrypted_content": sealed("\n".join(texts_of(item["content"])))}
        if _has_text(item) and "encrypted_content" not in item
        else item
        for item in items
    ]


def without_encrypted_content(items: Iterable[Item]) -> list[Item]:
    """Return items without the encrypted_content of reasoning with a text."""
    return [
        {key: value for key, value in item.items() if key != "encrypted_content"}
        if _has_text(item)
        else item
        for item in items
    ]


def _has_text(item: Item) -> bool:
    """Return whether an item is reasoning that can be read."""
    return item["type"] == "reasoning" and bool(item.get("content"))


def listed(item: Item) -> Item:
    """Return a stored item in the form of the API."""
    shown = {**item, "status": item.get("status", "completed")}
    if isinstance(item.get("content"), str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        shown["content"] = [{"type": kind, "text": item["content"], **more}]
    return shown
