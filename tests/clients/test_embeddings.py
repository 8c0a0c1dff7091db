"""The official client's embeddings: lists, base64 (its default), dimensions, errors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from tests.clients.conftest import BOX
from tests.serve.running_server import RunningServer

TEXTS = ["a little dog", "rain falls"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[str]:
    flags = ("--threads", "1", "--convert", "embed", "--matryoshka-dimensions", "any")
    with RunningServer(BOX, *flags) as server:
        yield f"{server.url}/v1"


@pytest.fixture
def client(embedder: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedder, api_key="none", max_retries=0) as client:
        yield client


def test_numbers_and_base64_are_the_same_vectors(client: openai.OpenAI) -> None:
    default = client.embeddings.create(model="box", input=TEXTS)  # asks for base64, and decodes it
    numbers = client.embeddings.create(model="box", input=TEXTS, encoding_format="float")
    raw = client.embeddings.create(model="box", input=TEXTS, encoding_format="base64")
    assert default.object == "list"
    assert [one.index for one in default.data] == [0, 1]
    for at in range(2):
        wanted = np.array(numbers.data[at].embedding, np.float32)
        assert (np.array(default.data[at].embedding, np.float32) == wanted).all()
        text = raw.data[at].embedding
        assert isinstance(text, str)
        assert base64.b64decode(text) == wanted.astype("<f4").tobytes()
    assert default.usage.prompt_tokens == default.usage.total_tokens > 0
    assert numbers.usage == default.usage


def test_ids_dimensions_and_the_asynchronous_client(client: openai.OpenAI, embedder: str) -> None:
    async def asked() -> list[float]:
        async with openai.AsyncOpenAI(base_url=embedder, api_key="none") as other:
            found = await other.embeddings.create(model="box", input=[[5, 6], [7]], dimensions=8)
            return found.data[0].embedding

    one = client.embeddings.create(model="box", input=[5, 6], dimensions=8, user="someone")
    assert len(one.data[0].embedding) == 8
    assert asyncio.run(asked()) == one.data[0].embedding


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="box", input="a", dimensions=1000)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="box", input=[5] * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
