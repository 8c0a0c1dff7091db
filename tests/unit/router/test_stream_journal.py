"""Streams of several choices: each continues elsewhere from its own tokens."""

from __future__ import annotations

import json

from quire.router.event_blocks import EventBlocks
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import WHOLE, stream


def test_each_choice_of_a_cut_stream_continues_from_its_own_tokens() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.num_choices, first.fails_after = 3, 5  # of choices 0, 1, 2, 0, 1

    async def story(router: Router) -> bytes:
        return (await stream(router, n=3))[2]

    assert run([first, second], story).startswith(WHOLE[: WHOLE.index(b"105")])
    again = second.requests[0]
    assert again["output_ids"] == [[100, 103], [101, 104], [102]]
    assert [one.split(":")[2] for one in again["output_cursor"]] == ["4", "5", "3"]
    assert again["n"] == 3


def test_a_choice_that_has_not_begun_has_no_cursor() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.num_choices, first.fails_after = 3, 2
    run([first, second], lambda router: stream(router, n=3))
    again = second.requests[0]
    assert again["output_ids"] == [[100], [101], []]
    assert again["output_cursor"][2] is None


def test_what_the_client_itself_continues_is_continued_for_each_choice() -> None:
    first, second = FakeReplica(), FakeReplica()
    first.num_choices, first.fails_after = 2, 1
    known = {"output_ids": [[7], [8, 9]], "output_cursor": ["a:1:1:0", "a:1:2:0"]}
    run([first, second], lambda router: stream(router, n=2, **known))
    again = second.requests[0]
    assert again["output_ids"] == [[7, 103], [8, 9]]
    assert again["output_cursor"] == [f"gen-{'0' * 24}:1:4:0", "a:1:2:0"]


def test_deltas_that_come_together_are_joined_for_each_choice() -> None:
    """In order; the first comment says how many choices there are."""
    comments: list[dict[str, object]] = [
        {"output_ids": [number], "output_cursor": f"a:1:{number}:0", "choice": choice}
        for number, choice in enumerate((0, 0, 1, 0))
    ]
    comments[0] |= {"num_choices": 2, "seed": 7}
    received = b"".join(
        b"data: %d\n\n: %b\n\n" % (number, json.dumps(comment).replace(": ", ":").encode())
        for number, comment in enumerate(comments)
    )
    deltas = EventBlocks().push(received)
    cursors = [delta.cursor for delta in deltas if delta.cursor is not None]
    assert [(one.choice, one.output_ids) for one in cursors] == [(0, [0, 1]), (1, [2]), (0, [3])]
    assert [one.output_cursor[4] for one in cursors] == ["1", "2", "3"]
    assert [(one.num_choices, one.seed) for one in cursors] == [(2, 7), (1, None), (1, None)]
    assert b"".join(delta.blocks for delta in deltas) == b"".join(
        b"data: %d\n\n" % number for number in range(4)
    )
