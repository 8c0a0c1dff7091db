"""instructor: classes by tools, JSON and schemas, retries after validation errors, partial
objects.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import openai
import pydantic
import pytest

pytest.importorskip("instructor", reason="not installed here; `make clients` has it")

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException

from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.scripted_server import ScriptedServer

MESSAGES: Any = [{"role": "user", "content": "Who is Tom?"}]
ASKED: Any = {"model": "box", "messages": MESSAGES, "seed": 3, "max_tokens": 80}
FAKE: Any = {"model": "fake", "messages": MESSAGES}
# Modes constrained by a grammar on the built-in model; JSON mode only promises some object.
HELD = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"]
PET = {"kind": "dog", "is_here": True}


class Pet(pydantic.BaseModel):
    """A pet of Tom's."""

    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    is_here: bool


class Old(pydantic.BaseModel):
    """A person with an age."""

    age: int

    @pydantic.field_validator("age")
    @classmethod
    def is_old(cls, age: int) -> int:
        if age < 80:
            raise ValueError("too young: it must be 80 at least")
        return age


@contextmanager
def patched(url: str, mode: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield instructor.from_openai(client, mode=instructor.Mode[mode])


@contextmanager
def scripted(mode: str, *texts: str) -> Iterator[tuple[ScriptedServer, Any]]:
    with (
        ScriptedServer(TEMPLATE, [pieces(text) for text in texts]) as server,
        patched(f"{server.url}/v1", mode) as client,
    ):
        yield server, client


@pytest.mark.parametrize("mode", HELD)
def test_the_built_in_model_answers_in_a_class(tools: str, mode: str) -> None:
    with patched(tools, mode) as client:
        pet, completion = client.chat.completions.create_with_completion(
            response_model=Pet, max_retries=0, **ASKED
        )
        parts = list(client.chat.completions.create_partial(response_model=Pet, **ASKED))
    assert isinstance(pet, Pet)
    assert completion.usage.completion_tokens > 1
    assert len(parts) > 3
    assert Pet.model_validate(parts[-1].model_dump())


@pytest.mark.parametrize("mode", HELD)
def test_the_asynchronous_client_gives_the_same_answer(tools: str, mode: str) -> None:
    async def talk() -> Any:
        async with openai.AsyncOpenAI(base_url=tools, api_key="none", max_retries=0) as client:
            asked = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions
            return await asked.create(response_model=Pet, max_retries=0, **ASKED)

    with patched(tools, mode) as client:
        alone = client.chat.completions.create(response_model=Pet, max_retries=0, **ASKED)
    assert asyncio.run(talk()).model_dump() == alone.model_dump()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("JSON", json.dumps(PET)),
        ("MD_JSON", f"Here:\n```json\n{json.dumps(PET)}\n```"),
        ("JSON_SCHEMA", json.dumps(PET)),
        ("TOOLS", call("Pet", **PET)),
    ],
)
def test_an_answer_in_each_format_is_read(mode: str, text: str) -> None:
    with scripted(mode, text) as (server, client):
        asked: Any = {"response_model": Pet, "max_retries": 0, **FAKE}
        assert client.chat.completions.create(**asked).model_dump() == PET
        *_, last = client.chat.completions.create_partial(**asked)
        assert last.model_dump() == PET
        held = server.engine.asked[0].sampling.structured_outputs
        assert (held is None) == (mode == "MD_JSON")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON"])
def test_invalid_answers_are_retried_with_the_reason(mode: str) -> None:
    def said(age: int) -> str:
        return call("Old", age=age) if mode == "TOOLS" else json.dumps({"age": age})

    with scripted(mode, said(8), said(79), said(90)) as (server, client):
        old = client.chat.completions.create(response_model=Old, max_retries=3, **FAKE)
        assert old.age == 90
        assert len(server.engine.asked) == 3
        again = bytes(server.engine.asked[2].prompt_ids).decode()
        assert again.count("too young") == 2
        assert "8" in again


def test_invalid_json_arguments_are_retried_too() -> None:
    broken = '<tool_call>\n{"name": "Old", "arguments": {"age": ninety}}\n</tool_call>'
    with scripted("TOOLS", broken, call("Old", age=90)) as (server, client):
        old = client.chat.completions.create(response_model=Old, max_retries=2, **FAKE)
        assert old.age == 90
        assert "ninety" in bytes(server.engine.asked[1].prompt_ids).decode()


def test_it_gives_up_with_its_own_error() -> None:
    with scripted("TOOLS", call("Old", age=8)) as (server, client):
        with pytest.raises(InstructorRetryException) as given_up:
            client.chat.completions.create(response_model=Old, max_retries=1, **FAKE)
        assert "too young" in str(given_up.value)
        assert len(server.engine.asked) == 2


def test_several_calls_are_several_objects() -> None:
    text = call("Pet", **PET) + "\n" + call("Old", age=90)
    with scripted("PARALLEL_TOOLS", text) as (_, client):
        found = client.chat.completions.create(response_model=Iterable[Pet | Old], **FAKE)
        assert list(found) == [Pet(kind="dog", is_here=True), Old(age=90)]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON"])
def test_a_list_streams_object_by_object(mode: str) -> None:
    listed = {"tasks": [PET, {"kind": "cat", "is_here": False}]}
    text = call("IterablePet", **listed) if mode == "TOOLS" else json.dumps(listed)
    with scripted(mode, text) as (_, client):
        found = client.chat.completions.create_iterable(response_model=Pet, **FAKE)
        assert [pet.kind for pet in found] == ["dog", "cat"]


def test_a_truncated_answer_is_its_own_error(tools: str) -> None:
    with patched(tools, "TOOLS") as client, pytest.raises(IncompleteOutputException):
        client.chat.completions.create(
            response_model=Pet, max_retries=0, **{**ASKED, "max_tokens": 4}
        )
