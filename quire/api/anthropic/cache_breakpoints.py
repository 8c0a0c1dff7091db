"""Breakpoints of the prompt cache: which beginnings of a prompt `cache_control` asks to keep.

A breakpoint ends a prefix of tools, system and messages. Where it lies in the rendered prompt is
found by rendering the conversation only so far: the text that both have in common is the prefix,
whatever the template does. Knows no cache. Always holds: a request has at most four breakpoints,
those of one hour before those of five minutes, and its prompt does not depend on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

from quire.api.anthropic.history import beginning_of, check_cache_control
from quire.api.anthropic.tool_fields import tool_offer
from quire.api.generation.chat_output import Conversation
from quire.api.generation.conversation import ConversationFields, rendered
from quire.api.generation.request_context import RequestContext
from quire.base.errors import InvalidParameter, RequestError
from quire.base.rare_records import CachePin

MAX_BREAKPOINTS = 4
LIFETIMES_MS = {"5m": 5 * 60_000.0, "1h": 60 * 60_000.0}
# Stands for what comes after tools and system. No prompt begins a message with it.
_PROBE = [{"role": "user", "content": "\ue000"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakpoint:
    """One breakpoint. path: of its block. tools, system, messages: what comes up to it."""

    path: str
    ttl: str
    tools: Any = None
    system: Any = None
    messages: Any = None


def breakpoints_of(given: Mapping[str, Any]) -> list[Breakpoint]:
    """Return the breakpoints of a request in order. Raises InvalidParameter.

    Only for a request with tools, system and messages of an allowed form.
    """
    marked = chain(_of_tools(given), _of_system(given), _of_messages(given))
    found = list(islice(marked, MAX_BREAKPOINTS + 1))  # each has a copy of what comes up to it
    check_cache_control("cache_control", given.get("cache_control"))
    if given.get("cache_control") is not None:  # the last block has one
        ttl = given["cache_control"].get("ttl") or "5m"
        found.append(Breakpoint(path="cache_control", ttl=ttl, messages=given["messages"]))
    param = "messages"
    if found:
        param = found[-1].path.partition("[")[0].partition(".")[0]
    if len(found) > MAX_BREAKPOINTS:
        raise InvalidParameter(
            f"at most {MAX_BREAKPOINTS} blocks may have cache_control; leave it out from "
            f"{found[MAX_BREAKPOINTS].path} on",
            param=param,
        )
    for before, after in pairwise(found):
        if (before.ttl, after.ttl) == ("5m", "1h"):
            raise InvalidParameter(
                f'{after.path} has cache_control with a ttl of "1h" after {before.path} with '
                f"{json.dumps(before.ttl)}; a longer ttl is allowed only before shorter ones",
                param=param,
            )
    return found


async def pins_of(
    context: RequestContext,
    fields: ConversationFields,
    conversation: Conversation,
    breakpoints: Sequence[Breakpoint],
    token_ids: Sequence[int],
) -> tuple[CachePin, ...]:
    """Return the prefixes of `token_ids` that the breakpoints of a request keep.

    fields: of the whole conversation. A prefix that its template cannot render alone is left out.
    """
    text, ends = conversation.text, dict[int, str]()
    for point in breakpoints:
        end = await _end_of(context, fields, text, point)
        if end and end not in ends:  # of equal ones the first has the longer lifetime
            ends[end] = point.ttl
    adds_special = context.given.get("add_special_tokens") is True
    counts = await context.run_in_thread(_token_counts, context, text, sorted(ends), adds_special)
    return tuple(
        CachePin(num_tokens=min(count, len(token_ids)), lifetime_ms=LIFETIMES_MS[ends[end]])
        for end, count in zip(sorted(ends), counts, strict=True)
    )


def _token_counts(
    context: RequestContext, text: str, ends: Sequence[int], adds_special: bool
) -> list[int]:
    """Return about how many tokens end before each of `ends`: the text between two is tokenized
    alone, so that a token across a border may count twice."""
    counts, start, total = [], 0, 0
    encode = context.engine.tokenizer.encode
    for end in ends:
        total += len(encode(text[start:end], add_special_tokens=adds_special and not start))
        counts.append(total)
        start = end
    return counts


async def _end_of(
    context: RequestContext, fields: ConversationFields, text: str, point: Breakpoint
) -> int:
    """Return where the prefix of a breakpoint ends in the prompt; 0 if that is not found."""
    if point.path == "cache_control":
        return len(text)
    end = await _shared_end(context, fields, text, point)
    system = context.given.get("system")
    if point.path.startswith("tools") and system is not None:
        # A template that writes tools behind the system has them in a prefix with both only.
        name = str(point.tools[-1].get("name"))
        if name not in text[:end]:
            return await _shared_end(context, fields, text, replace(point, system=system))
    return end


async def _shared_end(
    context: RequestContext, fields: ConversationFields, text: str, point: Breakpoint
) -> int:
    """Return where the prompt begins to differ from that of a breakpoint's prefix."""
    try:
        offer = None if point.tools is None else tool_offer({"tools": point.tools})
        messages = point.messages or _PROBE
        partial = replace(
            fields,
            messages=await context.run_if_large(beginning_of, point.system, messages),
            tools=None if offer is None else offer.shown,
            add_generation_prompt=False,
            continue_final_message=False,
        )
        beginning = await rendered(context, partial)
    except RequestError:  # a template may refuse what ends here
        return 0
    return _num_shared_chars(text, beginning.text)


def _num_shared_chars(one: str, other: str) -> int:
    """Return how many characters both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _of_tools(given: Mapping[str, Any]) -> Iterator[Breakpoint]:
    tools = given.get("tools") or []
    for at, tool in enumerate(tools):
        if (ttl := _ttl(tool)) is not None:
            yield Breakpoint(path=f"tools[{at}]", ttl=ttl, tools=tools[: at + 1])


def _of_system(given: Mapping[str, Any]) -> Iterator[Breakpoint]:
    system = given.get("system")
    for at, block in enumerate(system if isinstance(system, list) else []):
        if (ttl := _ttl(block)) is not None:
            path = f"system[{at}]"
            _check_text(path, block, "system")
            before = system[: at + 1] if isinstance(system, list) else []
            yield Breakpoint(path=path, ttl=ttl, tools=given.get("tools"), system=before)


def _of_messages(given: Mapping[str, Any]) -> Iterator[Breakpoint]:
    messages: list[Any] = given["messages"]
    for at, message in enumerate(messages):
        content = message["content"]
        for place, block in enumerate(content if isinstance(content, list) else []):
            path = f"messages[{at}].content[{place}]"
            inner = block.get("content")  # of a result, or a system block
            parts = inner if isinstance(inner, list) else []
            # One within keeps the whole block.
            for ttl in (*map(_ttl, parts), _ttl(block)):
                if ttl is None:
                    continue
                _check_text(path, block, "messages")
                last = {"role": message["role"], "content": content[: place + 1]}
                yield Breakpoint(
                    path=path,
                    ttl=ttl,
                    tools=given.get("tools"),
                    system=given.get("system"),
                    messages=[*messages[:at], last],
                )


def _ttl(block: Mapping[str, Any]) -> str | None:
    control = block.get("cache_control")
    return None if control is None else str(control.get("ttl") or "5m")


def _check_text(path: str, block: Mapping[str, Any], param: str) -> None:
    """Refuse a breakpoint at an empty text, as Anthropic does."""
    if block["type"] == "text" and not block["text"]:
        raise InvalidParameter(
            f"{path} has cache_control and an empty text; put it on a block with text", param=param
        )
