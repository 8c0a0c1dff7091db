"""Deliveries: deltas of a large step in parts and in order, first those of interrupted streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.engine.client.deliveries import MAX_AT_ONCE, Deliveries
from quire.engine.client.open_streams import UnreadQueue
from quire.engine.output.text_delta import TextDelta
from quire.engine.process.messages import Fault

Queue = UnreadQueue[TextDelta | Fault]
NUM_READERS = 3 * MAX_AT_ONCE - 7


def delta(text: str, known: TextDelta | None = None) -> TextDelta:
    return TextDelta(
        index=0,
        text=text,
        token_ids=(),
        logprobs=(),
        finish_reason=None,
        stop_reason=None,
        num_prompt_tokens=1,
        cached_tokens=0,
        num_output_tokens=1,
        times=None,
        seed=None,
        error=None,
        known=known,
    )


def run(story: Callable[[list[Queue], Deliveries], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        readers: list[Queue] = [UnreadQueue(100, lambda _: None) for _ in range(NUM_READERS)]
        await story(readers, Deliveries())

    asyncio.run(play())


def texts(reader: Queue) -> list[str]:
    return [item.text for item in reader._items if isinstance(item, TextDelta)]


def counts(readers: list[Queue]) -> list[int]:
    """Return how many readers have nothing, one delta, two, and so on."""
    found = [len(reader) for reader in readers]
    return [found.count(number) for number in range(max(found) + 1)]


def test_a_large_step_is_handed_out_in_parts() -> None:
    async def story(readers: list[Queue], deliveries: Deliveries) -> None:
        deliveries.add([(reader, delta("a")) for reader in readers])
        seen = []
        while deliveries.is_active:
            seen.append(NUM_READERS - counts(readers)[0])
            await asyncio.sleep(0)
        assert seen == [MAX_AT_ONCE, 2 * MAX_AT_ONCE]
        assert counts(readers) == [0, NUM_READERS]

    run(story)


def test_later_deltas_come_with_those_that_still_wait() -> None:
    async def story(readers: list[Queue], deliveries: Deliveries) -> None:
        deliveries.add([(reader, delta("a")) for reader in readers])
        deliveries.add([(reader, delta("b")) for reader in readers])
        assert counts(readers) == [NUM_READERS - MAX_AT_ONCE, MAX_AT_ONCE]
        await asyncio.sleep(0)
        assert counts(readers) == [NUM_READERS - 2 * MAX_AT_ONCE, MAX_AT_ONCE, MAX_AT_ONCE]
        while deliveries.is_active:
            await asyncio.sleep(0)
        assert {tuple(texts(reader)) for reader in readers} == {("a", "b")}

    run(story)


def test_the_first_delta_of_a_stream_that_continues_is_not_held_up() -> None:
    async def story(readers: list[Queue], deliveries: Deliveries) -> None:
        *others, last = readers
        known = delta("known")
        deliveries.add([*((one, delta("a")) for one in others), (last, delta("b", known))])
        assert texts(last) == ["b"]
        assert counts(others)[1] == MAX_AT_ONCE
        # Of several choices one may have a delta that waits: they keep their order.
        deliveries.add([(last, delta("c")), (last, delta("d", known))])
        while deliveries.is_active:
            await asyncio.sleep(0)
        assert texts(last) == ["b", "c", "d"]

    run(story)


@pytest.mark.parametrize("is_active", [False, True])
def test_all_are_handed_out_before_an_error(is_active: bool) -> None:
    async def story(readers: list[Queue], deliveries: Deliveries) -> None:
        if is_active:
            deliveries.add([(reader, delta("a")) for reader in readers])
        deliveries.finish()
        assert counts(readers) == ([0, NUM_READERS] if is_active else [NUM_READERS])
        await asyncio.sleep(0)
        assert not deliveries.is_active
        deliveries.add([(readers[0], delta("b"))])
        assert texts(readers[0])[-1] == "b"

    run(story)
