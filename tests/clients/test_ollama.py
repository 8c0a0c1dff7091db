"""The official client of Ollama: its types, streams, tools, schemas and error class."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
import pytest

from tests.clients.conftest import BOX
from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.running_server import RunningServer
from tests.serve.scripted_server import ScriptedServer

ollama = pytest.importorskip("ollama")

MESSAGES: Any = [{"role": "user", "content": "Who is Tom?"}]
ASKED: Any = {"model": "box", "messages": MESSAGES, "options": {"seed": 3, "num_predict": 24}}


class Pet(pydantic.BaseModel):
    """A pet of Tom's."""

    kind: Literal["cat", "dog"]
    is_here: bool


@pytest.fixture
def client(box_server: RunningServer) -> Any:
    return ollama.Client(host=box_server.url)


def test_whole_and_streamed_chats_are_equal(client: Any) -> None:
    whole = client.chat(**ASKED)
    assert whole.message.content != ""
    assert whole.done
    *parts, last = client.chat(**ASKED, stream=True)
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert last.eval_count == whole.eval_count > 0
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert whole.total_duration >= whole.eval_duration > 0


def test_a_completion_continues_the_context_of_the_last_one(client: Any) -> None:
    asked = {"model": "box", "options": ASKED["options"]}
    first = client.generate(prompt="Tom has a dog.", **asked)
    parts = [*client.generate(prompt="Tom has a dog.", stream=True, **asked)]
    assert "".join(part.response for part in parts) == first.response != ""
    assert parts[-1].context == first.context
    second = client.generate(prompt="And a cat.", context=first.context, **asked)
    assert list(second.context[: len(first.context)]) == list(first.context)
    raw = client.generate(prompt="Once upon a time", raw=True, **asked)
    assert raw.context is None
    assert raw.response != ""


def test_the_asynchronous_client_gives_the_same_answer(client: Any, box_server: Any) -> None:
    async def talk() -> tuple[str, str]:
        asynchronous = ollama.AsyncClient(host=box_server.url)
        whole = await asynchronous.chat(**ASKED)
        said = [part async for part in await asynchronous.chat(**ASKED, stream=True)]
        return whole.message.content, "".join(part.message.content for part in said)

    text = client.chat(**ASKED).message.content
    assert asyncio.run(talk()) == (text, text)


def test_answers_follow_a_schema(client: Any) -> None:
    options = {"seed": 3, "num_predict": 60}
    answer = client.chat(
        model="box", messages=MESSAGES, options=options, format=Pet.model_json_schema()
    )
    assert isinstance(Pet.model_validate_json(answer.message.content), Pet)


def test_models_are_listed_shown_and_running(client: Any) -> None:
    (model,) = client.list().models
    assert (model.model, model.details.family) == ("box", "llama")
    assert model.size > 0
    assert model.details.parameter_size.endswith(("K", "M"))
    (running,) = client.ps().models
    assert running.context_length == 512
    assert running.expires_at.astimezone().year < 9999
    shown = client.show("box:latest")
    assert client.chat(**{**ASKED, "model": "box:latest"}) is not None
    assert shown.modelinfo["llama.context_length"] == 512
    assert shown.capabilities[0] == "completion"


def test_embeddings_are_those_of_openais_route() -> None:
    texts = ["a little dog", "rain falls"]
    with RunningServer(BOX, "--threads", "1", "--convert", "embed") as server:
        client = ollama.Client(host=server.url)
        wanted = server.post("/v1/embeddings", {"input": texts})[1]["data"]
        answer = client.embed("box", texts, keep_alive=5, options={"num_ctx": 64})
        assert [list(one) for one in answer.embeddings] == [one["embedding"] for one in wanted]
        assert answer.prompt_eval_count > 0
        one = client.embed("box", texts[1], truncate=False)
        assert [*one.embeddings[0]] == wanted[1]["embedding"]
        plain = server.post("/v1/embeddings", {"input": texts[0], "normalize": False})[1]["data"]
        assert [*client.embeddings("box", texts[0]).embedding] == plain[0]["embedding"]
        assert list(client.embed("box", "").embeddings) == []
        assert client.show("box").capabilities[:2] == ["embedding", "completion"]
        with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
            client.embed("box", texts, options={"temperature": 1})


def test_python_functions_are_tools() -> None:
    def weather(city: str) -> str:
        """Return the weather.

        Args:
            city: The name of the city.
        """
        return f"cold in {city}"

    scripts = [pieces(call("weather", city="Bérgen")), ["Cold."]]
    for streams in (False, True):
        with ScriptedServer(TEMPLATE, scripts) as server:
            client = ollama.Client(host=server.url)
            said: Any = [*MESSAGES]
            answer = client.chat(model="fake", messages=said, tools=[weather], stream=streams)
            parts = [*answer] if streams else [answer]
            calls = [one for part in parts for one in part.message.tool_calls or ()]
            (called,) = calls
            assert called.function.arguments == {"city": "Bérgen"}
            result = weather(**called.function.arguments)
            said.append({"role": "assistant", "tool_calls": [called.model_dump()]})
            said.append({"role": "tool", "tool_name": "weather", "content": result})
            last = client.chat(model="fake", messages=said, tools=[weather])
            assert last.message.content == "Cold."
            prompt = bytes(server.engine.asked[1].prompt_ids).decode()
            assert '<tool_call>weather {"city": "Bérgen"}' in prompt
            assert "tool:cold in Bérgen;" in prompt


def test_refusals_raise_the_clients_class(client: Any) -> None:
    for asked, status, words in (
        ({**ASKED, "model": "other"}, 404, "is not served here"),
        ({**ASKED, "options": {"num_predct": 3}}, 400, "options.num_predct"),
        ({**ASKED, "messages": [{**MESSAGES[0], "images": [b"\x89PNG"]}]}, 400, "images"),
    ):
        for streams in (False, True):
            with pytest.raises(ollama.ResponseError, match=words) as refused:
                [*client.chat(**asked, stream=streams)]
            assert refused.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="quire pull"):
        client.pull("box")
