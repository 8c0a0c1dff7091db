"""openai-agents, pydantic-ai and llama-index against a scripted server: tools and answers.

They need different versions of openai, so that `make clients` runs this file twice.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.clients.scripts import TEMPLATE, call, pieces
from tests.serve.scripted_server import ScriptedServer

SCRIPTS = [pieces(call("weather", city="Oslo")), ["Cold."]]


def test_openai_agents_run_tools_over_responses() -> None:
    agents = pytest.importorskip("agents")
    cities: list[str] = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        cities.append(city)
        return "cold"

    async def run(url: str) -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = agents.OpenAIResponsesModel("fake", openai_client=client)
            tool = agents.function_tool(weather)
            agent = agents.Agent(name="box", instructions="Look.", model=model, tools=[tool])
            whole = await agents.Runner.run(agent, "Where is it cold?")
            streamed = agents.Runner.run_streamed(agent, "Where is it cold?")
            kinds = [event.type async for event in streamed.stream_events()]
            assert streamed.final_output == whole.final_output
            return str(whole.final_output), kinds

    agents.set_tracing_disabled(True)
    with ScriptedServer(TEMPLATE, SCRIPTS * 2) as server:
        text, kinds = asyncio.run(run(server.url))
    assert (text, cities) == ("Cold.", ["Oslo", "Oslo"])
    assert "raw_response_event" in kinds


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai_runs_tools_over_three_apis(api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    cities: list[str] = []

    def model_of(url: str) -> Any:
        if api == "anthropic":
            anthropic = pytest.importorskip("pydantic_ai.models.anthropic")
            providers = pytest.importorskip("pydantic_ai.providers.anthropic")
            provider = providers.AnthropicProvider(base_url=url, api_key="none")
            return anthropic.AnthropicModel("fake", provider=provider)
        models = pytest.importorskip("pydantic_ai.models.openai")
        providers = pytest.importorskip("pydantic_ai.providers.openai")
        provider = providers.OpenAIProvider(base_url=f"{url}/v1", api_key="none")
        kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
        return kind("fake", provider=provider)

    with ScriptedServer(TEMPLATE, SCRIPTS) as server:
        agent = pydantic_ai.Agent(model_of(server.url))

        @agent.tool_plain  # type: ignore[untyped-decorator]
        def weather(city: str) -> str:
            """Return the weather of a city."""
            cities.append(city)
            return "cold"

        found = agent.run_sync("Where is it cold?")
    assert (found.output, cities) == ("Cold.", ["Oslo"])


def test_llama_index_chats_streams_and_calls_tools() -> None:
    llms = pytest.importorskip("llama_index.llms.openai_like")
    core = pytest.importorskip("llama_index.core.llms")
    tools = pytest.importorskip("llama_index.core.tools")

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return "cold"

    said = [core.ChatMessage(role="user", content="Where is it cold?")]
    with ScriptedServer(TEMPLATE, [["Cold", "."], ["Cold", "."], *SCRIPTS]) as server:
        llm = llms.OpenAILike(
            model="fake",
            api_base=f"{server.url}/v1",
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=8192,
            max_retries=0,
        )
        assert llm.chat(said).message.content == "Cold."
        assert "".join(part.delta for part in llm.stream_chat(said)) == "Cold."
        tool = tools.FunctionTool.from_defaults(fn=weather)
        answer = llm.chat_with_tools([tool], chat_history=said)
        calls = llm.get_tool_calls_from_response(answer)
    assert [(each.tool_name, each.tool_kwargs) for each in calls] == [("weather", {"city": "Oslo"})]
