"""Results of tools in a conversation: each belongs to an earlier call, named or evident."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import InvalidParameter
from quire.text.messages import checked_messages
from tests.cases import each_case

ASKED = {"role": "user", "content": "Hi"}
Message = dict[str, Any]


def called(*ids: str | None) -> Message:
    function = {"name": "look", "arguments": "{"}  # broken ones are sent back too
    calls = [{"function": function} | ({"id": id_} if id_ else {}) for id_ in ids]
    return {"role": "assistant", "tool_calls": calls}


def result(id_: Any = None) -> Message:
    return {"role": "tool", "content": "42"} | ({} if id_ is None else {"tool_call_id": id_})


@each_case(
    "turns",
    [
        [called("a"), result("a")],
        [called("a", "b"), result("b"), result("a")],
        [called("a", "b"), result("b"), result()],
        [called("a"), result()],
        [called("a"), result(""), called("b"), result()],
        [called(None, None), result(), result()],
        [called(None), result("made-up")],
        [called("a"), result("a"), ASKED, result("a")],
        [called("a"), ASKED],
    ],
)
def test_a_result_whose_call_is_clear_is_accepted(turns: list[Message]) -> None:
    assert len(checked_messages([ASKED, *turns])) == 1 + len(turns)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([result("a")], "messages[1] is the result of a tool, and no earlier message of the ass"),
        ([result("a"), called("a")], "messages[1] is the result of a tool, and no earlier"),
        ([called("a"), result("b")], 'messages[2].tool_call_id is "b", and no earlier message'),
        ([called("a"), result("b")], '(there are "a"); give the id of the call'),
        ([called("a", "b"), result()], "tool_call_id is missing, and 2 calls are open; give"),
        ([called("a"), result("a"), result()], "messages[3].tool_call_id is missing, and no call"),
        ([called("a"), result(7)], "messages[2].tool_call_id is 7; the id of a call is allowed"),
        ([{"role": "assistant", "tool_calls": [{"id": 7, "name": "f"}]}], "tool_calls[0].id is 7"),
    ],
)
def test_a_result_of_no_call_is_refused_with_its_path(turns: list[Message], said: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        checked_messages([ASKED, *turns])
    assert said in str(caught.value)
    assert caught.value.param == "messages"
