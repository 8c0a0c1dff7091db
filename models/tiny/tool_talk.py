"""Conversations with tools, made from the templates in tools.json, as turns of the chat format.

A conversation offers one to three functions. It requests a call of one of them, sometimes two
calls, returns the results and an answer that uses them; or it asks a question that needs no call.
`describe_tools`, `write_calls` and `write_result` write what the chat template renders.

A city, phrasing or function name that `held_out` uses as new is never in the training data. All
randomness comes from the `random.Random` argument.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import BOYS, GIRLS
from questions import SYSTEMS, Questions, Turn, as_typed, chosen, fill, is_held_out_sum

Tool = dict[str, Any]
Call = tuple[str, dict[str, Any]]  # a function's name and its arguments

NO_CALL_SHARE = 0.3
TWO_CALLS_SHARE = 0.06
RESULT_SHARE = 0.6  # of the conversations with a call; the others end with it
LATER_SHARE = 0.25  # of the conversations continue with a question or a second call


@dataclass(frozen=True, slots=True)
class ToolCase:
    """A request with tools. calls: the right calls; if empty, the right answer has no calls."""

    kind: str
    tools: list[Tool]
    says: str
    calls: list[Call]


def describe_tools(tools: Sequence[Tool]) -> str:
    """Write the tools as the template's system turn does, one per line."""
    lines = []
    for tool in tools:
        function = tool["function"]
        names = ", ".join((function.get("parameters") or {}).get("properties") or {})
        about = (function.get("description") or "").strip()
        lines.append(f"{function['name']}({names})" + (f": {about}" if about else ""))
    return "\n".join(["Tools:", *lines])


def write_calls(calls: Sequence[Call]) -> str:
    """Write calls in the Hermes format."""
    return "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        + "\n</tool_call>"
        for name, arguments in calls
    )


def write_result(result: str) -> str:
    """Write the result of a call as its system turn."""
    return f"Result: {result}"


class ToolTalk:
    """Draw conversations with tools. questions: requests that need no call."""

    def __init__(self, folder: Path, questions: Questions) -> None:
        written = json.loads((folder / "tools.json").read_text())
        self.questions = questions
        self.kinds: list[dict[str, Any]] = written["tools"]
        self.shares = [kind["share"] for kind in self.kinds]
        gaps = {name: words.split("|") for name, words in written["gaps"].items()}
        cities = gaps.pop("city")
        self.dealt_cities = [city for city in cities if not chosen(city, percent=15)]
        self.held_out_cities = [city for city in cities if chosen(city, percent=15)]
        self.gaps: dict[str, list[str]] = {
            **gaps,
            "name": GIRLS + BOYS,
            "thing": [f"{thing}s" for thing in questions.things],
        }

    def conversation(self, rng: random.Random) -> list[Turn]:
        """Draw one conversation that offers tools."""
        kind = self._kind(rng)
        tool, takes = self._tool(kind, rng)
        tools = self._with_others([tool], rng)
        turns: list[Turn] = [("system", _system(tools, rng))]
        if rng.random() < 0.1:
            turns += self._no_call(tools, rng)
        if rng.random() < NO_CALL_SHARE:
            turns += self._no_call(tools, rng)
            return turns
        turns += self._exchange(kind, tool, takes, rng)
        if turns[-1][1].startswith("<tool_call>") or rng.random() > LATER_SHARE:
            return turns
        if rng.random() < 0.5:
            return turns + self._exchange(kind, tool, takes, rng)
        return turns + self._no_call(tools, rng)

    def held_out(self) -> list[ToolCase]:
        """Return held-out requests in a fixed order."""
        rng = random.Random(3)
        found = []
        for kind in self.kinds:
            for at in range(20 if kind["kind"] == "weather" else 6):
                tool, takes = self._tool(kind, rng)
                new_city = "city" in takes.values() and at % 2 == 0
                gaps = self._fill_gaps(rng, self.held_out_cities if new_city else self.dealt_cities)
                says = fill(rng.choice(kind["says" if new_city else "held_out"]), gaps)
                call = (tool["function"]["name"], _arguments(takes, gaps))
                tools = self._with_others([tool], rng)
                kind_of_case = "new city" if new_city else "new phrasing"
                found.append(ToolCase(kind_of_case, tools, says, [call]))
        num_calls = len(found)
        for question in rng.sample(self.questions.held_out(), k=200):
            tools = self._with_others([self._tool(self._kind(rng), rng)[0]], rng)
            if question.kind in ("talk", "fact") and len(found) < num_calls + 40:
                found.append(ToolCase("no call", tools, question.says, []))
        return found

    def _exchange(
        self, kind: dict[str, Any], tool: Tool, takes: Mapping[str, str], rng: random.Random
    ) -> list[Turn]:
        """Draw a request, its call, and mostly the result with an answer."""
        name = tool["function"]["name"]
        gaps = self._fill_gaps(rng, self.dealt_cities)
        if kind["kind"] in ("weather", "time") and rng.random() < TWO_CALLS_SHARE:
            return self._two_calls(kind, name, takes, rng)
        says = as_typed(fill(rng.choice(kind["says"]), gaps), rng)
        turns = [("user", says), ("assistant", write_calls([(name, _arguments(takes, gaps))]))]
        if rng.random() < RESULT_SHARE:
            result, answer = rng.choice(kind["results"])
            turns.append(("system", write_result(result.format(**gaps))))
            turns.append(("assistant", answer.format(**gaps)))
        return turns

    def _two_calls(
        self, kind: dict[str, Any], name: str, takes: Mapping[str, str], rng: random.Random
    ) -> list[Turn]:
        both = [self._fill_gaps(rng, self.dealt_cities) for _ in range(2)]
        asked = " and ".join(gaps["city"] for gaps in both)
        says = fill(rng.choice(kind["says"][:6]), {**both[0], "city": asked})
        calls = [(name, _arguments(takes, gaps)) for gaps in both]
        turns = [("user", says), ("assistant", write_calls(calls))]
        result, answer = rng.choice(kind["results"])
        turns += [("system", write_result(result.format(**gaps))) for gaps in both]
        return [*turns, ("assistant", " ".join(answer.format(**gaps) for gaps in both))]

    def _no_call(self, tools: Sequence[Tool], rng: random.Random) -> list[Turn]:
        """Draw a question that needs none of the tools."""
        adds = {"add", "add_numbers", "sum", "plus"} & {tool["function"]["name"] for tool in tools}
        while True:
            turns = self.questions.exchange(rng)
            if not adds or not any(c.isdigit() for c in turns[0][1] + turns[1][1]):
                return turns

    def _kind(self, rng: random.Random) -> dict[str, Any]:
        (kind,) = rng.choices(self.kinds, weights=self.shares)
        return kind

    def _tool(self, kind: dict[str, Any], rng: random.Random) -> tuple[Tool, Mapping[str, str]]:
        """Draw a tool of a kind, and the gap that fills each of its parameters."""
        takes: Mapping[str, str] = rng.choice(kind["takes"])
        types = {p: "integer" if gap in ("number", "other") else "string"
                 for p, gap in takes.items()}  # fmt: skip
        function = {
            "name": rng.choice(kind["names"]),
            "description": rng.choice(kind["about"]),
            "parameters": {
                "type": "object",
                "properties": {name: {"type": kind} for name, kind in types.items()},
                "required": list(takes),
            },
        }
        return {"type": "function", "function": function}, takes

    def _with_others(self, tools: list[Tool], rng: random.Random) -> list[Tool]:
        """Return the tools and up to two of other kinds, in random order."""
        (kind,) = (k for k in self.kinds if tools[0]["function"]["name"] in k["names"])
        others = [k for k in self.kinds if k is not kind]
        num_others = rng.choice([0, 0, 1, 1, 2])
        tools = tools + [self._tool(k, rng)[0] for k in rng.sample(others, k=num_others)]
        rng.shuffle(tools)
        return tools

    def _fill_gaps(self, rng: random.Random, cities: Sequence[str]) -> dict[str, str]:
        number, other = rng.randint(0, 30), rng.randint(0, 20)
        while is_held_out_sum(number, other):
            number, other = rng.randint(0, 30), rng.randint(0, 20)
        return {
            **{gap: rng.choice(words) for gap, words in self.gaps.items()},
            "city": rng.choice(cities),
            "number": str(number),
            "other": str(other),
            "total": str(number + other),
            "hour": str(rng.randint(1, 12)),
            "minutes": f"{rng.randint(0, 59):02}",
        }


def _system(tools: Sequence[Tool], rng: random.Random) -> str:
    described = describe_tools(tools)
    return f"{rng.choice(SYSTEMS)}\n{described}" if rng.random() < 0.25 else described


def _arguments(takes: Mapping[str, str], gaps: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: int(gaps[gap]) if gap in ("number", "other") else gaps[gap]
        for name, gap in takes.items()
    }
