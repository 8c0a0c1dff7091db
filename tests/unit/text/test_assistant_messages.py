"""Messages of the assistant: refusals, calls in the older form and audio are read or refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.base.errors import InvalidParameter
from quire.text.messages import checked_messages
from tests.cases import each_case

ASKED = {"role": "user", "content": "Hi"}
CALL = {"name": "look", "arguments": '{"at": 1}'}


def said(**message: Any) -> dict[str, Any]:
    """Return the message of the assistant as a template gets it."""
    return checked_messages([ASKED, {"role": "assistant", **message}])[1]


def test_a_refusal_is_the_content_of_a_message_without_another() -> None:
    assert said(refusal="No.")["content"] == "No."
    assert said(content=None, refusal="No.")["content"] == "No."
    assert said(content="", refusal="No.")["content"] == "No."
    assert said(content="Yes.", refusal=None)["content"] == "Yes."
    assert said(content="Yes.", refusal="")["content"] == "Yes."
    assert said(refusal=None)["content"] == said(refusal="")["content"] == ""


def test_a_part_with_a_refusal_is_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "No."}]
    assert said(content=parts)["content"] == texts


def test_what_a_client_sends_back_of_an_answer_is_unchanged() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    message = {"role": "assistant", "content": "Yes.", "annotations": [], **nothing}
    assert checked_messages([ASKED, message])[1] == message


def test_a_call_of_the_older_form_is_one_tool_call_and_its_result_a_tools() -> None:
    result = {"role": "function", "name": "look", "content": "42"}
    old = [{"role": "assistant", "content": None, "function_call": CALL}, result]
    new = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {**result, "role": "tool"},
    ]
    assert checked_messages([ASKED, *old]) == checked_messages([ASKED, *new]) == [ASKED, *new]
    empty = checked_messages([ASKED, old[0], {**result, "content": None}])
    assert empty[-1]["content"] == ""


@each_case(
    ("message", "words"),
    [
        ({"audio": {"id": "a"}}, 'messages[1].audio is {"id": "a"}; the model reads text only'),
        ({"refusal": 5}, "messages[1].refusal is 5; a text"),
        ({"content": "a", "refusal": "b"}, "messages[1] has both content and refusal"),
        ({"content": [{"type": "refusal"}]}, "messages[1].content holds a part"),
        ({"function_call": "f"}, 'messages[1].function_call is "f"; an object'),
        ({"function_call": {"arguments": "{}"}}, "messages[1].function_call.function is"),
        (
            {"function_call": {"name": "f", "arguments": 5}},
            "messages[1].function_call.function.arguments is 5",
        ),
        (
            {"function_call": CALL, "tool_calls": [{"function": CALL}]},
            "messages[1] has both tool_calls and function_call",
        ),
        ({"role": "function", "content": "42"}, "messages[1].name is missing"),
        ({"role": "function", "name": 5, "content": "42"}, "messages[1].name is 5"),
        ({"role": "function", "name": "f", "content": "42"}, "messages[1] is the result of a tool"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}, "holds a part"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_path(message: Any, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        said(**message)
    assert words in str(caught.value)
    assert caught.value.param == "messages"
